"""A node's state segments and its writer process, as the agent keeps them: both outlive workers and generations.

Owns: two memory files per local rank, the socket between each worker and the writer, and noticing the writer's end.
Does not own: what lies in that memory or goes over that socket (stoker.train.state).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

from .run.events import EventLog
from .run.wire import Channel, Closed, Message

IDENT = -2  # of its fork; workers have their ranks, the store -1
SEND_LIMIT = 5.0  # seconds: a writer that does not read is done without

Fork = Callable[[str, int, Message, dict[str, str], tuple[int, ...]], Channel]


class WriterLink:
    """One per node. Without a writer workers do its work themselves, and the next generation gets a new one."""

    def __init__(self, fork: Fork, spec: dict[str, Any], events: EventLog) -> None:
        self._fork, self._spec, self._events = fork, spec, events
        self._segments: dict[int, tuple[int, int]] = {}  # by local rank
        self.channel: Channel | None = None
        self.pid: int | None = None

    def start(self, cpus: frozenset[int]) -> None:
        """Fork the writer, unless there is one. `cpus`: those of the workers, which it keeps off if there are others.

        They are none where workers are not bound."""
        if self.channel is not None:
            return
        others = os.sched_getaffinity(0) - cpus if cpus else frozenset()
        self.channel = self._fork("writer", IDENT, self._spec | {"cpus": sorted(others) or None}, {}, ())
        self.channel.sock.settimeout(SEND_LIMIT)

    @contextlib.contextmanager
    def client(self, generation: int, rank: int, local_rank: int) -> Iterator[tuple[int, ...]]:
        """Descriptors for a worker that is to be forked: its two state segments and its way to the writer."""
        if local_rank not in self._segments:
            first, second = (os.memfd_create(f"stoker-state-{local_rank}-{k}") for k in (0, 1))
            self._segments[local_rank] = first, second
        segments = self._segments[local_rank]
        workers, writers = socket.socketpair()
        with workers:
            with writers:
                message = {"kind": "client", "generation": generation, "rank": rank}
                try:
                    if self.channel is not None:
                        self.channel.send(message, (writers.fileno(), *segments))
                except Closed as e:
                    self.lost(str(e))  # the worker finds its socket closed
            yield (*segments, workers.fileno())

    def lost(self, reason: str) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = self.pid = None
            self._events.write("writer_ended", reason=reason)

    def drop(self) -> None:
        """Kill it together with workers that hang: it may be the one that does not answer."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.lost("killed with workers that hang")

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        for pair in self._segments.values():
            for fd in pair:
                os.close(fd)
        self._segments.clear()
