"""The supervisor's side of the agents: accepts them, checks that they are ours, turns messages into policy events.

Owns: the listening socket, one channel per node, and the lease on each. Does not own: what follows from news.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import policy_types as p
from .protocol import answer
from .run.heartbeat import Phase
from .run.outcome import Cause
from .run.wire import Channel, Closed, Message

PING_EVERY = 1.0


@dataclass
class _Agent:
    channel: Channel
    nonce: str
    node: str | None = None  # None until it has proved that it is ours
    address: str = ""
    heard: float = field(default_factory=time.monotonic)


class Agents:
    def __init__(self, token: str, config: dict[str, Any], lease: float) -> None:
        self._token, self._config, self._lease = token, config, lease
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=1024)
        self._agents: list[_Agent] = []
        self._pinged = 0.0

    @property
    def addresses(self) -> str:
        """`host:port,...`: by name first, then by what the name means here, then loopback (one machine)."""
        port = self._listener.getsockname()[1]
        name = socket.gethostname()
        hosts = [name]
        with contextlib.suppress(OSError):
            hosts.append(socket.gethostbyname(name))
        hosts.append("127.0.0.1")
        return ",".join(f"{h}:{port}" for h in dict.fromkeys(hosts))

    def waitables(self) -> list[Any]:
        return [self._listener, *(a.channel for a in self._agents)]

    def any_connected(self) -> bool:
        return any(a.node for a in self._agents)

    def read(self, readable: list[Any]) -> Iterator[p.Event | str]:
        """Events out of what has arrived; a bare string is the name of a node that was signalled."""
        if self._listener in readable:
            self._accept()
        for agent in list(self._agents):
            if agent.channel in readable:
                try:
                    messages = agent.channel.receive()
                    agent.heard = time.monotonic()
                    for message in messages:
                        yield from self._message(agent, message)
                except (Closed, KeyError, TypeError, ValueError) as e:
                    yield from self._lost(agent, f"connection lost ({e})", is_closed=isinstance(e, Closed))
        yield from self._keep_leases()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(5.0)  # a send to a frozen node must not hold up the others for longer
        agent = _Agent(Channel(sock), secrets.token_hex(16))
        self._agents.append(agent)
        try:
            agent.channel.send({"kind": "challenge", "nonce": agent.nonce})
        except Closed:
            self._drop(agent)

    def _keep_leases(self) -> Iterator[p.Event]:
        now = time.monotonic()
        for agent in list(self._agents):
            if now - agent.heard > self._lease:
                # It may be us who slept: what has arrived meanwhile counts first.
                if select.select([agent.channel], [], [], 0)[0]:
                    agent.heard = now
                    continue
                yield from self._lost(agent, f"no word for {self._lease:.0f} s")
        if now - self._pinged > PING_EVERY:
            self._pinged = now
            for agent in list(self._agents):
                if agent.node is not None:
                    yield from self._send(agent, {"kind": "ping"})

    def _lost(self, agent: _Agent, reason: str, is_closed: bool = False) -> Iterator[p.Event]:
        self._drop(agent)
        if agent.node is not None:
            yield p.AgentLost(agent.node, reason, is_closed)

    def _drop(self, agent: _Agent) -> None:
        if agent in self._agents:
            self._agents.remove(agent)
        agent.channel.close()

    def _send(self, agent: _Agent, message: Message) -> Iterator[p.Event]:
        try:
            agent.channel.send(message)
        except Closed as e:
            yield from self._lost(agent, f"connection lost ({e})")

    def _message(self, agent: _Agent, m: Message) -> Iterator[p.Event | str]:
        if agent.node is None:
            if not hmac.compare_digest(str(m.get("answer")), answer(self._token, agent.nonce)):
                raise Closed("not one of our agents")
            agent.node, agent.address = str(m["node"]), str(m["address"])
            yield from self._send(agent, {"kind": "welcome", "config": self._config})
            yield p.AgentJoined(agent.node, agent.address)
            return
        match m["kind"]:
            case "ready":
                yield p.AgentReady(agent.node)
            case "store":
                yield p.StoreUp(agent.address, m["port"])
            case "status":
                for r in m["ranks"]:
                    yield p.RankStatus(**(r | {"phase": Phase(r["phase"])}))
            case "report":
                yield _report(m)
            case "exited":
                yield p.RankExited(m["generation"], m["rank"], m["code"], m["signal"], m["tail"])
            case "answer":
                yield p.ProposalAnswer(m["generation"], agent.node, m["step"], m["accepted"], m["max_step"])
            case "signal":
                if m["name"] in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
                    yield agent.node

    def do(self, action: p.Action, settings: p.Settings) -> None:
        """Tell the agents. One that cannot be told is noticed by its lease."""
        match action:
            case p.StartStore():
                self._tell({"kind": "store"}, action.node)
            case p.Form():
                host, port = action.store
                for node, first in action.first_ranks.items():
                    form = {"kind": "form", "generation": action.generation, "first_rank": first}
                    form |= {"procs_per_node": settings.procs_per_node, "world_size": settings.world_size}
                    self._tell(form | {"store_host": host, "store_port": port}, node)
            case p.Propose() | p.Commit():
                kind = "propose" if isinstance(action, p.Propose) else "commit"
                fields = {"generation": action.generation, "step": action.step, "save": action.save}
                self._tell({"kind": kind, **fields})
            case p.KillWorkers():
                self._tell({"kind": "kill"})

    def _tell(self, message: Message, node: str | None = None) -> None:
        for agent in list(self._agents):
            if agent.node is not None and node in (None, agent.node):
                try:
                    agent.channel.send(message)
                except Closed:
                    # Left in the list: the next read reports it as lost.
                    continue

    def quit(self) -> None:
        self._tell({"kind": "quit"})
        for agent in list(self._agents):
            self._drop(agent)
        self._listener.close()


def _report(m: Message) -> p.RankReport:
    f = m["fields"]
    return p.RankReport(
        m["generation"],
        m["rank"],
        m["event"],
        step=f.get("step"),
        finished=bool(f.get("finished", False)),
        seconds=float(f.get("seconds", 0.0)),
        cause=Cause(f["cause"]) if "cause" in f else Cause.CRASH,
        error=str(f.get("error", "")),
        traceback=f.get("traceback"),
    )
