"""Before an attempt begins: whether there is anything to do, and what of the configuration matters to the policy.

Owns: the checks at a job's start. What follows from them is brought about by supervise.py. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import policy_types as p
from .budgets import NO_WORD
from .chain import predecessor_was_cancelled
from .continuation import Continuation
from .run.events import EventLog
from .run.layout import RunDir
from .run.outcome import EXIT_CANCELLED, EXIT_FAILED, EXIT_REQUEUE, Cause, Next, Outcome
from .run.submissions import Submission, is_called_off
from .state import attempts_of, submission_of


def end_already(run: RunDir, mine: list[Submission]) -> int | None:
    """The exit code of a run that is over though its job starts; None if there is something to do.

    Slurm may requeue a job that was finished inside its preemption grace, and a successor may start in the moment in
    which it is being withdrawn.
    """
    own = mine[-1]
    attempts = attempts_of(run, *mine)
    last = Outcome.read(attempts[-1]) if attempts else None
    is_over = last is not None and last.next is Next.NOTHING and last.cause is not Cause.SUPERSEDED
    if last is not None and is_over and (last.cause is Cause.FINISHED or submission_of(attempts[-1]) != own.number):
        return last.exit_code
    return EXIT_CANCELLED if is_called_off(mine) else None


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
