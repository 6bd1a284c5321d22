"""Policy for the start: agents that join and load, the store, and nodes that do not come up.

Owns: when workers are formed for the first time, and which node is to blame when they cannot be: one that fails
although others come up. Where none comes up, no node is.
"""

from __future__ import annotations

from dataclasses import replace

from .fabric_order import natural, rank_key
from .policy_basics import Decision, end, form, requeue_or_fail
from .policy_types import AgentFailed, AgentJoined, AgentView, Blame, Note, Stage, StartStore, State
from .run.outcome import Cause

SLOW_START = 30.0  # seconds after which a start says what it waits for
FEW = 0.25  # share of the nodes that may be too late before it is no longer their own fault
STORE_LIMIT = 30.0  # seconds that a loaded node may take to start the store; then another one is asked


def joined(state: State, e: AgentJoined) -> Decision:
    failed = {n: why for n, why in state.failed.items() if n != e.node}
    place = e.place if state.settings.by_topology else ()
    state = replace(state, agents={**state.agents, e.node: AgentView(e.address, place)}, failed=failed)
    if len(state.agents) < state.settings.nodes or state.store_node is not None:
        return state, ()
    # The others must reach the store: a node that came over loopback (Debian maps a host's own name so) may not be told
    # to them by that address. On one machine all came that way.
    nodes = sorted(state.agents, key=lambda n: rank_key(state.agents[n].place, n))
    host = next((n for n in nodes if not state.agents[n].address.startswith("127.")), nodes[0])
    note = Note("gathered", {"nodes": nodes, "store": host})
    return replace(state, store_node=host), (note, StartStore(host))


def form_if_complete(state: State) -> Decision:
    if state.failed:
        return _judge(state)
    agents = state.agents
    if state.stage is not Stage.GATHERING or state.store is None or len(agents) < state.settings.nodes:
        return state, ()
    if not all(a.is_ready for a in agents.values()):
        return state, ()
    return form(state)


def failed_at_start(state: State, e: AgentFailed) -> Decision:
    """A node's agent is gone before the first workers were formed: nothing can start without it."""
    if state.stage is not Stage.GATHERING:
        return state, ()
    if e.is_end_of_all:
        state = replace(state, ended_all=state.ended_all | {e.node})
    if e.node in state.failed:
        return state, ()
    agents = {n: a for n, a in state.agents.items() if n != e.node}
    state = replace(state, agents=agents, failed={**state.failed, e.node: e.reason})
    note = Note("agent_failed", {"node": e.node, "reason": e.reason})
    state, actions = _judge(state)
    return state, (note, *actions)


def _judge(state: State) -> Decision:
    """Once every other node has loaded, those that failed are to blame. If all fail, srun's end comes instead."""
    ready = [n for n, a in state.agents.items() if a.is_ready]
    if state.stage is not Stage.GATHERING or not ready or len(ready) + len(state.failed) < state.settings.nodes:
        return state, ()
    return _end_start(state, f"{_described(state)}; the other {len(ready)} came up")


def _guilty(state: State) -> dict[str, str]:
    """Failed nodes and how; where srun gave up for some, only those: the others' agents it killed."""
    return {n: why for n, why in state.failed.items() if n in state.ended_all} or dict(state.failed)


def _described(state: State) -> str:
    guilty = _guilty(state)
    nodes = sorted(guilty, key=natural)
    return f"no agent on {', '.join(nodes)} ({guilty[nodes[0]]})"


def _end_start(state: State, reason: str, ask: bool = True) -> Decision:
    blames = tuple(
        Blame(node, Cause.LAUNCH_FAILED, f"its agent failed at start: {why}")
        for node, why in sorted(_guilty(state).items(), key=lambda pair: natural(pair[0]))
    )
    outcome = requeue_or_fail(state, Cause.LAUNCH_FAILED, reason)
    node = blames[0].node if blames else None
    state, actions = end(state, replace(outcome, node=node), ask)
    return state, (*blames, *actions)


def launch_failed(state: State, reason: str) -> Decision:
    """srun is gone before all had joined. If it named some nodes and not all, they are to blame."""
    if 0 < len(_guilty(state)) < state.settings.nodes:
        return _end_start(state, f"{reason}; {_described(state)}")
    return _end_start(replace(state, failed={}), reason)


def waiting(state: State) -> Decision:
    """Time passes while agents gather."""
    s, waited = state.settings, state.now - state.since
    if waited > s.gather_timeout:
        there = sorted(n for n, a in state.agents.items() if a.is_ready)
        reason = f"only {len(there)} of {s.nodes} nodes were ready after {s.gather_timeout:.0f} s ({', '.join(there)})"
        late = {n: f"not ready after {s.gather_timeout:.0f} s" for n in s.names if n not in there}
        if len(late) > max(1, int(FEW * s.nodes)):
            late = {}  # what most of them wait for is no node's fault, but storage's or the network's
        failed = {**late, **state.failed} if there else {}
        return _end_start(replace(state, failed=failed), reason)
    if waited > SLOW_START and not state.is_wait_noted:
        return replace(state, is_wait_noted=True), (
            Note("waiting", {"seconds": round(waited), "for": _missing(state)}),
        )
    return _watch_store(state)


def _watch_store(state: State) -> Decision:
    """A store that does not come is asked of another node, once."""
    host = state.store_node
    if host is None or state.store is not None or state.is_store_moved:
        return state, ()
    if state.store_due is None:
        is_loaded = host in state.agents and state.agents[host].is_ready
        return (replace(state, store_due=state.now + STORE_LIMIT), ()) if is_loaded else (state, ())
    others = sorted((n for n, a in state.agents.items() if n != host and a.is_ready), key=natural)
    if state.now < state.store_due or not others:
        return state, ()
    note = Note("store_moved", {"from": host, "to": others[0]})
    return replace(state, store_node=others[0], is_store_moved=True), (note, StartStore(others[0]))


def _missing(state: State) -> str:
    """What a start still waits for, for people."""
    s, agents = state.settings, state.agents
    loading = sorted((n for n, a in agents.items() if not a.is_ready), key=natural)
    parts = [f"{s.nodes - len(agents)} of {s.nodes} nodes to join"] if len(agents) < s.nodes else []
    parts += [f"{', '.join(loading)} to load"] if loading else []
    parts += [f"the store on {state.store_node}"] if state.store_node and state.store is None else []
    return "; ".join(parts)
