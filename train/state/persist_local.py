"""Persists with a thread of this process: tools, tests, and workers whose node has lost its writer process.

Owns: the queue between the rank's thread and the runner's. Does not own: the work (persist_job.py).
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Sequence
from typing import Any

from ...launcher.run.layout import RunDir
from ..storage.base import Shelf
from .persist import Answer, Part, Wave
from .persist_job import Memory, Runner

_PATIENCE = 5.0  # seconds that `close` waits for storage


class LocalPersister:
    """`fds`: the two state segments (memfds); descriptors of its own are made of them."""

    def __init__(self, run: RunDir, shelf: Shelf, fds: Sequence[int]) -> None:
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._runner = Runner(run, shelf, Memory([os.dup(fd) for fd in fds]), self._answers.put)
        self._abandoned = 0

    def begin(self, part: Part) -> None:
        self._runner.begin(part)

    def wave(self, job: int, wave: Wave) -> None:
        self._runner.wave(job, wave)

    def publish(self, job: int, request: dict[str, Any]) -> None:
        self._runner.publish(job, request)

    def abandon(self, job: int, others: Part | None = None) -> None:
        """As the protocol says. `others`: the job is that of another persister, which is no more."""
        # The memory is free at once: what the thread still writes of it becomes no checkpoint.
        self._abandoned = max(self._abandoned, job)
        self._runner.abandon(job, others)

    def poll(self) -> list[Answer]:
        return self._taken(None)

    def wait(self, timeout: float) -> list[Answer]:
        deadline = time.monotonic() + timeout
        while not (found := self._taken(deadline - time.monotonic())) and time.monotonic() < deadline:
            pass
        return found

    def _taken(self, timeout: float | None) -> list[Answer]:
        """All that is there; wait for a first one if there is a timeout."""
        found = []
        try:
            if timeout is not None and timeout > 0:
                found.append(self._answers.get(timeout=timeout))
            while True:
                found.append(self._answers.get_nowait())
        except queue.Empty:
            return [a for a in found if a.job > self._abandoned]

    def close(self) -> None:
        self._runner.close(_PATIENCE)
