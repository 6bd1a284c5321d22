"""`python -m stoker.launcher.agent RUN_DIR`: one per node. Runs what the supervisor says on this node's workers.

Owns: the zygote, the workers' segments, logs and exits, and the lease: when the supervisor is silent for too long its
workers are killed, so that nothing of a cut-off node trains on unseen for ever. Decides nothing. Standard library only.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

from .fabric_order import place_of
from .node import ChildEnded, Node
from .protocol import ADDRESSES, ATTEMPT, LEASE, TOKEN, answer
from .run.bootstrap import STAGED
from .run.events import EventLog
from .run.heartbeat import Save
from .run.layout import AttemptDir, RunDir
from .run.stacks import node_name, offer
from .run.wire import Channel, Closed, Keepalive
from .signals import SignalPipe

LOOK_EVERY = 0.2  # seconds between turns of the loop
SLEPT = 3.0  # seconds between two turns (normally below one) that mean that we stood still
STATUS_EVERY = 1.0  # seconds between statuses of all ranks, changed or not


def main(argv: list[str]) -> int:
    run = RunDir(Path(argv[0]))
    attempt = run.attempt(int(os.environ[ATTEMPT]))
    name = node_name()
    offer(run, attempt.number, "agent")
    signals = SignalPipe()
    lease = float(os.environ.get(LEASE, "15"))
    addresses = with_launcher(os.environ[ADDRESSES], os.environ.get("SLURM_LAUNCH_NODE_IPADDR"))
    supervisor, config = connect(addresses, os.environ.pop(TOKEN), name, lease)
    return Agent(run, attempt, name, supervisor, config, lease, signals).serve()


def with_launcher(addresses: str, host: str | None) -> str:
    """The addresses with that of the host that ran srun (it is the supervisor's) second: where names mislead, Slurm's
    own way to it is right."""
    if not host:
        return addresses
    first, *rest = addresses.split(",")
    return ",".join(dict.fromkeys([first, f"{host}:{first.rpartition(':')[2]}", *rest]))


def connect(
    addresses: str, token: str, name: str, lease: float, patience: float = 60.0
) -> tuple[Channel, dict[str, Any]]:
    """Reach the supervisor at the first of `host:port,host:port,...` that answers as ours.

    Returns the channel, and the run's configuration.

    Raises:
        ConnectionError: none did within `patience` seconds; says what was tried.
    """
    deadline = time.monotonic() + patience
    errors: dict[str, str] = {}
    while time.monotonic() < deadline:
        for address in addresses.split(","):
            try:
                return _greet(address, token, name, lease)
            except (OSError, KeyError) as e:
                errors[address] = str(e)
        time.sleep(0.5)
    tried = "; ".join(f"{a}: {e}" for a, e in errors.items())
    raise ConnectionError(f"node {name} cannot reach the supervisor ({tried})")


def _greet(address: str, token: str, name: str, lease: float) -> tuple[Channel, dict[str, Any]]:
    """Prove to each other that both know the token, which itself never crosses the network."""
    host, _, port = address.rpartition(":")
    channel = Channel(socket.create_connection((host, int(port)), timeout=10.0))
    try:
        challenge = channel.next()
        nonce = secrets.token_hex(16)
        hello: dict[str, Any] = {
            "kind": "hello",
            "answer": answer(token, str(challenge["nonce"])),
            "nonce": nonce,
            "node": name,
        }
        hello |= {"address": channel.sock.getsockname()[0], "place": place_of(os.environ, name)}
        channel.send(hello | {"pid": os.getpid()})
        welcome = channel.next()
        if not hmac.compare_digest(str(welcome["answer"]), answer(token, nonce)):
            raise Closed("somebody else listens there")
    except BaseException:
        channel.close()
        raise
    # A supervisor that does not read for as long as the lease is as good as gone.
    channel.sock.settimeout(lease)
    return channel, welcome["config"]


class Agent:
    """The loop: supervisor, zygote, workers, signals, segments."""

    def __init__(
        self,
        run: RunDir,
        attempt: AttemptDir,
        name: str,
        supervisor: Channel,
        config: dict[str, Any],
        lease: float,
        signals: SignalPipe,
    ) -> None:
        self.supervisor, self.signals, self.name, self.lease = supervisor, signals, name, lease
        self.events = EventLog(attempt.events(name), name, attempt.number)
        if STAGED in os.environ:  # bootstrap.py's word, from before there were events
            found = json.loads(os.environ.pop(STAGED))
            self.events.write("environment_staged" if "directory" in found else "environment_not_staged", **found)
        self.node = Node(run, attempt, config, supervisor.send, self.events)
        self.keepalive = Keepalive({"kind": "status", "ranks": []}, lambda: [supervisor])
        self.heard = self.told_all = self.looked = time.monotonic()

    def serve(self) -> int:
        self.keepalive.start()
        try:
            self.node.start_zygote()
            while self._turn():
                self.keepalive.beat()
            return 0
        except ChildEnded as e:
            self.events.write("child_ended", reason=str(e))
            return 1
        except Closed as e:
            # The supervisor is gone (or we are cut off): nobody would stop these workers.
            self.events.write("supervisor_lost", reason=str(e))
            return 1
        finally:
            self.keepalive.stop()
            self.node.kill_all()
            self.node.close()

    def _turn(self) -> bool:
        """One round of the loop; False when told to quit."""
        channels: list[Any] = [self.supervisor, self.signals.read_end, *self.node.channels()]
        readable, _, _ = select.select(channels, [], [], LOOK_EVERY)
        now = time.monotonic()
        if now - self.looked > SLEPT:
            self.heard = now  # we slept (suspended, waiting for storage), and so may the supervisor have
        self.looked = now
        for s in self.signals.take():
            self.events.write("signal", name=s.name)
            self.supervisor.send({"kind": "signal", "name": s.name})
        if self.supervisor in readable or self.supervisor.has_unread:
            self.heard = now
            for message in self.supervisor.receive():
                if message["kind"] == "quit":
                    return False
                self._obey(message)
        elif now - self.heard > self.lease:
            raise Closed(f"no word from the supervisor for {self.lease:.0f} s")
        for channel in readable:
            if isinstance(channel, Channel) and channel is not self.supervisor:
                self.node.read(channel)
        is_due = now - self.told_all > STATUS_EVERY
        if is_due or self.node.is_stopping:
            self.told_all = now if is_due else self.told_all
            statuses = self.node.statuses(only_changed=not is_due)
            if statuses:
                self.supervisor.send({"kind": "status", "ranks": statuses})
        return True

    def _obey(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "store":
                self.node.start_store()
            case "form":
                self.node.form(message)
            case "propose":
                self.supervisor.send(self.node.propose(message["generation"], message["step"], Save(message["save"])))
            case "commit":
                self.node.commit(message["generation"], message["step"], Save(message["save"]))
            case "kill":
                if message.get("stacks"):
                    self.node.kill_hung()
                else:
                    self.node.kill_workers()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
