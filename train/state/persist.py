"""How a rank has its part of a checkpoint persisted, by whichever process does it, while it trains on.

Owns: the interface between the checkpointer (one per rank) and a writer: the node's writer process, or a thread of this
process where there is none (tools, tests, after that process was lost). A writer knows bytes, never tensors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

WAVE, PART, PUBLISHED, FAILED = "wave", "part", "published", "failed"


@dataclass(frozen=True)
class Part:
    """One rank's part of a checkpoint: a shard of `size` bytes, its block checksums, and its lines of the index."""

    job: int  # number of the save; grows, over the passes of a worker too
    spec: dict[str, Any]  # of the target (Shelf.spec), the same on all ranks; a writer calls Target.prepare first
    rank: int
    step: int
    attempt: int  # whose save it is: a writer checks the fence of this attempt before each file
    generation: int
    size: int
    lines: int  # bytes of the index lines; they lie in the first wave's segment right behind it, and stay there


@dataclass(frozen=True)
class Wave:
    """Bytes `file_at : file_at + size` of the shard lie at `segment_at` in state segment `segment` (0 or 1)."""

    segment: int
    segment_at: int
    file_at: int  # a multiple of the checksum block, as every size but the last wave's
    size: int


@dataclass(frozen=True)
class Answer:
    """What became of a job. `what`: `wave` (that wave's memory may be used again), `part` (the rank's files are on
    stable storage), `published`, or `failed` (`error` says why; nothing more comes for this job).

    `fields`. wave: segment, file_at. part: shard, sidecar (FileEntry as dict), part (crc32 of the lines), seconds (from
    `begin`). published: events, [{"event": ..., fields...}], for rank 0 to report (what retention could not remove),
    and time (time.monotonic() when it was a checkpoint, one clock per node).
    """

    job: int
    what: str
    fields: dict[str, Any]
    error: str | None = None
    superseded: bool = False  # failed because a later attempt has begun

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Persister(Protocol):
    """Used by one thread. Nothing here waits for storage except `wait`; nothing raises for it either: see `Answer`."""

    def begin(self, part: Part) -> None:
        """A new job; the one before is done, failed or abandoned."""
        ...

    def wave(self, job: int, wave: Wave) -> None:
        """These bytes are packed and will not change until their answer has come. The last wave ends at `size`."""
        ...

    def publish(self, job: int, request: dict[str, Any]) -> None:
        """Rank 0, when all ranks' parts are written: merge the index lines, write the manifest, publish, prune.

        `request`: `written` (the fields of all ranks' `part` answers, by rank), `manifest` (its fields without files
        and time), `keep` (launcher/run/retention.py, Retention.to_json; None: remove nothing, there is no time for it).
        """
        ...

    def abandon(self, job: int) -> None:
        """Leave the job: no further answer comes for it, and the memory of its waves is free when this returns. Rank
        0's also takes the target away."""
        ...

    def poll(self) -> list[Answer]:
        """Answers that have come."""
        ...

    def wait(self, timeout: float) -> list[Answer]:
        """At least one answer, or none after `timeout` seconds."""
        ...

    def close(self) -> None: ...
