"""Policy for the allocation's end: warnings, the agreed stop step (protocol in run/heartbeat.py), SIGTERM.

Owns: whether there is time for a save, and what follows from what Slurm says of the job.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from .policy_basics import Decision, after_stop, clear, end, outcome_of
from .policy_types import (
    Commit,
    JobFate,
    KillWorkers,
    Note,
    ProposalAnswer,
    Propose,
    Stage,
    State,
    StopPlan,
    Terminated,
    Warned,
)
from .run.heartbeat import Phase
from .run.outcome import EXIT_CANCELLED, EXIT_FAILED, EXIT_REQUEUE, Cause, Next, Outcome

END_MARGIN = 8.0  # seconds before the allocation's end by which the requeue must have been asked for
UNKNOWN_SAVE = 5.0  # seconds a save is taken to need before one was seen


def _lead_needed(state: State) -> float:
    medians = [r.median for r in state.ranks.values() if r.median]
    return 3 * (median(medians) if medians else 0.0) + (1.5 * state.save_seconds or UNKNOWN_SAVE)


def warned(state: State, e: Warned) -> Decision:
    if state.stop is not None or state.then is not None:
        return state, ()
    left = e.seconds_left
    note = Note("warned", {"cause": e.cause.value, "reason": e.reason, "seconds_left": left})
    deadline = None if left is None else state.now + max(0.0, left - END_MARGIN)
    plan = StopPlan(e.cause, e.reason, deadline, 0, 2, requeue=e.requeue)
    has_stepped = state.ranks and all(r.phase not in (Phase.START,) for r in state.ranks.values())
    too_late = left is not None and left < _lead_needed(state)
    if state.stage is not Stage.RUNNING or not has_stepped or too_late:
        why = "too little time for a save" if too_late else "nothing new to save"
        state = replace(state, stop=replace(plan, reason=f"{e.reason}; stopped at once: {why}"))
        assert state.stop is not None
        state, actions = clear(state, after_stop(state, state.stop))
        return state, (note, *actions)
    state, actions = _propose(replace(state, stop=plan))
    return state, (note, *actions)


def _propose(state: State) -> Decision:
    assert state.stop is not None
    furthest = max(r.step for r in state.ranks.values())
    plan = replace(state.stop, step=furthest + state.stop.margin, acks=frozenset())
    return replace(state, stop=plan), (Propose(state.generation, plan.step, True),)


def answered(state: State, e: ProposalAnswer) -> Decision:
    plan = state.stop
    if plan is None or plan.is_committed or e.generation != state.generation or e.step != plan.step:
        return state, ()
    if state.stage is not Stage.RUNNING:
        return state, ()
    if not e.is_accepted:
        # Steps are shorter than the way there and back: look further ahead.
        ranks = {k: replace(r, step=max(r.step, e.max_step)) if r.node == e.node else r for k, r in state.ranks.items()}
        return _propose(replace(state, ranks=ranks, stop=replace(plan, margin=min(plan.margin * 2, 4096))))
    plan = replace(plan, acks=plan.acks | {e.node})
    state = replace(state, stop=plan)
    if plan.acks < set(state.agents):
        return state, ()
    note = Note("stop_committed", {"step": plan.step})
    return replace(state, stop=replace(plan, is_committed=True)), (note, Commit(state.generation, plan.step, True))


def terminated(state: State, e: Terminated) -> Decision:
    evidence = {"fate": e.fate.value, "by": e.by, **e.evidence}
    note = Note("terminated", evidence)
    if e.fate is JobFate.PREEMPTED:
        reason = "preempted by a job of higher priority"
        state, actions = warned(state, Warned(Cause.PREEMPTED, reason, e.seconds_left))
        return state, (note, *actions)
    is_own = e.by == "launch"
    if is_own and e.fate is JobFate.UNKNOWN:
        return state, (note,)  # Slurm does not answer; verdict_timeout ends the wait
    if e.fate is JobFate.RUNNING and not is_own and state.trouble and state.trouble.cause is Cause.NODE_FAILURE:
        return state, (note,)  # Slurm is clearing up after the node; its verdict is still to come
    if state.then is not None and e.fate is not JobFate.CANCELLED:
        return state, (note,)  # already ending, by a decision of our own
    outcome = replace(_fate_outcome(state, e), evidence=dict(evidence))
    is_asked = outcome.next is Next.REQUEUE and e.fate is JobFate.TIME_LIMIT
    state, actions = end(state, outcome, ask=is_asked)
    return state, (note, KillWorkers(state.generation), *actions)


def _fate_outcome(state: State, e: Terminated) -> Outcome:
    s = state.settings
    lost = state.trouble if state.trouble and state.trouble.cause is Cause.NODE_FAILURE else None
    if e.fate is JobFate.REQUEUED:
        cause = Cause.NODE_FAILURE if lost else (state.stop.cause if state.stop else Cause.PREEMPTED)
        reason = lost.reason if lost else "Slurm took the allocation and requeued the job"
        node = lost.node if lost else None
        return replace(outcome_of(state, cause, Next.REQUEUE, EXIT_REQUEUE, reason), node=node)
    if e.fate is JobFate.NODE_FAIL:
        reason = (lost.reason if lost else "a node failed") + "; Slurm did not requeue the job"
        return outcome_of(state, Cause.NODE_FAILURE, Next.NOTHING, EXIT_FAILED, reason)
    if e.fate is JobFate.TIME_LIMIT:
        # Without a warning in time: the last interval is lost, the run is not.
        if s.can_requeue:
            return outcome_of(state, Cause.TIME_LIMIT, Next.REQUEUE, EXIT_REQUEUE, "killed at the time limit")
        return outcome_of(state, Cause.TIME_LIMIT, Next.NOTHING, EXIT_FAILED, "killed at the time limit")
    return outcome_of(
        state, Cause.CANCELLED, Next.NOTHING, EXIT_CANCELLED, "cancelled (SIGTERM while the job was wanted)"
    )
