"""Policy, the ground: forming a generation, clearing workers away, ending an attempt.

Owns: what the other policy modules build on. Does not own: when any of it happens.
"""

from __future__ import annotations

from dataclasses import replace

from .fabric_order import rank_key
from .policy_types import Action, AskSlurm, Finish, Form, KillWorkers, Note, RankView, Stage, State, StopPlan, Trouble
from .run.outcome import EXIT_CANCELLED, EXIT_FAILED, EXIT_FINISHED, EXIT_REQUEUE, Cause, Next, Outcome

Decision = tuple[State, tuple[Action, ...]]


def form(state: State) -> Decision:
    """Start the workers of the next generation."""
    store = state.store
    assert store is not None
    per = state.settings.procs_per_node
    nodes = sorted(state.agents, key=lambda node: rank_key(state.agents[node].place, node))
    if state.store_node in nodes:
        # Rank 0 where the store is: a script of the user's own opens its own there, and all nodes can reach that host.
        first_node = nodes.index(state.store_node)
        nodes = nodes[first_node:] + nodes[:first_node]
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


def all_ended(state: State) -> Decision:
    """A rank came to its end in order; once all have, so has the attempt."""
    if any(r.is_alive or r.ended is None for r in state.ranks.values()):
        return state, ()
    step = min(r.step for r in state.ranks.values())
    state = replace(state, best_step=max(step, state.best_step))
    if all(r.ended for r in state.ranks.values()):
        reason = "all ranks exited 0" if state.settings.is_own_script else f"all {step} steps are done"
        return end(state, outcome_of(state, Cause.FINISHED, Next.NOTHING, EXIT_FINISHED, reason))
    if state.stop is not None:
        return end(state, after_stop(state, state.stop), ask=True)
    assert state.settings.is_own_script, "workers stopped though nobody asked them to"
    # A signal reached them before us. What it means is Slurm's to say.
    reason = "all ranks ended after a signal from outside"
    patience = state.settings.closed_timeout
    trouble = Trouble(Cause.REQUESTED, reason, state.now, is_certain=True, patience=patience)
    return replace(state, stage=Stage.AWAITING_SLURM, since=state.now, trouble=trouble), (AskSlurm(),)


def after_stop(state: State, plan: StopPlan) -> Outcome:
    """What a stop that somebody asked for leads to; what broke meanwhile is told along."""
    outcome = _after_stop(state, plan)
    lost = state.trouble
    if lost is None or lost.cause is not Cause.NODE_FAILURE:
        return outcome
    return replace(outcome, reason=f"{outcome.reason}; {lost.reason}", node=lost.node)


def _after_stop(state: State, plan: StopPlan) -> Outcome:
    if plan.cause is Cause.CANCELLED or not plan.requeue:
        return outcome_of(state, plan.cause, Next.NOTHING, EXIT_CANCELLED, plan.reason)
    if not state.settings.can_requeue:
        reason = f"{plan.reason}; not requeued (resilience.continuation=none): `stoker resume` goes on"
        return outcome_of(state, plan.cause, Next.NOTHING, EXIT_FAILED, reason)
    return outcome_of(state, plan.cause, state.settings.onward, EXIT_REQUEUE, plan.reason)


def clear(state: State, then: Outcome | None) -> Decision:
    """Kill what lives; when all are gone, go on with the next generation or end."""
    state = replace(state, stage=Stage.CLEARING, since=state.now, then=then)
    # Not where the allocation ends: there every second counts.
    is_hang = state.trouble is not None and state.trouble.cause is Cause.HANG and state.stop is None
    state, actions = cleared(state)
    return state, (KillWorkers(state.generation, with_stacks=is_hang), *actions)


def cleared(state: State) -> Decision:
    if any(r.is_alive and r.node in state.agents for r in state.ranks.values()):
        return state, ()
    if state.then is not None:
        return end(state, state.then, ask=True)
    return form(state)


def requeue_or_fail(state: State, cause: Cause, reason: str) -> Outcome:
    if state.settings.can_requeue:
        return outcome_of(state, cause, state.settings.onward, EXIT_REQUEUE, reason)
    return outcome_of(state, cause, Next.NOTHING, EXIT_FAILED, reason)


def outcome_of(state: State, cause: Cause, then: Next, code: int, reason: str) -> Outcome:
    return Outcome(cause, then, code, reason, step=state.best_step, saved_step=state.saved_step)


def end(state: State, outcome: Outcome, ask: bool = False) -> Decision:
    is_asked = ask and outcome.next is not Next.NOTHING
    # The outcome may have been decided while workers were still running: give it the last word on steps.
    outcome = replace(outcome, step=max(state.best_step, outcome.step or 0), saved_step=state.saved_step)
    if state.settings.is_own_script:
        outcome = replace(outcome, evidence=outcome.evidence | _of_script(state))
    return replace(state, stage=Stage.DONE, since=state.now), (Finish(outcome, is_asked),)


def _of_script(state: State) -> dict[str, object]:
    """What tells whether a script of the user's own did its part, since it need not tell its steps."""
    failed = {str(rank): r.failed_stop for rank, r in sorted(state.ranks.items()) if r.failed_stop is not None}
    return {"generation": state.generation} | ({"failed_stops": failed} if failed else {})
