"""`python -m stoker.launcher.agent RUN_DIR`: one per node. Runs what the supervisor says on this node's workers.

Owns: the zygote, the workers' segments, logs and exits, and the lease: when the supervisor is silent for too long its
workers are killed, so that nothing of a cut-off node trains on unseen for ever. Decides nothing. Standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from .node import Node
from .protocol import ADDRESSES, ATTEMPT, LEASE, NODE, TOKEN, answer
from .run.events import EventLog
from .run.layout import AttemptDir, RunDir
from .run.wire import Channel, Closed

STATUS_EVERY = 0.2  # seconds between looks at the segments
KEEPALIVE = 1.0  # seconds after which a status is sent though nothing changed


def main(argv: list[str]) -> int:
    run = RunDir(Path(argv[0]))
    attempt = run.attempt(int(os.environ[ATTEMPT]))
    name = os.environ.get(NODE) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    signals = _SignalPipe()
    supervisor = connect(os.environ[ADDRESSES], os.environ.pop(TOKEN), name)
    return Agent(run, attempt, name, supervisor, signals).serve()


class _SignalPipe:
    """Signals become readable bytes: handlers do nothing else."""

    def __init__(self) -> None:
        self.read_end, write_end = os.pipe()
        for fd in (self.read_end, write_end):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write_end)
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(s, lambda *_: None)

    def take(self) -> list[str]:
        try:
            return [signal.Signals(b).name for b in os.read(self.read_end, 64)]
        except BlockingIOError:
            return []


def connect(addresses: str, token: str, name: str, patience: float = 30.0) -> Channel:
    """Reach the supervisor at the first of `host:port,host:port,...` that answers as ours.

    Raises:
        ConnectionError: none did within `patience` seconds; says what was tried.
    """
    deadline = time.monotonic() + patience
    errors: dict[str, str] = {}
    while time.monotonic() < deadline:
        for address in addresses.split(","):
            host, _, port = address.rpartition(":")
            try:
                sock = socket.create_connection((host, int(port)), timeout=5.0)
                sock.settimeout(10.0)
                channel = Channel(sock)
                challenge = first_message(channel)
                # Only who knows the token can answer; the token itself never crosses the network.
                hello = {"kind": "hello", "answer": answer(token, str(challenge["nonce"])), "node": name}
                channel.send(hello | {"address": sock.getsockname()[0], "pid": os.getpid()})
                sock.settimeout(None)
                return channel
            except (OSError, KeyError) as e:
                errors[address] = str(e)
        time.sleep(0.5)
    tried = "; ".join(f"{a}: {e}" for a, e in errors.items())
    raise ConnectionError(f"node {name} cannot reach the supervisor ({tried})")


def first_message(channel: Channel) -> dict[str, Any]:
    while True:
        messages = channel.receive()
        if messages:
            return messages[0]


class Agent:
    """The loop: supervisor, zygote, workers, signals, segments."""

    def __init__(self, run: RunDir, attempt: AttemptDir, name: str, supervisor: Channel, signals: _SignalPipe) -> None:
        self.supervisor, self.signals, self.name = supervisor, signals, name
        self.events = EventLog(attempt.events(name), name, attempt.number)
        self.node = Node(run, attempt, self._tell, self.events)
        self.lease = float(os.environ.get(LEASE, "15"))
        self.heard = time.monotonic()
        self.told = 0.0

    def _tell(self, message: dict[str, Any]) -> None:
        self.supervisor.send(message)
        self.told = time.monotonic()

    def serve(self) -> int:
        try:
            self.node.start_zygote()
            while True:
                if not self._turn():
                    return 0
        except Closed as e:
            # The supervisor is gone (or we are cut off): nobody would stop these workers.
            self.events.write("supervisor_lost", reason=str(e))
            return 1
        finally:
            self.node.kill_all()
            self.node.close()

    def _turn(self) -> bool:
        """One round of the loop; False when told to quit."""
        channels: list[Any] = [self.supervisor, self.signals.read_end, *self.node.channels()]
        readable, _, _ = select.select(channels, [], [], STATUS_EVERY)
        now = time.monotonic()
        if self.signals.read_end in readable:
            for name in self.signals.take():
                # SIGCONT comes with every signal of Slurm's; SIGCHLD is not ours to tell.
                if name not in ("SIGCHLD", "SIGCONT"):
                    self.events.write("signal", name=name)
                    self._tell({"kind": "signal", "name": name})
        if self.supervisor in readable:
            self.heard = now
            for message in self.supervisor.receive():
                if message["kind"] == "quit":
                    return False
                self._obey(message)
        for channel in readable:
            if isinstance(channel, Channel) and channel is not self.supervisor:
                self.node.read(channel)
        statuses = self.node.changed_statuses(everything=now - self.told > KEEPALIVE)
        if statuses or now - self.told > KEEPALIVE:
            self._tell({"kind": "status", "ranks": statuses})
        if now - self.heard > self.lease:
            raise Closed(f"no word from the supervisor for {self.lease:.0f} s")
        return True

    def _obey(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "welcome":
                self.node.config = message["config"]
            case "store":
                self.node.start_store()
            case "form":
                self.node.form(message)
            case "propose":
                self._tell(self.node.propose(message["generation"], message["step"], message["save"]))
            case "commit":
                self.node.commit(message["generation"], message["step"], message["save"])
            case "kill":
                self.node.kill_workers()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
