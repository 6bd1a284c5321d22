"""The supervisor's side of the agents: accepts them, checks that they are ours, turns messages into policy events.

Owns: the listening socket, one channel per node, and the lease on each. Does not own: what follows from news.
"""

from __future__ import annotations

import contextlib
import hmac
import resource
import secrets
import select
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import policy_types as p
from .protocol import answer
from .run.heartbeat import Phase
from .run.outcome import Cause
from .run.wire import MAX_LINE, Channel, Closed, Keepalive, Message

HELLO_LIMIT = 10.0  # seconds in which a stranger must prove that it is ours
HELLO_BYTES = 4096  # bytes that a stranger may send for that
STRANGERS = 64  # more unproven connections than agents at a time are turned away
SLEPT = 3.0  # seconds between two looks at the leases (normally below one) that mean that we stood still
SEND_LIMIT = 5.0  # seconds: a send to a frozen node must not hold up the others for longer


@dataclass(frozen=True)
class AgentSignalled:
    """Slurm, or somebody, signalled a node's agent: what that means is to be found out."""

    node: str
    signal: str


@dataclass
class _Agent:
    channel: Channel
    nonce: str
    node: str | None = None  # None until it has proved that it is ours
    address: str = ""
    heard: float = field(default_factory=time.monotonic)
    is_dead: bool = False  # it could not be sent to; reported as lost at the next read


class Agents:
    """One loop's worth of sockets: `wait`, then `read`. Other descriptors may be waited for along."""

    def __init__(self, token: str, config: dict[str, Any], lease: float) -> None:
        self._token, self._config, self._lease = token, config, lease
        # A descriptor per node, and no limit to the nodes.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=1024)
        self._listener.setblocking(False)
        self._agents: dict[int, _Agent] = {}  # by descriptor
        self._looked = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.keepalive = Keepalive({"kind": "ping"}, lambda: [a.channel for a in self._known()])
        self.keepalive.start()

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

    def watch(self, fd: int) -> None:
        """Have `wait` return when `fd` is readable, too."""
        self._selector.register(fd, selectors.EVENT_READ)

    def wait(self, seconds: float) -> set[int]:
        """Readable descriptors, after at most `seconds`."""
        return {key.fd for key, _ in self._selector.select(seconds)}

    def any_connected(self) -> bool:
        return bool(self._known())

    def _known(self) -> list[_Agent]:
        return [a for a in list(self._agents.values()) if a.node is not None and not a.is_dead]

    def read(self, readable: set[int]) -> Iterator[p.Event | AgentSignalled]:
        """Events out of what has arrived on these descriptors."""
        if self._listener.fileno() in readable:
            self._accept()
        for fd in readable & self._agents.keys():
            agent = self._agents[fd]
            try:
                messages = agent.channel.receive()
                agent.heard = time.monotonic()
                for message in messages:
                    yield from self._message(agent, message)
            except (Closed, KeyError, TypeError, ValueError) as e:
                yield from self._lost(agent, f"connection lost ({e})", is_closed=isinstance(e, Closed))
        yield from self._keep_leases()

    def _accept(self) -> None:
        """Take in all that wait. Out of descriptors: they wait on in the backlog."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if len(self._agents) - len(self._known()) >= max(STRANGERS, self._config["cluster"]["nodes"]):
                sock.close()
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(SEND_LIMIT)
            agent = _Agent(Channel(sock, HELLO_BYTES), secrets.token_hex(16))
            self._agents[sock.fileno()] = agent
            self._selector.register(sock, selectors.EVENT_READ)
            if not self._send(agent, {"kind": "challenge", "nonce": agent.nonce}):
                self._drop(agent)

    def _keep_leases(self) -> Iterator[p.Event]:
        now = time.monotonic()
        if now - self._looked > SLEPT:
            # We slept (suspended, or waiting for storage), and so may they have: everybody's lease begins anew.
            for agent in self._agents.values():
                agent.heard = now
        self._looked = now
        for agent in list(self._agents.values()):
            limit = HELLO_LIMIT if agent.node is None else self._lease
            if agent.is_dead:
                yield from self._lost(agent, "it does not read what it is sent")
            elif now - agent.heard > limit:
                # It may be us who slept: what has arrived meanwhile counts first.
                if agent.node is not None and _is_readable(agent.channel):
                    agent.heard = now
                    continue
                yield from self._lost(agent, f"no word for {limit:.0f} s")

    def _lost(self, agent: _Agent, reason: str, is_closed: bool = False) -> Iterator[p.Event]:
        self._drop(agent)
        # One that has come back by another connection is not lost.
        if agent.node is not None and all(a.node != agent.node for a in self._known()):
            yield p.AgentLost(agent.node, reason, is_closed)

    def _drop(self, agent: _Agent) -> None:
        if self._agents.pop(agent.channel.fileno(), None) is not None:
            self._selector.unregister(agent.channel.sock)
        agent.channel.close()

    def _send(self, agent: _Agent, message: Message) -> bool:
        """False, and the agent is reported as lost at the next read, if it cannot be sent to."""
        try:
            agent.channel.send(message)
        except Closed:
            agent.is_dead = True
        return not agent.is_dead

    def _message(self, agent: _Agent, m: Message) -> Iterator[p.Event | AgentSignalled]:
        if agent.node is None:
            if not hmac.compare_digest(str(m.get("answer")), answer(self._token, agent.nonce)):
                raise Closed("not one of our agents")
            welcome = {"kind": "welcome", "answer": answer(self._token, str(m["nonce"])), "config": self._config}
            agent.node, agent.address = str(m["node"]), str(m["address"])
            agent.channel.max_line = MAX_LINE
            # Before anything that may be asked of it because it has joined.
            if self._send(agent, welcome):
                yield p.AgentJoined(agent.node, agent.address, tuple(map(str, m.get("place", ()))))
            return
        match m["kind"]:
            case "ready":
                yield p.AgentReady(agent.node)
            case "store":
                yield p.StoreUp(self._seen_from_others(agent.node) or agent.address, m["port"])
            case "status":
                if m["ranks"]:
                    yield p.NodeStatus(tuple(p.RankStatus(**(r | {"phase": Phase(r["phase"])})) for r in m["ranks"]))
            case "report":
                if m["event"] in _REPORTS:
                    yield _report(m)
            case "exited":
                yield p.RankExited(m["generation"], m["rank"], m["code"], m["signal"], m["tail"])
            case "answer":
                yield p.ProposalAnswer(m["generation"], agent.node, m["step"], m["accepted"], m["max_step"])
            case "signal":
                yield AgentSignalled(agent.node, str(m["name"]))

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
                    form |= {"store_host": host, "store_port": port, "address": self._seen_from_others(node)}
                    self._tell(form, node)
            case p.Propose() | p.Commit():
                kind = "propose" if isinstance(action, p.Propose) else "commit"
                fields = {"generation": action.generation, "step": action.step, "save": int(action.save)}
                self._tell({"kind": kind, **fields})
            case p.KillWorkers():
                self._tell({"kind": "kill", "stacks": action.with_stacks})

    def _seen_from_others(self, node: str) -> str | None:
        """Address by which other nodes reach this one; None if all run on one machine.

        An agent's own end of its connection says so, but for the one beside us: what it came by (loopback, or whatever
        this host's name means here) leads to nobody else. By ours the others did come.
        """
        outside = [a for a in self._known() if not _is_local(a.channel.sock)]
        agent = next((a for a in self._known() if a.node == node), None)
        if agent is None or not outside:
            return None
        return agent.address if agent in outside else str(outside[0].channel.sock.getsockname()[0])

    def _tell(self, message: Message, node: str | None = None) -> None:
        """To all agents, or to one; who cannot be told is reported as lost at the next read."""
        for agent in self._known():
            if node in (None, agent.node):
                self._send(agent, message)

    def quit(self) -> None:
        """Tell the agents to end; they close their connections when they have."""
        self._tell({"kind": "quit"})

    def close(self) -> None:
        self.keepalive.stop()
        for agent in list(self._agents.values()):
            self._drop(agent)
        self._selector.close()
        self._listener.close()


def _is_local(sock: socket.socket) -> bool:
    """Whether the other end is on this host."""
    theirs = str(sock.getpeername()[0])
    return theirs.startswith("127.") or theirs == sock.getsockname()[0]


def _is_readable(channel: Channel) -> bool:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(0))


# What workers report is for the record; the policy knows these.
_REPORTS = ("checkpoint_saved", "ended", "failed", "peer_lost")


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
