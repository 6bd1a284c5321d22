"""Packing: the copy of a rank's slices into host memory, whole or wave after wave beside the next forward pass.

Owns: the plan of a save, kept between saves because a trainer's entries do not change their shape, and the thread that
copies where copying is not done at once. Does not own: memory (segment.py), or what becomes of it (persist.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ...launcher.run.manifest import BLOCK, shard_name
from .entry import Entry, check, plan
from .index import part
from .persist import Answer, Part, Persister, Wave
from .segment import Memory, Placed, layout

_LOOK = 0.1  # seconds between looks whether the packing is to stop


@dataclass(frozen=True, eq=False)
class Shard:
    """What one rank writes: the file's layout and the lines of the index that belong to it."""

    head: bytes
    placed: tuple[Placed, ...]
    lines: bytes

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.placed[-1].at + self.placed[-1].size if self.placed else len(self.head)

    @staticmethod
    def of(entries: Sequence[Entry], rank: int) -> Shard:
        """Raises ValueError: entries with one name, or that share memory."""
        check(entries)
        head, placed = layout(plan(entries))
        return Shard(head, placed, part(shard_name(rank), placed))


class Planner:
    """Plans a rank's shard once, and again only when its entries are other ones."""

    def __init__(self, rank: int) -> None:
        self._rank, self._key = rank, None
        self._entries: list[Entry] = []  # held: while they live, no other tensor has their memory
        self._shard: Shard | None = None

    def shard(self, entries: Sequence[Entry]) -> Shard:
        """Raises ValueError, as `Shard.of`."""
        if self._shard is None or not _are_same(entries, self._entries):
            self._shard, self._entries = Shard.of(entries, self._rank), list(entries)
        return self._shard


def _are_same(a: Sequence[Entry], b: Sequence[Entry]) -> bool:
    return len(a) == len(b) and all(_is_same(x, y) for x, y in zip(a, b, strict=True))


def _is_same(a: Entry, b: Entry) -> bool:
    x, y = a.tensor, b.tensor
    return (
        (x is y or (x.data_ptr() == y.data_ptr() and x.stride() == y.stride() and x.device == y.device))
        and x.dtype == y.dtype
        and (a.name, a.box, a.shape, a.replica) == (b.name, b.box, b.shape, b.replica)
    )


@dataclass(frozen=True)
class Staging:
    """Where the waves of a shard of `size` bytes go: all of it at once, or `wave` bytes (whole blocks) in turn."""

    size: int
    lines: int
    wave: int  # bytes; at least `size`: one wave

    @staticmethod
    def whole(shard: Shard) -> Staging:
        """One wave."""
        return Staging(shard.size, len(shard.lines), shard.size)

    @staticmethod
    def halves(shard: Shard, staging: int) -> Staging:
        """Two memories that have `staging` bytes together, and what the index lines need; whole, if the shard fits
        into each of them."""
        return Staging(shard.size, len(shard.lines), max(staging // 2 // BLOCK, 1) * BLOCK)

    @property
    def is_whole(self) -> bool:
        """Whether there is one wave only."""
        return self.size <= self.wave

    @property
    def capacity(self) -> int:
        """Bytes of each of the two memories."""
        return min(self.wave, self.size) + self.lines

    def waves(self, first: int) -> list[Wave]:
        """`first`: the memory where the first goes, 0 or 1."""
        starts = range(0, self.size, self.wave)
        return [Wave((first + i) % 2, 0, at, min(self.wave, self.size - at)) for i, at in enumerate(starts)]


def rows(tensor: Tensor, begin: int, end: int) -> list[Tensor]:
    """Elements `begin : end` of a tensor in row-major order, as views of it, in that order."""
    if begin >= end:
        return []
    if tensor.is_contiguous():
        return [tensor.view(-1)[begin:end]]
    row = prod(tensor.shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        return rows(tensor[last], begin - last * row, end - last * row)
    middle = [tensor[first:last]] if last > first else []
    before = rows(tensor[first - 1], begin - (first - 1) * row, row) if begin < first * row else []
    after = rows(tensor[last], 0, end - last * row) if end > last * row else []
    return [*before, *middle, *after]


Copies = list[tuple[Tensor, Tensor]]  # (to, from)


def copies(shard: Shard, wave: Wave, memory: Memory) -> Copies:
    """What to copy for one wave, the header excepted."""
    found: Copies = []
    begin, end = wave.file_at, wave.file_at + wave.size
    for p in shard.placed:
        if p.at + p.size <= begin or p.at >= end or not p.size:
            continue
        width = p.slice.tensor.element_size()
        # Waves end at whole blocks, and each tensor is aligned to its own element: no element is cut.
        low, high = max(begin - p.at, 0) // width, min(end - p.at, p.size) // width
        at = wave.segment_at + max(p.at - begin, 0)
        whole = low == 0 and high * width == p.size
        for source in [p.slice.tensor] if whole else rows(p.slice.tensor, low, high):
            size = source.numel() * width
            found.append((memory.tensor[at : at + size].view(source.dtype).view(source.shape), source))
            at += size
    return found


def pack(shard: Shard, wave: Wave, memory: Memory, pieces: Copies) -> None:
    """Bring one wave into memory, and the index lines behind the first. `pieces`: of `copies`."""
    data, at = memory.data, wave.segment_at
    if wave.file_at < len(shard.head):
        head = shard.head[wave.file_at : wave.file_at + wave.size]
        data[at : at + len(head)] = head
    if wave.file_at == 0:
        data[at + wave.size : at + wave.size + len(shard.lines)] = shard.lines
    for target, source in pieces:
        target.copy_(source, non_blocking=True)


class Packer:
    """Packs one job's shard and hands it to the persister, in a thread of its own or at once."""

    def __init__(
        self,
        shard: Shard,
        staging: Staging,
        first: int,
        memories: Sequence[Memory],
        cache: dict[tuple[int, int], Copies],
    ) -> None:
        """`cache`: of `copies`, by (wave's place in the file, memory); the caller empties it when shard or memories
        change."""
        self._shard, self._staging, self._waves, self._memories = shard, staging, staging.waves(first), memories
        self._cache = cache
        self._thread: threading.Thread | None = None
        self._is_cancelled = False
        self.problem: str | None = None
        self.answers: list[Answer] = []  # that came while it packed, but those of waves

    def run(self, persister: Persister, job: Part) -> None:
        """All of it, now. An error becomes `problem`."""
        self._guarded(lambda: self._pack(persister, job, lambda: None))

    def start(self, persister: Persister, job: Part, device: torch.device) -> None:
        """In a thread; the tensors must not change until `wait` has returned. On a device the copies see what was
        queued there before this call."""
        if device.type == "cuda":
            before = torch.cuda.current_stream(device).record_event()

        def work() -> None:
            if device.type != "cuda":
                self._pack(persister, job, lambda: None)
                return
            torch.cuda.set_device(device)
            for memory in self._memories:
                memory.pin()
            side = torch.cuda.Stream(device)
            side.wait_event(before)
            with torch.cuda.stream(side):
                self._pack(persister, job, side.synchronize)

        self._thread = threading.Thread(target=lambda: self._guarded(work), name="stoker-pack", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the tensors may change."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Until all is packed, or cannot be; whether that is so after `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def cancel(self) -> None:
        """Stop at the next wave, and wait for that."""
        self._is_cancelled = True
        self.wait()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as e:
            self.problem = str(e.strerror if e.filename is None else f"{e.filename}: {e.strerror}")
        except MemoryError as e:
            self.problem = str(e) or "out of memory"
        except Exception as e:  # a thread's exception would be lost
            self.problem = f"{type(e).__name__}: {e}"

    def _pack(self, persister: Persister, job: Part, synchronize: Callable[[], None]) -> None:
        for number in {wave.segment for wave in self._waves}:
            self._memories[number].reserve(self._staging.capacity)
        persister.begin(job)
        free = len(self._memories)
        for wave in self._waves:
            while free == 0:
                if self._is_cancelled or any(a.what == "failed" for a in self.answers):
                    return
                free += self._freed(persister.wait(_LOOK), job.job)
            key, memory = (wave.file_at, wave.segment), self._memories[wave.segment]
            if key not in self._cache:
                self._cache[key] = copies(self._shard, wave, memory)
            pack(self._shard, wave, memory, self._cache[key])
            synchronize()
            free -= 1
            persister.wave(job.job, wave)

    def _freed(self, answers: Sequence[Answer], job: int) -> int:
        mine = [a for a in answers if a.job == job]
        self.answers += [a for a in mine if a.what != "wave"]
        return sum(a.what == "wave" for a in mine)
