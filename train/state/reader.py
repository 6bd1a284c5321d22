"""Reads many ranges of a checkpoint's files at once, and checks every 4 MiB block that it touches.

Owns: which blocks are read (each once), by which thread, into whose memory, and their checksums. Bytes go straight
where they belong when that is possible. Does not own: where they come from (source.py), what they mean (loader.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import numpy as np

from ...launcher.run.manifest import BLOCK, LARGEST_SMALL, BlockChecker, FileEntry, InvalidCheckpointError, Manifest
from .checksum import crc32
from .source import ByteSource

# Smaller parts of a block are copied out of a staging buffer: for these, a buffer of their own in the call costs more.
_DIRECT = 64 * 1024


class Taker(Protocol):
    def __call__(self, at: int, data: memoryview) -> None:
        """The range's bytes `at : at + len(data)`; they may change when this returns. Called by several threads."""


@dataclass(frozen=True, eq=False)
class Range:
    """Bytes `at : at + size` of a file are wanted: in `into`, which is as long, or by `take`, part after part."""

    file: str
    at: int
    size: int
    into: memoryview | None = None
    take: Taker | None = None
    is_own: bool = False  # no other process reads these bytes


@dataclass(eq=False)
class _Run:
    """Neighbouring blocks `first : end` of one file that are read in one call, and the ranges that touch them."""

    entry: FileEntry
    first: int
    end: int
    ranges: list[Range] = field(default_factory=list)


def _memory(size: int) -> memoryview:
    return memoryview(bytearray(size))


class VerifiedReader:
    """Reads files that the manifest names; what it hands over has been checked when `read` returns."""

    def __init__(self, source: ByteSource, manifest: Manifest) -> None:
        self._source = source
        self._entries = {f.name: f for f in manifest.files}
        self._checkers: dict[str, BlockChecker] = {}

    def small(self, file: str) -> bytearray:
        """A whole file that has one checksum (index, sidecar).

        Raises:
            InvalidCheckpointError: it is not what was written.
        """
        entry = self._entry(file)
        if entry.size > LARGEST_SMALL:
            raise InvalidCheckpointError(f"{self._source.where(file)}: {entry.size} bytes, too many to read at once")
        data = bytearray(entry.size)
        self._source.read(file, 0, memoryview(data))
        if crc32(data) != entry.crc32:
            raise InvalidCheckpointError(f"{self._source.where(file)}: does not match its checksum in the manifest")
        return data

    def read(self, ranges: Sequence[Range], buffer: Callable[[int], memoryview] = _memory) -> None:
        """Fill or hand over all ranges; no two may overlap. `buffer` makes memory for what cannot go straight.

        Raises:
            InvalidCheckpointError: a block is not what was written, or cannot be read; what the ranges got is void.
        """
        runs, lock = self._runs(ranges), threading.Lock()
        failed = threading.Event()

        def work() -> None:
            staging = None
            try:
                while not failed.is_set():
                    with lock:
                        run = next(runs, None)
                    if run is None:
                        return
                    if staging is None:
                        staging = buffer(self._source.piece)
                    self._read(run, staging)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(self._source.streams, thread_name_prefix="restore") as pool:
            threads = [pool.submit(work) for _ in range(self._source.streams)]
        for thread in threads:
            thread.result()

    def _runs(self, ranges: Sequence[Range]) -> Iterator[_Run]:
        """In the order of the files, so that a disk reads on."""
        limit = self._source.piece // BLOCK
        wanted = sorted((r for r in ranges if r.size), key=lambda r: (r.file, r.at))
        for file, same in groupby(wanted, key=lambda r: r.file):
            entry, where = self._entry(file), self._source.where(file)
            run, end = _Run(entry, 0, 0), 0
            for r in same:
                if r.at < end:
                    raise InvalidCheckpointError(f"{where}: the index has two slices at byte {r.at}")
                end = r.at + r.size
                if end > entry.size:
                    raise InvalidCheckpointError(f"{where}: {entry.size} bytes, the index reaches beyond")
                block, last = r.at // BLOCK, (end - 1) // BLOCK
                while block <= last:
                    if block > run.end or block >= run.first + limit:
                        if run.ranges:
                            yield run
                        run = _Run(entry, block, block)
                    run.end = max(run.end, min(last + 1, run.first + limit))
                    run.ranges.append(r)
                    block = run.end
            yield run

    def _read(self, run: _Run, staging: memoryview) -> None:
        """One run: read, check, and hand over what did not go straight."""
        checker = self._checker(run.entry)
        begin = run.first * BLOCK
        blocks = [_Parts(n * BLOCK, min((n + 1) * BLOCK, run.entry.size)) for n in range(run.first, run.end)]
        past = self._read_past(run, staging[: blocks[-1].end - begin])
        behind: list[tuple[Range, int, int]] = []
        for r in run.ranges:
            for b in blocks:
                first, end = max(r.at, b.begin), min(r.at + r.size, b.end)
                if first >= end:
                    continue
                if r.into is not None and not past and end - first >= _DIRECT:
                    b.add(first, r.into[first - r.at : end - r.at], staging, begin)
                else:
                    behind.append((r, first, end))
        for b in blocks:
            b.add(b.end, None, staging, begin)
        if not past:
            self._source.read(run.entry.name, begin, *(part for b in blocks for part in b.parts))
        for number, b in enumerate(blocks, run.first):
            checker.check(number, *b.parts)
        for r, first, end in behind:
            data = staging[first - begin : end - begin]
            if r.into is not None:
                # A large copy of numpy's lets other threads read and check.
                np.copyto(np.frombuffer(r.into, np.uint8)[first - r.at : end - r.at], np.frombuffer(data, np.uint8))
            elif r.take is not None:
                r.take(first - r.at, data)

    def _read_past(self, run: _Run, data: memoryview) -> bool:
        """Whether the run's bytes are in `data` now, read past the page cache. What others of this node read too is
        left to the cache; by blocks, which are read whole: those of which most is wanted by nobody else."""
        begin, end = run.first * BLOCK, run.first * BLOCK + len(data)
        own = sum(min(r.at + r.size, end) - max(r.at, begin) for r in run.ranges if r.is_own)
        if 2 * own <= len(data):
            return False
        got = self._source.read_past(run.entry.name, begin, data)
        if 0 < got < len(data):
            self._source.read(run.entry.name, begin + got, data[got:])
        return got > 0

    def _checker(self, entry: FileEntry) -> BlockChecker:
        checker = self._checkers.get(entry.name)  # that two threads make the same one is harmless
        if checker is None:
            where = self._source.where(entry.name)
            if entry.blocks is None:
                raise InvalidCheckpointError(f"{where}: has no block checksums")
            checker = self._checkers[entry.name] = BlockChecker(where, self.small(entry.blocks), crc32)
        return checker

    def _entry(self, file: str) -> FileEntry:
        if file not in self._entries:
            raise InvalidCheckpointError(f"{self._source.where(file)}: the manifest does not name it")
        return self._entries[file]


@dataclass(eq=False)
class _Parts:
    """Bytes `begin : end` of a file as the buffers that they are read into."""

    begin: int
    end: int
    parts: list[memoryview] = field(default_factory=list)
    done: int = 0

    def add(self, at: int, target: memoryview | None, staging: memoryview, base: int) -> None:
        """Up to byte `at` into staging (which holds the file from `base` on), and from there on into `target`."""
        done = self.begin + self.done
        if done < at:
            self.parts.append(staging[done - base : at - base])
        if target is not None:
            self.parts.append(target)
        self.done = at + (len(target) if target is not None else 0) - self.begin
