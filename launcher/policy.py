"""What the supervisor decides: one pure function, (state, event) -> (state, actions).

Owns: when workers start, stop, are restarted; when the run is requeued or ends, and as what. Does not own: how
(supervise.py does what is decided here), or what evidence is (policy_types.py). Tested as a table and by simulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from .policy_types import (
    Action,
    AgentJoined,
    AgentLost,
    AgentReady,
    AgentView,
    AskSlurm,
    Commit,
    Event,
    Finish,
    Form,
    JobFate,
    KillWorkers,
    LaunchEnded,
    Note,
    ProposalAnswer,
    Propose,
    RankExited,
    RankReport,
    RankStatus,
    RankView,
    Settings,
    Stage,
    StartStore,
    State,
    StopPlan,
    StoreUp,
    Superseded,
    Terminated,
    Tick,
    Trouble,
    Warned,
)
from .run.heartbeat import Phase
from .run.outcome import EXIT_CANCELLED, EXIT_FAILED, EXIT_FINISHED, EXIT_REQUEUE, EXIT_USAGE, Cause, Next, Outcome

Decision = tuple[State, tuple[Action, ...]]

CULPRIT_GRACE = 3.0  # seconds in which the true culprit of a lost peer usually shows itself
END_MARGIN = 8.0  # seconds before the allocation's end by which the requeue must have been asked for
SLOW_FACTOR, SLOW_FLOOR = 3.0, 5.0  # a rank is named as slow after max(factor x median, floor) seconds
UNKNOWN_SAVE = 5.0  # seconds a save is taken to need before one was seen
_KILLED = {9, 15, 137, 143}  # exit codes of an srun whose tasks were ended by SIGKILL or SIGTERM
# Never started again unchanged: a person has to act first.
_FATAL = {Cause.BAD_CONFIG, Cause.DIVERGED, Cause.OUT_OF_MEMORY, Cause.STORAGE}


def decide(state: State, event: Event, now: float) -> Decision:
    """The next state and what is to be done. `now`: monotonic seconds."""
    state = replace(state, now=now)
    if state.stage is Stage.DONE:
        return state, ()
    match event:
        case Tick():
            return _tick(state)
        case AgentJoined():
            return _joined(state, event)
        case AgentReady():
            view = replace(state.agents[event.node], is_ready=True)
            return _form_if_complete(replace(state, agents={**state.agents, event.node: view}))
        case StoreUp():
            return _form_if_complete(replace(state, store=(event.host, event.port)))
        case AgentLost():
            return _agent_lost(state, event)
        case RankStatus():
            return _status(state, event)
        case RankReport():
            return _report(state, event)
        case RankExited():
            return _exited(state, event)
        case ProposalAnswer():
            return _answered(state, event)
        case Warned():
            return _warned(state, event)
        case Terminated():
            return _terminated(state, event)
        case LaunchEnded():
            return _launch_ended(state, event)
        case Superseded():
            reason = "a later attempt of this run exists"
            return _end(state, _outcome(state, Cause.SUPERSEDED, Next.NOTHING, EXIT_FAILED, reason))


# Start.


def _joined(state: State, e: AgentJoined) -> Decision:
    is_first = not state.agents
    state = replace(state, agents={**state.agents, e.node: AgentView(e.address)})
    return state, (StartStore(e.node),) if is_first else ()


def _form_if_complete(state: State) -> Decision:
    s = state.settings
    agents = state.agents
    if state.stage is not Stage.GATHERING or state.store is None or len(agents) < s.nodes:
        return state, ()
    if not all(a.is_ready for a in agents.values()):
        return state, ()
    return _form(state)


def _form(state: State) -> Decision:
    store = state.store
    assert store is not None
    per = state.settings.procs_per_node
    # Sorted by name, so that a rank's place does not depend on who joined first.
    nodes = sorted(state.agents, key=_natural)
    first = {node: i * per for i, node in enumerate(nodes)}
    ranks = {first[n] + k: RankView(n, step=0) for n in nodes for k in range(per)}
    state = replace(
        state,
        stage=Stage.RUNNING,
        since=state.now,
        generation=state.generation + 1,
        ranks=ranks,
        trouble=None,
        then=None,
        has_ever_run=True,
    )
    note = Note("form", {"generation": state.generation, "world_size": len(ranks), "nodes": nodes})
    return state, (note, Form(state.generation, first, store))


def _natural(name: str) -> tuple[object, ...]:
    """n2 before n10."""
    parts: list[object] = []
    digits = ""
    for c in name + "\0":
        if c.isdigit():
            digits += c
            continue
        if digits:
            parts += [1, int(digits), digits]
            digits = ""
        parts += [0, ord(c), c]
    return tuple(parts)


# News of ranks.


def _of_generation(state: State, generation: int, rank: int) -> RankView | None:
    return state.ranks.get(rank) if generation == state.generation else None


def _with_rank(state: State, rank: int, view: RankView) -> State:
    return replace(state, ranks={**state.ranks, rank: view})


def _status(state: State, e: RankStatus) -> Decision:
    view = _of_generation(state, e.generation, e.rank)
    if view is None:
        return state, ()
    is_named = view.is_named and e.step == view.step
    # Never back: a status may be older than the worker's own last word.
    view = replace(
        view,
        step=max(view.step, e.step),
        phase=e.phase,
        sequence=e.sequence,
        age=e.age,
        median=e.median,
        is_named=is_named,
    )
    state = _with_rank(state, e.rank, view)
    done = min(r.step for r in state.ranks.values())
    if done > state.best_step:
        state = replace(state, best_step=done)
        if state.restarts and done >= state.mark + state.settings.progress_steps:
            state = replace(state, restarts=0)
    return state, ()


def _report(state: State, e: RankReport) -> Decision:
    view = _of_generation(state, e.generation, e.rank)
    if view is None:
        return state, ()
    if e.event == "checkpoint_saved" and e.step is not None:
        slowest = max(state.save_seconds, e.seconds)
        return replace(state, saved_step=e.step, save_seconds=slowest), ()
    if e.event == "ended":
        step = view.step if e.step is None else e.step
        return _with_rank(state, e.rank, replace(view, ended=e.finished, step=step)), ()
    if e.event == "peer_lost":
        trouble = Trouble(
            Cause.CRASH, f"rank {e.rank} lost a peer: {e.error}", state.now + CULPRIT_GRACE, e.rank, view.node
        )
        return _suspect(state, trouble)
    if e.event == "failed":
        trouble = Trouble(e.cause, e.error, state.now, e.rank, view.node, e.traceback, is_certain=True)
        return _suspect(state, trouble)
    return state, ()


def _exited(state: State, e: RankExited) -> Decision:
    view = _of_generation(state, e.generation, e.rank)
    if view is None:
        return state, ()
    state = _with_rank(state, e.rank, replace(view, is_alive=False))
    if state.stage is Stage.CLEARING:
        return _cleared(state)
    if state.stage is not Stage.RUNNING:
        return state, ()
    if e.code == 0 and view.ended is not None:
        return _all_ended(state)
    how = f"ended by {e.signal}" if e.signal else f"exited with code {e.code}"
    cause = Cause.CRASH
    trouble = Trouble(cause, f"rank {e.rank} {how}", state.now, e.rank, view.node, e.tail, is_certain=True)
    return _suspect(state, trouble)


def _all_ended(state: State) -> Decision:
    if any(r.is_alive or r.ended is None for r in state.ranks.values()):
        return state, ()
    step = min(r.step for r in state.ranks.values())
    state = replace(state, best_step=max(step, state.best_step))
    if all(r.ended for r in state.ranks.values()):
        outcome = _outcome(state, Cause.FINISHED, Next.NOTHING, EXIT_FINISHED, f"all {step} steps are done")
        return _end(state, outcome)
    plan = state.stop
    assert plan is not None, "workers stopped though nobody asked them to"
    return _end(state, _after_stop(state, plan), ask=True)


def _after_stop(state: State, plan: StopPlan) -> Outcome:
    if plan.cause is Cause.CANCELLED or not plan.requeue:
        return _outcome(state, plan.cause, Next.NOTHING, EXIT_CANCELLED, plan.reason)
    if not state.settings.can_requeue:
        reason = f"{plan.reason}; not requeued (resilience.continuation=none): `stoker resume` goes on"
        return _outcome(state, plan.cause, Next.NOTHING, EXIT_FAILED, reason)
    return _outcome(state, plan.cause, Next.REQUEUE, EXIT_REQUEUE, plan.reason)


# Trouble.


def _suspect(state: State, new: Trouble) -> Decision:
    """Keep the best explanation: certain before suspected, then first come."""
    if state.stage is not Stage.RUNNING:
        return state, ()
    old = state.trouble
    if old is None or (new.is_certain and not old.is_certain):
        state = replace(state, trouble=new)
    return _act_on_trouble(state)


def _act_on_trouble(state: State) -> Decision:
    t = state.trouble
    if t is None or state.now < t.due:
        return state, ()
    note = Note("trouble", {"cause": t.cause.value, "reason": t.reason, "rank": t.rank, "node": t.node})
    state, actions = _restart_or_stop(state, t)
    return state, (note, *actions)


def _restart_or_stop(state: State, t: Trouble) -> Decision:
    s = state.settings
    if state.stop is not None:
        # The allocation is going away anyhow: no time for another generation.
        return _clear(state, _after_stop(state, state.stop))
    if t.cause is Cause.SUPERSEDED:
        return _clear(state, _outcome(state, t.cause, Next.NOTHING, EXIT_FAILED, t.reason))
    if t.cause in _FATAL:
        code = EXIT_USAGE if t.cause is Cause.BAD_CONFIG else EXIT_FAILED
        return _clear(state, _failure(state, t, code))
    if state.restarts >= s.max_restarts:
        why = f"{t.reason} ({state.restarts} restarts without {s.progress_steps} steps of progress)"
        return _clear(state, _failure(state, replace(t, reason=why), EXIT_FAILED))
    furthest = max((r.step for r in state.ranks.values()), default=0)
    state = replace(state, restarts=state.restarts + 1, mark=max(state.mark, furthest))
    return _clear(state, None)


def _failure(state: State, t: Trouble, code: int) -> Outcome:
    outcome = _outcome(state, t.cause, Next.NOTHING, code, t.reason)
    return replace(outcome, rank=t.rank, node=t.node, traceback=t.traceback)


def _clear(state: State, then: Outcome | None) -> Decision:
    """Kill what lives; when all are gone, go on with the next generation or end."""
    state = replace(state, stage=Stage.CLEARING, since=state.now, then=then)
    state, actions = _cleared(state)
    return state, (KillWorkers(state.generation), *actions)


def _cleared(state: State) -> Decision:
    if any(r.is_alive and r.node in state.agents for r in state.ranks.values()):
        return state, ()
    if state.then is not None:
        return _end(state, state.then, ask=True)
    return _form(state)


# Nodes.


def _agent_lost(state: State, e: AgentLost) -> Decision:
    if e.node not in state.agents:
        return state, ()
    agents = {n: a for n, a in state.agents.items() if n != e.node}
    state = replace(state, agents=agents)
    note = Note("agent_lost", {"node": e.node, "reason": e.reason})
    if state.stage is Stage.CLEARING and state.then is not None:
        state, actions = _cleared(state)
        return state, (note, *actions)
    if state.stage is Stage.RUNNING and all(r.ended is not None for r in state.ranks.values() if r.node == e.node):
        # Its workers had all ended in order; their exits were lost with it.
        ranks = {k: replace(r, is_alive=False) if r.node == e.node else r for k, r in state.ranks.items()}
        state, actions = _all_ended(replace(state, ranks=ranks))
        return state, (note, *actions)
    # Nothing can go on without the node. Slurm's word on it comes by signal; only then is it clear what happens next.
    trouble = Trouble(Cause.NODE_FAILURE, f"node {e.node} is lost: {e.reason}", state.now, None, e.node, None, True)
    state = replace(state, stage=Stage.AWAITING_SLURM, since=state.now, trouble=trouble)
    return state, (note, KillWorkers(state.generation))


def _launch_ended(state: State, e: LaunchEnded) -> Decision:
    """srun is gone and with it every agent. That is no node failure: then srun stays until Slurm has its word."""
    if state.stage is Stage.CLEARING and state.then is not None:
        return _end(state, state.then, ask=True)
    reason = f"srun ended with code {e.code} and took all agents along"
    note = Note("launch_ended", {"code": e.code})
    if state.stage is Stage.GATHERING and e.code not in _KILLED:
        outcome = _requeue_or_fail(state, Cause.LAUNCH_FAILED, reason)
        state, actions = _end(state, outcome, ask=True)
        return state, (note, *actions)
    trouble = Trouble(Cause.NODE_FAILURE, reason, state.now, is_certain=True)
    state = replace(state, stage=Stage.AWAITING_SLURM, since=state.now, trouble=state.trouble or trouble)
    return state, (note, AskSlurm("launch"))


# The allocation's end.


def _lead_needed(state: State) -> float:
    medians = [r.median for r in state.ranks.values() if r.median]
    return 3 * (median(medians) if medians else 0.0) + (1.5 * state.save_seconds or UNKNOWN_SAVE)


def _warned(state: State, e: Warned) -> Decision:
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
        state, actions = _clear(state, _after_stop(state, state.stop))
        return state, (note, *actions)
    state, actions = _propose(replace(state, stop=plan))
    return state, (note, *actions)


def _propose(state: State) -> Decision:
    assert state.stop is not None
    furthest = max(r.step for r in state.ranks.values())
    plan = replace(state.stop, step=furthest + state.stop.margin, acks=frozenset())
    return replace(state, stop=plan), (Propose(state.generation, plan.step, True),)


def _answered(state: State, e: ProposalAnswer) -> Decision:
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


def _terminated(state: State, e: Terminated) -> Decision:
    evidence = {"fate": e.fate.value, "by": e.by, **e.evidence}
    note = Note("terminated", evidence)
    if e.fate is JobFate.PREEMPTED:
        reason = "preempted by a job of higher priority"
        state, actions = _warned(state, Warned(Cause.PREEMPTED, reason, e.seconds_left))
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
    state, actions = _end(state, outcome, ask=is_asked)
    return state, (note, KillWorkers(state.generation), *actions)


def _fate_outcome(state: State, e: Terminated) -> Outcome:
    s = state.settings
    lost = state.trouble if state.trouble and state.trouble.cause is Cause.NODE_FAILURE else None
    if e.fate is JobFate.REQUEUED:
        cause = Cause.NODE_FAILURE if lost else (state.stop.cause if state.stop else Cause.PREEMPTED)
        reason = lost.reason if lost else "Slurm took the allocation and requeued the job"
        node = lost.node if lost else None
        return replace(_outcome(state, cause, Next.REQUEUE, EXIT_REQUEUE, reason), node=node)
    if e.fate is JobFate.NODE_FAIL:
        reason = (lost.reason if lost else "a node failed") + "; Slurm did not requeue the job"
        return _outcome(state, Cause.NODE_FAILURE, Next.NOTHING, EXIT_FAILED, reason)
    if e.fate is JobFate.TIME_LIMIT:
        # Without a warning in time: the last interval is lost, the run is not.
        if s.can_requeue:
            return _outcome(state, Cause.TIME_LIMIT, Next.REQUEUE, EXIT_REQUEUE, "killed at the time limit")
        return _outcome(state, Cause.TIME_LIMIT, Next.NOTHING, EXIT_FAILED, "killed at the time limit")
    return _outcome(
        state, Cause.CANCELLED, Next.NOTHING, EXIT_CANCELLED, "cancelled (SIGTERM while the job was wanted)"
    )


# Time.


def _tick(state: State) -> Decision:
    s = state.settings
    waited = state.now - state.since
    if state.stage is Stage.GATHERING and waited > s.gather_timeout:
        there = sorted(n for n, a in state.agents.items() if a.is_ready)
        reason = f"only {len(there)} of {s.nodes} nodes were ready after {s.gather_timeout:.0f} s ({', '.join(there)})"
        return _end(state, _requeue_or_fail(state, Cause.LAUNCH_FAILED, reason), ask=True)
    if state.stage is Stage.AWAITING_SLURM and waited > s.verdict_timeout:
        assert state.trouble is not None
        return _end(state, _requeue_or_fail(state, state.trouble.cause, state.trouble.reason), ask=True)
    if state.stage is Stage.CLEARING and waited > 60.0:
        # SIGKILL does not end a process in uninterruptible sleep (hung storage): the node is of no use.
        stuck = sorted({r.node for r in state.ranks.values() if r.is_alive and r.node in state.agents})
        reason = f"workers on {', '.join(stuck)} do not die"
        outcome = state.then or _requeue_or_fail(state, Cause.HARDWARE_FAULT, reason)
        return _end(state, outcome, ask=True)
    plan = state.stop
    if plan and plan.deadline is not None and state.stage is Stage.RUNNING and state.now > plan.deadline:
        late = replace(plan, reason=f"{plan.reason}; the save was not done in time")
        return _clear(replace(state, stop=late), _after_stop(state, late))
    if state.stage is Stage.RUNNING:
        if state.trouble is not None:
            return _act_on_trouble(state)
        return _look_for_hangs(state)
    return state, ()


def _requeue_or_fail(state: State, cause: Cause, reason: str) -> Outcome:
    if state.settings.can_requeue:
        return _outcome(state, cause, Next.REQUEUE, EXIT_REQUEUE, reason)
    return _outcome(state, cause, Next.NOTHING, EXIT_FAILED, reason)


def hang_limit(s: Settings, phase: Phase, step_seconds: float) -> float:
    """Seconds without a sign of life after which a rank in this phase is taken for hung."""
    if phase in (Phase.START, Phase.COMPILE):
        return s.start_timeout
    if phase is Phase.SAVE:
        return s.save_timeout
    if phase is Phase.EVAL:
        return s.eval_timeout
    return s.hang_timeout or max(20 * step_seconds, 120.0)


def _look_for_hangs(state: State) -> Decision:
    ranks = {k: r for k, r in state.ranks.items() if r.is_alive and r.ended is None and r.phase is not Phase.HOLD}
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
        return _suspect(state, Trouble(Cause.HANG, reason, state.now, k, ranks[k].node, None, True))
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


# Ends.


def _outcome(state: State, cause: Cause, then: Next, code: int, reason: str) -> Outcome:
    return Outcome(cause, then, code, reason, step=state.best_step, saved_step=state.saved_step)


def _end(state: State, outcome: Outcome, ask: bool = False) -> Decision:
    is_asked = ask and outcome.next is Next.REQUEUE
    # The outcome may have been decided while workers were still running: give it the last word on steps.
    outcome = replace(outcome, step=max(state.best_step, outcome.step or 0), saved_step=state.saved_step)
    return replace(state, stage=Stage.DONE, since=state.now), (Finish(outcome, is_asked),)
