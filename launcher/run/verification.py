"""Reads all of a checkpoint and says what is wrong with it, and which tensors that hits.

Owns: the check of every block by several threads, wherever the bytes come from (`Read`). Does not own: what is said to
whom. Standard library only: a checkpoint can be checked where there is no torch.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from .index_bounds import WIDTHS, Bounds
from .manifest import (
    BLOCK,
    INDEX,
    MANIFEST,
    FileEntry,
    InvalidCheckpointError,
    Manifest,
    check_entries,
    check_sizes,
    read_manifest,
    shard_name,
)
from .verdict_note import VERIFIED, VerdictNote, stamps_of, write_note

Read = Callable[[str, int, int], bytes]  # (file, at, size) -> so many bytes; raises OSError; called by several threads
Seen = Callable[[int], object]  # called with the bytes that have been checked since, by any thread
THREADS = 8  # zlib and the reads leave the interpreter
_NAMED = 20  # so many damages are told with the tensors that they hit
_PIECE = 4 * BLOCK  # bytes that one thread reads at once
_AHEAD = 4  # pieces per thread that are asked for at a time


@dataclass(frozen=True)
class Damage:
    """Bytes `at : at + size` of `file` are not what was written, or cannot be read."""

    file: str
    at: int
    size: int
    block: int | None  # None: the file as a whole
    problem: str
    tensors: tuple[str, ...]  # names of the logical tensors that have bytes there; () if the index does not say
    is_unread: bool = False  # the storage gave an error, or has no such file: that may be over at the next try

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


def open_file(directory: Path) -> Read:
    """Reads of a checkpoint in a directory."""

    def read(file: str, at: int, size: int) -> bytes:
        with open(directory / file, "rb", buffering=0) as f:
            data = os.pread(f.fileno(), size, at)
            while len(data) < size and (more := os.pread(f.fileno(), size - len(data), at + len(data))):
                data += more
        return data

    return read


def all_damage(manifest: Manifest, read: Read, seen: Seen = lambda count: None, threads: int = THREADS) -> list[Damage]:
    """Everything that is wrong, in the order of the manifest's files; nothing if all bytes are what was written."""
    try:
        check_entries(manifest, MANIFEST)
    except InvalidCheckpointError as e:
        return [Damage(MANIFEST, 0, 0, None, str(e).removeprefix(f"{MANIFEST}: "), ())]
    small = {f.name: f for f in manifest.files if f.blocks is None}
    content: dict[str, bytes] = {}
    found = [d for f in small.values() if (d := _check_small(f, read, content)) is not None]
    lines: list[dict[str, Any]] = []
    try:
        lines = parse_index(content.get(INDEX, b""), Bounds.of(manifest))
        found += _gaps(lines, {f.name: f.size for f in manifest.files})
    except ValueError as e:
        lines = []
        found.append(Damage(INDEX, 0, 0, None, f"is none of an index ({e})", ()))
    large = [f for f in manifest.files if f.blocks is not None and f.blocks in content]
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        cut: set[str] = set()  # files that end too early: of these, nothing more is read
        pieces, work = _pieces(large, cut), deque[Future[list[Damage]]]()
        try:
            while True:
                for f, at in islice(pieces, _AHEAD * threads - len(work)):
                    work.append(pool.submit(_check_piece, f, content[str(f.blocks)], at, read, seen, cut))
                if not work:
                    break
                for damage in work.popleft().result():
                    found.append(_with_tensors(damage, lines) if len(found) < _NAMED else damage)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _pieces(files: Iterable[FileEntry], cut: Container[str]) -> Iterator[tuple[FileEntry, int]]:
    """(file, first byte). One at a time: what a manifest says of a size need not be so."""
    for f in files:
        for at in range(0, f.size, _PIECE):
            if f.name in cut:
                break
            yield f, at


def _check_small(f: FileEntry, read: Read, content: dict[str, bytes]) -> Damage | None:
    try:
        data = read(f.name, 0, f.size)
    except OSError as e:
        return Damage(f.name, 0, f.size, None, e.strerror or str(e), (), is_unread=True)
    if len(data) != f.size:
        return Damage(f.name, 0, f.size, None, f"{len(data)} bytes, expected {f.size}", ())
    if zlib.crc32(data) != f.crc32:
        return Damage(f.name, 0, f.size, None, "does not match its checksum in the manifest", ())
    content[f.name] = data
    return None


def _check_piece(f: FileEntry, sidecar: bytes, at: int, read: Read, seen: Seen, cut: set[str]) -> list[Damage]:
    """Some blocks from byte `at` on."""
    size = min(_PIECE, f.size - at)
    try:
        data = memoryview(read(f.name, at, size))
    except OSError as e:
        return [Damage(f.name, at, size, at // BLOCK, f"from byte {at}: {e.strerror or e}", (), is_unread=True)]
    found: list[Damage] = []
    for begin in range(0, size, BLOCK):
        number, end = (at + begin) // BLOCK, min(begin + BLOCK, size)
        if len(data) < end:
            cut.add(f.name)
            problem = f"block {number}: ends at byte {at + len(data)}, expected {f.size}"
            return [*found, Damage(f.name, at + begin, end - begin, number, problem, ())]
        if zlib.crc32(data[begin:end]) != struct.unpack_from("<I", sidecar, 4 * number)[0]:
            problem = f"block {number} (from byte {at + begin}) does not match its checksum"
            found.append(Damage(f.name, at + begin, end - begin, number, problem, ()))
    seen(size)
    return found


def parse_index(data: bytes, bounds: Bounds) -> list[dict[str, Any]]:
    """The lines of an index, each with `name`, `dtype`, `shape` and `slices`.

    Raises:
        ValueError: a line is not what stoker writes, or says more than the files have; says which.
    """
    lines = []
    for number, text in enumerate(data.splitlines(), 1):
        try:
            line = json.loads(text)
            bounds.check(line)
            bounds.check_columns(line)
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise ValueError(f"line {number}: {type(e).__name__}: {e}") from e
        lines.append(line)
    return lines


def slices_of(line: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(file, first byte, bytes) of each slice of a line of the index."""
    width, s = WIDTHS[line["dtype"]], line["slices"]
    for file, at, *shape in zip(*map(_column, (s["file"], s["at"], *s["shape"])), strict=True):
        yield shard_name(file), at, prod(shape) * width


def expanded(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The slices of a line of the index one by one: file, at (first byte in it), start and shape in the tensor.

    The line has columns of runs [first, step, count]; see stoker.train.state.index.
    """
    s, dims = line["slices"], len(line["shape"])
    columns = [_column(runs) for runs in (s["file"], s["at"], *s["start"], *s["shape"])]
    return [
        {"file": shard_name(file), "at": at, "start": rest[:dims], "shape": rest[dims:]}
        for file, at, *rest in zip(*columns, strict=True)
    ]


def _column(runs: Iterable[tuple[int, int, int]]) -> list[int]:
    return [first + step * i for first, step, count in runs for i in range(count)]


def nbytes_of(line: dict[str, Any]) -> int:
    """Bytes of the logical tensor."""
    return int(prod(line["shape"])) * WIDTHS[line["dtype"]]


def _gaps(lines: Iterable[dict[str, Any]], sizes: dict[str, int]) -> list[Damage]:
    """Tensors whose slices are not all there (what a save that lost a rank's part would leave)."""
    found = []
    for line in lines:
        name, slices = line["name"], list(slices_of(line))
        total = sum(size for _, _, size in slices)
        beyond = [s for s in expanded(line) if any(map(_is_beyond, s["start"], s["shape"], line["shape"]))]
        outside = [file for file, at, size in slices if at + size > sizes.get(file, 0)]
        if outside:
            found.append(Damage(INDEX, 0, 0, None, f"{name}: a slice lies beyond the end of {outside[0]}", (name,)))
        elif beyond:
            problem = (
                f"{name}: a slice of {beyond[0]['shape']} from {beyond[0]['start']} on lies beyond {line['shape']}"
            )
            found.append(Damage(INDEX, 0, 0, None, problem, (name,)))
        elif total != nbytes_of(line):
            found.append(Damage(INDEX, 0, 0, None, f"{name}: slices have {total} bytes of {nbytes_of(line)}", (name,)))
    return found


def _is_beyond(start: int, count: int, size: int) -> bool:
    return start + count > size


def _with_tensors(d: Damage, lines: Iterable[dict[str, Any]]) -> Damage:
    hit = [
        line["name"]
        for line in lines
        if any(file == d.file and at < d.at + d.size and d.at < at + size for file, at, size in slices_of(line))
    ]
    return replace(d, tensors=tuple(hit))


@dataclass(frozen=True)
class Verdict:
    """Of one checkpoint."""

    directory: Path
    bytes: int  # of its files; 0 if the manifest is damaged
    seconds: float
    damage: tuple[Damage, ...]
    note: str = ""  # what could not be done besides

    @property
    def is_good(self) -> bool:
        return not self.damage


def verify_directory(
    directory: Path, threads: int = THREADS, seen: Seen = lambda count: None, read: Read | None = None
) -> Verdict:
    """Check all of a checkpoint, and note beside the manifest what was found. `read`: of bytes that are elsewhere."""
    began = time.monotonic()
    try:
        manifest = read_manifest(directory)
    except InvalidCheckpointError as e:
        problem = str(e).removeprefix(f"{directory}/{MANIFEST}: ").removeprefix(f"{directory}: ")
        return Verdict(directory, 0, 0.0, (Damage(MANIFEST, 0, 0, None, problem, ()),))
    stamps = stamps_of(directory, manifest)
    damage, note = _damage(directory, manifest, seen, threads, read), ""
    seconds = time.monotonic() - began
    lasting = [d for d in damage if not d.is_unread]
    try:
        if lasting or not damage:  # else nothing is known, and what was noted before stands
            verdict = VerdictNote(time.time(), str(lasting[0]) if lasting else None)
            write_note(directory, manifest, verdict, stamps)
    except OSError as e:
        note = f"not noted in {VERIFIED} beside it: {e.strerror}"
    return Verdict(directory, sum(f.size for f in manifest.files), seconds, damage, note)


def _damage(directory: Path, manifest: Manifest, seen: Seen, threads: int, read: Read | None) -> tuple[Damage, ...]:
    damage = all_damage(manifest, read or open_file(directory), seen, threads)
    if not damage and read is None:
        try:
            check_sizes(directory, manifest)  # a file that is longer has all its blocks
        except InvalidCheckpointError as e:
            name, _, problem = str(e).removeprefix(f"{directory}/").partition(": ")
            return (Damage(name, 0, 0, None, problem, ()),)
    return tuple(damage)


def verify(directory: Path) -> Manifest:
    """Read everything and check every block. (Bytes in an object store are not read: see `check_sizes`.)

    Raises:
        InvalidCheckpointError: names the first bad file and block.
    """
    manifest = read_manifest(directory)
    if manifest.location is not None:
        check_sizes(directory, manifest)
        return manifest
    for damage in _damage(directory, manifest, lambda count: None, THREADS, None):
        raise InvalidCheckpointError(f"{directory}/{damage}")
    return manifest


def told(v: Verdict) -> list[str]:
    """For people."""
    if v.is_good:
        rate = v.bytes / 1e9 / max(v.seconds, 1e-9)
        note = f" ({v.note})" if v.note else ""
        return [f"{v.directory.name}: good: {v.bytes / 1e9:.2f} GB in {v.seconds:.1f} s, {rate:.2f} GB/s{note}"]
    first, more = v.damage[0], len(v.damage) - 1
    lines = [f"{v.directory.name}: DAMAGED: {first}" + (f" (and {more} more)" if more else "")]
    hit = sorted({name for d in v.damage for name in d.tensors})
    if v.note:
        lines.append(f"  {v.note}")
    if hit:
        rest = f" and {len(hit) - 5} more" if len(hit) > 5 else ""
        lines.append(f"  it hits {', '.join(hit[:5])}{rest}")
    return lines
