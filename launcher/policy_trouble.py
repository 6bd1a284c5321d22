"""Policy for what breaks: workers that die or hang, nodes that are lost, a launch that ends.

Owns: who is to blame, and whether workers are started again or the attempt ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from .policy_basics import Decision, after_stop, all_ended, clear, cleared, end, outcome_of, requeue_or_fail
from .policy_start import failed_at_start, launch_failed
from .policy_types import (
    AgentFailed,
    AgentLost,
    AskSlurm,
    Blame,
    KillWorkers,
    LaunchEnded,
    Note,
    RankView,
    Release,
    Settings,
    Stage,
    State,
    Trouble,
)
from .run.heartbeat import Phase
from .run.outcome import EXIT_FAILED, EXIT_USAGE, Cause, Next, Outcome
from .srun_words import UNKNOWN_OPTION

SLOW_FACTOR, SLOW_FLOOR = 3.0, 5.0  # a rank is named as slow after max(factor x median, floor) seconds
KILLED = {-9, -15, 9, 15, 137, 143}  # exit codes of an srun that was ended, or whose tasks were, by SIGKILL or SIGTERM
NOT_A_PROGRAM = {126, 127}  # a shell's exit codes for what cannot be executed, and for what is not there
# Never started again unchanged: a person has to act first.
_FATAL = {Cause.BAD_CONFIG, Cause.DIVERGED, Cause.OUT_OF_MEMORY, Cause.STORAGE}


def suspect(state: State, new: Trouble) -> Decision:
    """Keep the best explanation: certain before suspected, then first come."""
    if state.stage is not Stage.RUNNING:
        return state, ()
    old = state.trouble
    if old is None or (new.is_certain and not old.is_certain):
        state = replace(state, trouble=new)
    return act_on_trouble(state)


def act_on_trouble(state: State) -> Decision:
    t = state.trouble
    if t is None or state.now < t.due:
        return state, ()
    note = Note("trouble", {"cause": t.cause.value, "reason": t.reason, "rank": t.rank, "node": t.node})
    state, actions = _restart_or_stop(state, t)
    return state, (note, *actions)


def _restart_or_stop(state: State, t: Trouble) -> Decision:
    s = state.settings
    if t.cause is Cause.SUPERSEDED:
        return clear(state, outcome_of(state, t.cause, Next.NOTHING, EXIT_FAILED, t.reason))
    if t.cause in _FATAL:
        code = EXIT_USAGE if t.cause is Cause.BAD_CONFIG else EXIT_FAILED
        return clear(state, _failure(state, t, code))
    if state.stop is not None:
        # The allocation is going away anyhow: no time for another generation.
        return clear(state, after_stop(state, state.stop))
    state = replace(state, start_crashes=(*state.start_crashes, _start_crash(state, t)))
    if state.restarts >= s.max_restarts:
        if (node := _suspected(state)) is not None:
            return _leave_node(state, t, node)
        why = f"{t.reason} ({state.restarts} restarts without {s.progress_steps} steps of progress)"
        return clear(state, _failure(state, replace(t, reason=why), EXIT_FAILED))
    furthest = max((r.step for r in state.ranks.values()), default=0)
    state = replace(state, restarts=state.restarts + 1, mark=max(state.mark, furthest))
    return clear(state, None)


def _start_crash(state: State, t: Trouble) -> str | None:
    """The node on which a rank crashed before its first step; None for any other trouble."""
    rank = None if t.rank is None else state.ranks.get(t.rank)
    is_start = rank is not None and not rank.median and rank.phase in (Phase.START, Phase.COMPILE)
    return t.node if is_start and t.cause is Cause.CRASH else None


def _suspected(state: State) -> str | None:
    """The one node on which every generation so far crashed at start, where others did not."""
    nodes = set(state.start_crashes)
    if state.settings.nodes < 2 or len(state.start_crashes) < 2 or len(nodes) != 1:
        return None
    return nodes.pop()


def _leave_node(state: State, t: Trouble, node: str) -> Decision:
    """It may be the node or the code: this run alone goes on without the node, as often as its budget allows."""
    count = len(state.start_crashes)
    reason = f"{t.reason} (the {count}th crash at start in a row on {node}; the run goes on without that node)"
    outcome = requeue_or_fail(state, t.cause, reason)
    outcome = replace(outcome, rank=t.rank, node=node, traceback=t.traceback)
    state, actions = clear(state, outcome)
    return state, (Blame(node, t.cause, f"{count} crashes at start in a row: {t.reason}", is_own=True), *actions)


def _failure(state: State, t: Trouble, code: int) -> Outcome:
    outcome = outcome_of(state, t.cause, Next.NOTHING, code, t.reason)
    return replace(outcome, rank=t.rank, node=t.node, traceback=t.traceback)


def agent_lost(state: State, e: AgentLost) -> Decision:
    if e.node not in state.agents:
        return state, ()
    if state.stage is Stage.GATHERING and e.is_closed:
        return failed_at_start(state, AgentFailed(e.node, f"it ended while loading ({e.reason})"))
    agents = {n: a for n, a in state.agents.items() if n != e.node}
    state = replace(state, agents=agents)
    note = Note("agent_lost", {"node": e.node, "reason": e.reason})
    if state.stage is Stage.CLEARING and state.then is not None:
        state, actions = cleared(state)
        return state, (note, *actions)
    if state.stage is Stage.RUNNING and all(r.ended is not None for r in state.ranks.values() if r.node == e.node):
        # Its workers had all ended in order; their exits were lost with it.
        ranks = {k: replace(r, is_alive=False) if r.node == e.node else r for k, r in state.ranks.items()}
        state, actions = all_ended(replace(state, ranks=ranks))
        return state, (note, *actions)
    if state.stage is Stage.AWAITING_SLURM:
        return state, (note,)  # the first loss is the reason
    # Nothing can go on without the node. Slurm's word on it comes by signal; only then is it clear what happens next.
    patience = state.settings.closed_timeout if e.is_closed else state.settings.verdict_timeout
    reason = f"{'the agent on' if e.is_closed else 'node'} {e.node} is lost: {e.reason}"
    trouble = Trouble(Cause.NODE_FAILURE, reason, state.now, None, e.node, None, True, patience)
    state = replace(state, stage=Stage.AWAITING_SLURM, since=state.now, trouble=trouble)
    if e.is_closed:
        return state, (note, KillWorkers(state.generation))
    # Should the node only have been frozen, its agent ends when it thaws. Then srun must end, or nobody would say so.
    return replace(state, is_released=True), (note, KillWorkers(state.generation), Release())


def blamed_for_silence(state: State) -> tuple[Blame, ...]:
    """A node that we could not reach though Slurm holds it for sound. One that is down Slurm keeps away itself."""
    t = state.trouble
    if not state.is_released or t is None or t.node is None:
        return ()
    return (Blame(t.node, Cause.NODE_FAILURE, f"silent though Slurm holds it for sound: {t.reason}"),)


def launch_ended(state: State, e: LaunchEnded) -> Decision:
    """srun is gone and with it every agent. That is no node failure: then srun stays until Slurm has its word."""
    if state.stage is Stage.CLEARING and state.then is not None:
        return end(state, state.then, ask=True)
    reason = f"srun ended with code {e.code} and took all agents along"
    note = Note("launch_ended", {"code": e.code})
    if state.stage is Stage.GATHERING and _cannot_work(state, e):
        said = e.words or f"exit code {e.code}"
        why = f"no agent can be started by the configured words (container.*, cluster.python): {said}"
        state, actions = end(state, outcome_of(state, Cause.BAD_CONFIG, Next.NOTHING, EXIT_USAGE, why))
        return state, (note, *actions)
    if state.stage is Stage.GATHERING and e.code not in KILLED:
        state, actions = launch_failed(state, reason)
        return state, (note, *actions)
    patience = state.settings.verdict_timeout
    trouble = Trouble(Cause.NODE_FAILURE, reason, state.now, is_certain=True, patience=patience)
    state = replace(state, stage=Stage.AWAITING_SLURM, since=state.now, launch_code=e.code)
    return replace(state, trouble=state.trouble or trouble), (note, AskSlurm())


def _cannot_work(state: State, e: LaunchEnded) -> bool:
    """Another node would do no better: srun does not know an option, or on no node is there what is to be started."""
    if state.agents or 0 < len(state.failed) < state.settings.nodes:
        return False
    return e.words.startswith(UNKNOWN_OPTION) or e.code in NOT_A_PROGRAM


def hang_limit(s: Settings, phase: Phase, step_seconds: float) -> float:
    """Seconds without a sign of life after which a rank in this phase is taken for hung."""
    if phase in (Phase.START, Phase.COMPILE):
        return s.start_timeout
    if phase is Phase.SAVE:
        return s.save_timeout
    if phase is Phase.EVAL:
        return s.eval_timeout
    return s.hang_timeout or max(20 * step_seconds, 120.0)


def look_for_hangs(state: State) -> Decision:
    told = {k: r for k, r in state.ranks.items() if r.is_alive and r.ended is None}
    ranks = {k: r for k, r in told.items() if r.phase not in (Phase.HOLD, Phase.SILENT)}
    medians = [r.median for r in ranks.values() if r.median]
    step_seconds = median(medians) if medians else 0.0
    # Before the first step is through, a step may still compile and warm up: the start's limit holds.
    limits = {
        k: hang_limit(state.settings, r.phase if step_seconds else Phase.START, step_seconds) for k, r in ranks.items()
    }
    hung = [k for k, r in ranks.items() if r.age > limits[k]]
    if hung:
        k = culprit(ranks)
        reason = (
            f"rank {k} shows no progress for {ranks[k].age:.0f} s in step {ranks[k].step}"
            f" (phase {ranks[k].phase.name.lower()}, limit {limits[k]:.0f} s)"
        )
        return suspect(state, Trouble(Cause.HANG, reason, state.now, k, ranks[k].node, None, True))
    if not step_seconds:
        return state, ()
    slow = [k for k, r in ranks.items() if r.phase in (Phase.STEP, Phase.DATA) and not r.is_named]
    slow = [k for k in slow if ranks[k].age > max(SLOW_FACTOR * step_seconds, SLOW_FLOOR)]
    if not slow:
        return state, ()
    k = culprit(ranks)
    state = replace(state, ranks={n: replace(r, is_named=True) for n, r in state.ranks.items()})
    fields = {"rank": k, "node": ranks[k].node, "step": ranks[k].step, "seconds": round(ranks[k].age, 1)}
    return state, (Note("slow", fields),)


def culprit(ranks: Mapping[int, RankView]) -> int:
    """The rank that the others wait for: fewest steps, then fewest collectives begun, then longest silent."""
    return min(ranks, key=lambda k: (ranks[k].step, ranks[k].sequence, -ranks[k].age, k))
