"""The save in flight, as one rank knows it.

Owns: what is known of it, from the persister's answers. Does not own: what follows (checkpointer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...launcher.run.layout import CheckpointName
from .agreement import Status
from .packing import Packer
from .persist import FAILED, PART, PUBLISHED, Answer


@dataclass(eq=False)
class Flight:
    """One save from its begin to its end."""

    name: CheckpointName
    job: int
    state: dict[str, Any]
    prune: bool
    packer: Packer
    began: float  # time.monotonic()
    stall: float = 0.0  # seconds of training that `begin` took
    waited: float = 0.0  # seconds that `settle` took
    is_settled: bool = False  # it has waited
    written: dict[str, Any] | None = None  # this rank's part is on stable storage
    all_written: list[Status] = field(default_factory=list)  # of all ranks, once all have written
    is_publishing: bool = False
    published: dict[str, Any] | None = None  # rank 0
    problem: str | None = None
    superseded: str | None = None

    def take(self, answers: Sequence[Answer]) -> None:
        """Note these, and those that came while it was packed."""
        for answer in [*self.packer.answers, *answers]:
            if answer.job != self.job:
                continue
            if answer.what == PART:
                self.written = answer.fields
            elif answer.what == PUBLISHED:
                self.published = answer.fields
            elif answer.what == FAILED and answer.superseded:
                self.superseded = answer.error
            elif answer.what == FAILED:
                self.problem = answer.error
        self.packer.answers.clear()
        if self.problem is None:
            self.problem = self.packer.problem

    def counts(self) -> tuple[int, int]:
        """(done, failed): whether this rank is done with what is under way, and whether it cannot be."""
        done = self.published if self.is_publishing else self.written
        return int(done is not None), int(self.problem is not None or self.superseded is not None)

    def account(self) -> dict[str, Any]:
        """Rank 0, of one that is published: the fields of `checkpoint_saved`."""
        assert self.published is not None
        slowest = max(range(len(self.all_written)), key=lambda rank: self.all_written[rank]["seconds"])
        return {
            "step": self.name.step,
            "seconds": round(self.published["time"] - self.began, 3),
            "stall_seconds": round(self.stall, 3),
            "wait_seconds": round(self.waited, 3),
            "bytes": sum(w["shard"]["size"] for w in self.all_written),
            "slowest_rank": slowest,
            "slowest_seconds": self.all_written[slowest]["seconds"],
        }
