"""Policy for the allocation's end: warnings, the agreed stop step (protocol in run/heartbeat.py), SIGTERM.

Owns: whether there is time for a save, and what follows from what Slurm says of the job.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from .policy_basics import Decision, after_stop, clear, end, outcome_of, requeue_or_fail
from .policy_trouble import KILLED, blamed_for_silence
from .policy_types import (
    AskAgain,
    Blame,
    Commit,
    JobFate,
    KillWorkers,
    Note,
    ProposalAnswer,
    Propose,
    SlurmSaid,
    Stage,
    State,
    StopPlan,
    Terminated,
    Warned,
)
from .run.heartbeat import Phase, Save
from .run.outcome import EXIT_CANCELLED, EXIT_FAILED, EXIT_REQUEUE, Cause, Next, Outcome

END_MARGIN = 8.0  # seconds before the allocation's end by which the requeue must have been asked for
KILL_PATIENCE = 2.0  # seconds that killed workers may take when the allocation's end is near
PREEMPTED = "preempted by a job of higher priority"
UNKNOWN_SAVE = 5.0  # seconds a save is taken to need before one was seen


def _time_for(state: State, left: float | None) -> Save:
    """What `left` seconds are enough for. A save in flight is done in the time of a whole one at most."""
    medians = [r.median for r in state.ranks.values() if r.median]
    save = state.save_seconds or UNKNOWN_SAVE / 1.5
    needed = 3 * (median(medians) if medians else 0.0) + 1.5 * save
    if left is None:
        return Save.BOTH
    if left < needed:
        return Save.UNDER_WAY
    # One in flight is given up only where that leaves time for the stop's own, by when the workers are killed.
    return Save.OWN if save <= left - END_MARGIN < needed + save else Save.BOTH


def warned(state: State, e: Warned) -> Decision:
    was_requested = state.stop is not None and state.stop.cause is Cause.REQUESTED
    if (state.stop is not None and not was_requested) or state.then is not None:
        return state, ()
    left = e.seconds_left
    note = Note("warned", {"cause": e.cause.value, "reason": e.reason, "seconds_left": left})
    deadline = None if left is None else state.now + max(0.0, left - END_MARGIN)
    # What a script of the user's own has to save, and in what time, is its own affair.
    is_own = state.settings.is_own_script
    save = Save.BOTH if is_own else _time_for(state, left)
    too_late = save is Save.UNDER_WAY
    plan = StopPlan(e.cause, e.reason, deadline, 0, 2, requeue=e.requeue, save=save)
    has_stepped = is_own or (state.ranks and all(r.phase is not Phase.START for r in state.ranks.values()))
    if state.stage is Stage.AWAITING_SLURM and state.trouble and state.trouble.cause is Cause.REQUESTED:
        return end(state, after_stop(state, plan), ask=True)  # its ranks had the signal before us, and have all ended
    has_ended = deadline is not None and deadline <= state.now
    if state.stage is not Stage.RUNNING or not has_stepped or (too_late and has_ended):
        why = "too little time for a save" if too_late else "nothing new to save"
        state = replace(state, stop=replace(plan, reason=f"{e.reason}; stopped at once: {why}"))
        assert state.stop is not None
        state, actions = clear(state, after_stop(state, state.stop))
        return state, (note, *actions)
    if too_late:  # for another one; one that the ranks are writing already may have just that time
        plan = replace(plan, reason=f"{e.reason}; too little time for a save")
    state, actions = _propose(replace(state, stop=plan))
    return state, (note, *actions)


def _propose(state: State) -> Decision:
    assert state.stop is not None
    furthest = max(r.step for r in state.ranks.values())
    plan = replace(state.stop, step=furthest + state.stop.margin, acks=frozenset())
    return replace(state, stop=plan), (Propose(state.generation, plan.step, plan.save),)


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
    return replace(state, stop=replace(plan, is_committed=True)), (note, Commit(state.generation, plan.step, plan.save))


def asked_again(state: State, reason: str) -> State:
    """A rank of the user's own script has ended and wants the run to be started again: the others are to end as well.

    They are not signalled. Usually all ranks have agreed on it, and some are still saving.
    """
    if state.stop is not None or state.stage is not Stage.RUNNING:
        return state
    deadline = state.now + state.settings.warning
    return replace(state, stop=StopPlan(Cause.REQUESTED, reason, deadline, 0, 0, is_committed=True))


def overdue(state: State, plan: StopPlan) -> Decision:
    """The allocation is about to end and the stop is not through: the requeue has to be asked for now."""
    if state.stage is Stage.RUNNING:
        what = "" if plan.save is Save.UNDER_WAY else "; the save was not done in time"
        late = replace(plan, reason=f"{plan.reason}{what}")
        return clear(replace(state, stop=late), after_stop(state, late))
    if state.stage is Stage.CLEARING and state.now < state.since + KILL_PATIENCE:
        return state, ()
    return end(state, state.then or after_stop(state, plan), ask=True)


def terminated(state: State, e: Terminated) -> Decision:
    """SIGTERM to the batch script or to a node's agent; Slurm has been asked what it means."""
    evidence = {"fate": e.fate.value, "by": e.by, **e.evidence}
    note = Note("terminated", evidence)
    if e.fate is JobFate.PREEMPTED:
        state, actions = warned(state, Warned(Cause.PREEMPTED, PREEMPTED, e.seconds_left))
        return state, (note, *actions)
    if e.fate is JobFate.RUNNING and state.trouble and state.trouble.cause is Cause.NODE_FAILURE:
        return state, (note,)  # Slurm is clearing up after the node; its verdict is still to come
    if e.fate is not JobFate.CANCELLED:
        own = state.then or (after_stop(state, state.stop) if state.stop else None)
        if own is not None and (e.by == "batch" or e.fate is not JobFate.RUNNING):
            # We were ending it anyway, and the time is up.
            state, actions = end(state, own, ask=True)
            return state, (note, KillWorkers(state.generation), *actions)
        if own is not None:
            return state, (note,)
    if e.fate is JobFate.UNKNOWN:
        # Nothing is decided without evidence. Whoever signalled us will make itself felt; meanwhile we ask again.
        return state, (note, AskAgain())
    outcome = replace(_fate_outcome(state, e), evidence=dict(evidence))
    state, actions = end(state, outcome, ask=e.fate is not JobFate.REQUEUED)
    return state, (note, KillWorkers(state.generation), *actions)


def slurm_said(state: State, e: SlurmSaid) -> Decision:
    """Why did srun end and take the agents along?"""
    note = Note("slurm_said", {"fate": e.fate.value, **e.evidence})
    if state.stage is not Stage.AWAITING_SLURM:
        return state, (note,)
    if state.stop is not None and e.fate is not JobFate.CANCELLED:
        state, actions = end(state, after_stop(state, state.stop), ask=True)
        return state, (note, *actions)
    if e.fate is JobFate.UNKNOWN:
        return state, (note,)  # Slurm does not answer; the trouble's patience ends the wait
    blames: tuple[Blame, ...] = ()
    if e.fate is JobFate.PREEMPTED and state.trouble and state.trouble.cause is Cause.REQUESTED:
        outcome = requeue_or_fail(state, Cause.PREEMPTED, PREEMPTED)
    elif e.fate in (JobFate.RUNNING, JobFate.PREEMPTED):
        assert state.trouble is not None
        if state.launch_code in KILLED and not state.is_released:
            reason = (
                "the agents' step was killed from outside while the job ran on (scancel of the step, or out of memory)"
            )
            outcome = outcome_of(state, Cause.CANCELLED, Next.NOTHING, EXIT_CANCELLED, reason)
        else:
            outcome = requeue_or_fail(state, state.trouble.cause, state.trouble.reason)
            outcome = replace(outcome, node=state.trouble.node)
            blames = blamed_for_silence(state)
    else:
        outcome = _fate_outcome(state, e)
    state, actions = end(state, replace(outcome, evidence=dict(e.evidence)), ask=e.fate is not JobFate.REQUEUED)
    return state, (note, *blames, *actions)


def _fate_outcome(state: State, e: Terminated | SlurmSaid) -> Outcome:
    match e.fate:
        case JobFate.REQUEUED:
            return _requeued(state, e)
        case JobFate.NODE_FAIL:
            lost = _lost(state, e)
            node, reason = lost or (None, "a node failed")
            how = "" if state.settings.is_chain else "; Slurm did not requeue the job"
            return replace(_onward_in_chain(state, Cause.NODE_FAILURE, reason + how), node=node)
        case JobFate.TAKEN:
            how = "" if state.settings.is_chain else "; Slurm ends preempted jobs here: `stoker resume` goes on"
            return _onward_in_chain(state, Cause.PREEMPTED, f"preempted by a job of higher priority{how}")
        case JobFate.ENDED:
            reason = "the batch script was killed, or ended, before the supervisor"
            return requeue_or_fail(state, Cause.CRASH, reason)
        case JobFate.TIME_LIMIT:
            # Without a warning in time: the last interval is lost, the run is not.
            return requeue_or_fail(state, Cause.TIME_LIMIT, "killed at the time limit")
    reason = "cancelled (SIGTERM, and the job is not started again)"
    return outcome_of(state, Cause.CANCELLED, Next.NOTHING, EXIT_CANCELLED, reason)


def _requeued(state: State, e: Terminated | SlurmSaid) -> Outcome:
    """Slurm starts the job again. Why: a node that we lost or Slurm did, else what it says, else that we stopped."""
    lost = _lost(state, e)
    if lost is not None or e.why is Cause.NODE_FAILURE:
        cause = Cause.NODE_FAILURE
        node, reason = lost or (None, "a node failed")
    else:
        node, cause = None, e.why or (state.stop.cause if state.stop else Cause.REQUEUED)
        reason = _REQUEUE_REASONS.get(cause, "Slurm took the allocation and requeued the job")
    return replace(outcome_of(state, cause, Next.REQUEUE, EXIT_REQUEUE, reason), node=node)


_REQUEUE_REASONS = {
    Cause.PREEMPTED: "preempted by a job of higher priority, which Slurm requeued the job for",
    Cause.REQUEUED: "the job was requeued by an administrator or by hand",
}


def _lost(state: State, e: Terminated | SlurmSaid) -> tuple[str | None, str] | None:
    """(node, reason) of a node that we lost, or that Slurm holds for down."""
    if state.trouble is not None and state.trouble.cause is Cause.NODE_FAILURE:
        return state.trouble.node, state.trouble.reason
    if e.down:
        return e.down[0], f"Slurm holds {', '.join(e.down)} for down"
    return None


def _onward_in_chain(state: State, cause: Cause, reason: str) -> Outcome:
    """What Slurm ends without starting it again goes on in the successor only."""
    if state.settings.is_chain:
        return requeue_or_fail(state, cause, reason)
    return outcome_of(state, cause, Next.NOTHING, EXIT_FAILED, reason)
