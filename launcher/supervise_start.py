"""Before an attempt begins: whether there is anything to do, and what of the configuration matters to the policy.

Owns: the checks at a job's start. What follows from them is brought about by supervise.py. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import jobinfo
from . import policy_types as p
from .budgets import NO_WORD
from .chain import predecessor_was_cancelled
from .continuation import Continuation
from .run.events import EventLog
from .run.files import read_json
from .run.layout import RunDir
from .run.outcome import (
    EXIT_CANCELLED,
    EXIT_FAILED,
    EXIT_REQUEUE,
    NOT_STARTED,
    SITE_S_DOING,
    Cause,
    Next,
    Outcome,
)
from .run.submissions import Submission, is_called_off
from .state import attempts_of, submission_of


def end_already(run: RunDir, mine: list[Submission]) -> int | None:
    """The exit code of a run that is over though its job starts; None if there is something to do.

    Slurm may requeue a job that ended inside its preemption grace, or for its exit code (RequeueExit), and a successor
    may start in the moment in which it is being withdrawn. What ended only because it could not be started again goes
    on when it is.
    """
    is_off = is_called_off(mine)
    attempts = attempts_of(run, *mine)
    last = Outcome.seen(attempts[-1]) if attempts else None
    if last is None or last.next is not Next.NOTHING or last.cause is Cause.SUPERSEDED:
        return EXIT_CANCELLED if is_off else None
    is_same = submission_of(attempts[-1]) == mine[-1].number
    goes_on = last.cause in SITE_S_DOING or NOT_STARTED in last.evidence
    return None if is_same and goes_on and not is_off else last.exit_code


def job_at_work(run: RunDir, job_id: str, state_of: Callable[[str], str | None] = jobinfo.state_of) -> str | None:
    """Another job that works on the run's newest attempt, as far as Slurm says so.

    Two jobs that started one after the other would fence each other out for ever, through their requeues or successors.
    """
    attempt = next(reversed(run.all_attempts()), None)
    number = None if attempt is None or attempt.outcome.exists() else submission_of(attempt)
    if attempt is None or number is None or Submission(run, number).mode == "salloc":
        return None  # an allocation of the user's own runs on when the attempt in it is dead
    other = read_json(attempt.start).get("job_id")
    return str(other) if other and str(other) != job_id and state_of(str(other)) == "RUNNING" else None


def without_scontrol(is_chain: bool) -> str:
    """What it means for the run that its batch host has no scontrol."""
    if is_chain:
        return (
            "signals cannot be told apart, and the next job, which goes on all the same, can neither be put off nor be "
            "kept from nodes that turn out to be bad"
        )
    return (
        "this job cannot be requeued from inside, and signals cannot be told apart; at a warning the run saves and "
        "stops (`stoker watch --fix` or `stoker resume` goes on); Slurm's own requeues after a node failure work"
    )


def settings_of(config: dict[str, Any], is_batch: bool, is_local: bool, names: Sequence[str] = ()) -> p.Settings:
    """`is_batch`: a job of Slurm's that may be started again; else a loop around us does that."""
    cluster, r = config["cluster"], config["resilience"]
    return p.Settings(
        nodes=cluster["nodes"],
        procs_per_node=cluster["procs_per_node"],
        can_requeue=r["continuation"] != "none",
        warning=float(r["warning"]),
        hang_timeout=r["hang_timeout"],
        start_timeout=r["start_timeout"],
        save_timeout=r["save_timeout"],
        eval_timeout=r["eval_timeout"],
        # The agents load torch and the trainer: part of the start.
        gather_timeout=r["start_timeout"],
        # Without Slurm nobody else has a word on a lost node.
        verdict_timeout=0.0 if is_local else 300.0,
        closed_timeout=0.0 if is_local else 20.0,
        max_restarts=r["max_restarts"],
        progress_steps=r["progress_steps"],
        by_topology=config["fabric"]["rank_order"] == "topology",
        is_own_script=bool(config["task"]["cmd"]),
        is_chain=is_batch and r["continuation"] == "chain",
        names=tuple(names),
    )


def refusal(continuation: Continuation, own: Submission, onward: Next, events: EventLog) -> p.Finish | None:
    """How to end what must not begin: a budget is used up, it was cancelled, a node is known to fail launches."""
    reason = continuation.refusal()
    if reason is not None:
        return p.Finish(Outcome(Cause.NO_PROGRESS, Next.NOTHING, EXIT_FAILED, f"{reason}; `stoker resume` goes on"))
    after = own.intention.get("after")
    was_killed = bool(continuation.past) and continuation.past[-1].cause == NO_WORD
    if after and was_killed and predecessor_was_cancelled(str(after)):
        reason = f"job {after} was cancelled and killed before it could say so"
        return p.Finish(Outcome(Cause.CANCELLED, Next.NOTHING, EXIT_CANCELLED, reason))
    bad = continuation.bad_in_allocation()
    if bad:
        events.write("bad_nodes_allocated", nodes={f.node: f.reason for f in bad})
    if onward is Next.NOTHING or not continuation.is_hopeless(bad):
        return None
    names = ", ".join(f"{f.node} ({f.reason})" for f in bad)
    return p.Finish(Outcome(Cause.LAUNCH_FAILED, onward, EXIT_REQUEUE, f"allocated all the same: {names}"), ask=True)
