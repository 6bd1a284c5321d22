"""The node's writer: a process forked from the zygote that persists what its workers pack, while they train on.

Owns: one client per worker (socket and state segments, handed over by the agent), and taking as little of the machine
from the workers as it can. Does not own: the work on a job (persist_job.py). It outlives workers and their generations.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from pathlib import Path
from typing import Any

from ...conf.load import from_plain
from ...launcher.run.layout import RunDir
from ...launcher.run.stacks import offer
from ...launcher.run.wire import Channel, Closed
from ..storage.base import Shelf
from ..storage.choice import shelf_of
from .persist import Answer, Part, Wave
from .persist_job import Memory, Runner

NICE = 10  # a tenth of a worker's share of a core that both want; writing past the page cache takes 0.1 s of one per GB
_FDS = 3  # descriptors that come with a client: socket, two state segments


def main(spec: dict[str, Any], channel: Channel) -> int:
    """Serve until the agent is gone. `spec`: {"run": directory, "attempt", "config", "cpus": where to run, or None}."""
    run = RunDir(Path(spec["run"]))
    offer(run, int(spec["attempt"]), "writer")
    _stand_back(spec["cpus"])
    Writer(run, shelf_of(run, from_plain(spec["config"]).checkpoint), channel).serve()
    return 0


def _stand_back(cpus: list[int] | None) -> None:
    """Leave the processors to the workers. Threads that start later inherit this."""
    try:
        os.nice(NICE)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        if cpus:
            os.sched_setaffinity(0, cpus)
    except OSError as e:  # not allowed here: then it is in their way a little more
        print(f"writer: {e}", file=sys.stderr)


class Writer:
    """The loop: agent, clients. All that waits for storage is in the runners' threads."""

    def __init__(self, run: RunDir, shelf: Shelf, agent: Channel) -> None:
        self._run, self._shelf, self._agent = run, shelf, agent
        self._clients: dict[Channel, Runner] = {}

    def serve(self) -> None:
        while True:
            readable, _, _ = select.select([self._agent, *self._clients], [], [])
            for channel in readable:
                try:
                    messages = channel.receive()
                except Closed:
                    if channel is self._agent:
                        return
                    # The worker ended: of its last job nothing becomes a checkpoint, or it was published already.
                    self._clients.pop(channel).close(patience=0)
                    channel.close()
                    continue
                for message in messages:
                    if channel is self._agent:
                        self._accept(message)
                    else:
                        _order(self._clients[channel], message)

    def _accept(self, message: dict[str, Any]) -> None:
        assert message["kind"] == "client", message
        fds, self._agent.fds = self._agent.fds[:_FDS], self._agent.fds[_FDS:]
        client = Channel(socket.socket(fileno=fds[0]))

        def answer(found: Answer) -> None:
            with contextlib.suppress(Closed):  # the loop will see it
                client.send(found.to_json())

        self._clients[client] = Runner(self._run, self._shelf, Memory(fds[1:]), answer)


def _order(runner: Runner, message: dict[str, Any]) -> None:
    match message["kind"]:
        case "begin":
            runner.begin(Part(**message["part"]))
        case "wave":
            runner.wave(message["job"], Wave(**message["wave"]))
        case "publish":
            runner.publish(message["job"], message["request"])
        case "abandon":
            runner.abandon(message["job"])
