"""What the supervisor decides: one pure function, (state, event) -> (state, actions).

Owns: dispatch, news of ranks, and time. The start is policy_start.py's, when workers stop policy_stop.py's, what
follows when something breaks policy_trouble.py's; what they build on is policy_basics.py's. How it is done is not
decided here (supervise.py). Tested as a table and by simulation.
"""

from __future__ import annotations

from dataclasses import replace

from .policy_basics import Decision, all_ended, cleared, end, outcome_of, requeue_or_fail
from .policy_start import failed_at_start, form_if_complete, joined, waiting
from .policy_stop import answered, asked_again, overdue, slurm_said, terminated, warned
from .policy_trouble import act_on_trouble, agent_lost, blamed_for_silence, launch_ended, look_for_hangs, suspect
from .policy_types import (
    AgentFailed,
    AgentJoined,
    AgentLost,
    AgentReady,
    Blame,
    Event,
    LaunchEnded,
    NodeStatus,
    Note,
    ProposalAnswer,
    RankExited,
    RankReport,
    RankView,
    SlurmSaid,
    Stage,
    State,
    StoreUp,
    Superseded,
    Terminated,
    Tick,
    Trouble,
    Warned,
)
from .run.heartbeat import Phase
from .run.outcome import EXIT_FAILED, EXIT_REQUEUE, Cause, Next

CLEAR_TIMEOUT = 60.0  # seconds that killed workers may take to be gone
FIRST_OF_SIGNALS = 128  # a shell's exit code for a command that signal N ended is 128 + N
CULPRIT_GRACE = 3.0  # seconds in which the true culprit of a lost peer usually shows itself


def decide(state: State, event: Event, now: float) -> Decision:
    """The next state and what is to be done. `now`: monotonic seconds."""
    state = replace(state, now=now)
    if state.stage is Stage.DONE:
        return state, ()
    match event:
        case Tick():
            return _tick(state)
        case AgentJoined():
            return joined(state, event)
        case AgentReady() if event.node not in state.agents:
            return state, ()  # it was given up meanwhile
        case AgentReady():
            view = replace(state.agents[event.node], is_ready=True)
            return form_if_complete(replace(state, agents={**state.agents, event.node: view}))
        case StoreUp():
            return form_if_complete(replace(state, store=(event.host, event.port)))
        case AgentLost():
            return agent_lost(state, event)
        case AgentFailed():
            return failed_at_start(state, event)
        case NodeStatus():
            return _status(state, event)
        case RankReport():
            return _report(state, event)
        case RankExited():
            return _exited(state, event)
        case ProposalAnswer():
            return answered(state, event)
        case Warned():
            return warned(state, event)
        case Terminated():
            return terminated(state, event)
        case SlurmSaid():
            return slurm_said(state, event)
        case LaunchEnded():
            return launch_ended(state, event)
        case Superseded():
            reason = "a later attempt of this run exists"
            return end(state, outcome_of(state, Cause.SUPERSEDED, Next.NOTHING, EXIT_FAILED, reason))


def _of_generation(state: State, generation: int, rank: int) -> RankView | None:
    return state.ranks.get(rank) if generation == state.generation else None


def _with_rank(state: State, rank: int, view: RankView) -> State:
    return replace(state, ranks={**state.ranks, rank: view})


def _status(state: State, e: NodeStatus) -> Decision:
    ranks = dict(state.ranks)
    for r in e.ranks:
        view = ranks.get(r.rank)
        if view is None or r.generation != state.generation:
            continue
        # Never back: a status may be older than the worker's own last word.
        step = max(view.step, r.step)
        is_named = view.is_named and step == view.step
        ranks[r.rank] = replace(
            view, step=step, phase=r.phase, sequence=r.sequence, age=r.age, median=r.median, is_named=is_named
        )
    state = replace(state, ranks=ranks)
    done = min((r.step for r in ranks.values() if r.phase is not Phase.SILENT), default=0)
    if done > state.best_step:
        state = replace(state, best_step=done)
        if state.restarts and done >= state.mark + state.settings.progress_steps:
            state = replace(state, restarts=0, start_crashes=())
    return state, ()


def _report(state: State, e: RankReport) -> Decision:
    view = _of_generation(state, e.generation, e.rank)
    if view is None:
        return state, ()
    if e.event == "checkpoint_saved" and e.step is not None:
        quickest = min(state.save_seconds or e.seconds, e.seconds)
        return replace(state, saved_step=e.step, save_seconds=quickest, best_step=max(state.best_step, e.step)), ()
    if e.event == "ended":
        step = view.step if e.step is None else e.step
        state = _with_rank(state, e.rank, replace(view, ended=e.finished, step=step))
        return asked_again(state, f"rank {e.rank} {e.error}") if e.cause is Cause.REQUESTED else state, ()
    if e.event == "peer_lost":
        trouble = Trouble(
            Cause.CRASH, f"rank {e.rank} lost a peer: {e.error}", state.now + CULPRIT_GRACE, e.rank, view.node
        )
        return suspect(state, trouble)
    if e.event == "failed":
        trouble = Trouble(e.cause, e.error, state.now, e.rank, view.node, e.traceback, is_certain=True)
        return suspect(state, trouble)
    return state, ()


def _exited(state: State, e: RankExited) -> Decision:
    view = _of_generation(state, e.generation, e.rank)
    if view is None:
        return state, ()
    state = _with_rank(state, e.rank, replace(view, is_alive=False))
    if state.stage is Stage.CLEARING:
        return cleared(state)
    if state.stage is not Stage.RUNNING:
        return state, ()
    if view.ended is not None and (e.code == 0 or state.settings.is_own_script):
        notes: tuple[Note, ...] = ()
        if not view.ended and e.code is not None and e.code not in (0, EXIT_REQUEUE) and e.code < FIRST_OF_SIGNALS:
            state = _with_rank(state, e.rank, replace(state.ranks[e.rank], failed_stop=e.code))
            notes = (Note("stop_failed", {"rank": e.rank, "node": view.node, "code": e.code}),)
        state, actions = all_ended(state)
        return state, (*notes, *actions)
    how = f"ended by {e.signal}" if e.signal else f"exited with code {e.code}"
    cause = Cause.CRASH
    trouble = Trouble(cause, f"rank {e.rank} {how}", state.now, e.rank, view.node, e.tail, is_certain=True)
    return suspect(state, trouble)


def _tick(state: State) -> Decision:
    waited = state.now - state.since
    if state.stage is Stage.GATHERING:
        return waiting(state)
    if state.stage is Stage.AWAITING_SLURM and state.trouble and waited > state.trouble.patience:
        outcome = requeue_or_fail(state, state.trouble.cause, state.trouble.reason)
        blames = blamed_for_silence(state)
        state, actions = end(state, outcome, ask=True)
        return state, (*blames, *actions)
    if state.stage is Stage.CLEARING and waited > CLEAR_TIMEOUT:
        # SIGKILL does not end a process in uninterruptible sleep (hung storage): the node is of no use.
        stuck = sorted({r.node for r in state.ranks.values() if r.is_alive and r.node in state.agents})
        reason = f"workers on {', '.join(stuck)} do not die"
        blames = tuple(Blame(node, Cause.HARDWARE_FAULT, "killed workers did not die on it") for node in stuck)
        fault = requeue_or_fail(state, Cause.HARDWARE_FAULT, reason)
        then = state.then or replace(fault, node=stuck[0] if stuck else None)
        state, actions = end(state, then, ask=True)
        return state, (*blames, *actions)
    if state.stop is not None and state.stop.deadline is not None and state.now > state.stop.deadline:
        return overdue(state, state.stop)
    if state.stage is Stage.RUNNING:
        if state.trouble is not None:
            return act_on_trouble(state)
        return look_for_hangs(state)
    return state, ()
