"""Parts of checkpoints without a trainer: shards in state segments of their own, as a checkpointer packs them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from state_ranks import make_entries, packed, shared
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.retention import Retention
from stoker.train.state.entry import Entry
from stoker.train.state.persist import Answer, Part, Persister, Wave
from stoker.train.storage.posix import PosixShelf

PATIENCE = 60.0
BLOCK = 4 * 1024 * 1024


def memfds() -> list[int]:
    return [os.memfd_create(f"stoker-state-{k}") for k in (0, 1)]


class RankData:
    """What rank `rank` of `size` has to write of `make(seed)`, and the memory that it packs it into."""

    def __init__(self, rank: int, size: int, seed: int, make: Callable[[int], list[Entry]] = make_entries) -> None:
        self.rank, self.fds = rank, memfds()
        self.pack(size, seed, make)

    def pack(self, size: int, seed: int, make: Callable[[int], list[Entry]]) -> None:
        shard, memory = packed(shared(make(seed), self.rank, size), self.rank)
        self.data, self.lines = bytes(memory.data[: shard.size]), shard.lines

    def part(self, run: RunDir, job: int, step: int, size: int, attempt: int = 1) -> Part:
        spec = PosixShelf(run.checkpoints).spec(CheckpointName(step, attempt), f"g0001-{job:08x}", 0, size)
        return Part(job, spec, self.rank, step, attempt, 1, len(self.data), len(self.lines))

    def whole(self) -> Wave:
        """All in one wave."""
        os.ftruncate(self.fds[0], len(self.data) + len(self.lines))
        os.pwrite(self.fds[0], self.data + self.lines, 0)
        return Wave(0, 0, 0, len(self.data))

    def save(self, persister: Persister, part: Part) -> None:
        persister.begin(part)
        persister.wave(part.job, self.whole())


def answer(persister: Persister, what: str) -> Answer:
    """The next answer of that kind; another end of the job is an error."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for found in persister.wait(1.0):
            if found.what == what:
                return found
            assert found.what != "failed", found.error
    raise AssertionError(f"no {what} within {PATIENCE} s")


def request(parts: Sequence[Answer], step: int, attempt: int = 1, keep: int | None = None) -> dict[str, Any]:
    """To publish what these ranks answered."""
    fields = {"run": "run-1", "step": step, "attempt": attempt, "generation": 1, "layout": {}, "state": {"note": "x"}}
    retention = None if keep is None else Retention(keep, attempt=attempt).to_json()
    return {"written": [p.fields for p in parts], "manifest": fields, "keep": retention}
