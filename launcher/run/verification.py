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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .files import write_json
from .manifest import BLOCK, INDEX, MANIFEST, FileEntry, InvalidCheckpointError, Manifest, read_manifest, shard_name

Read = Callable[[str, int, int], bytes]  # (file, at, size) -> so many bytes; raises OSError; called by several threads
Seen = Callable[[int], object]  # called with the bytes that have been checked since, by any thread
VERIFIED = "verified.json"  # beside the manifest: that, and when, every block of these files was checked
THREADS = 8  # zlib and the reads leave the interpreter
_NAMED = 20  # so many damages are told with the tensors that they hit
_PIECE = 4 * BLOCK  # bytes that one thread reads at once
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}  # else 1


@dataclass(frozen=True)
class Damage:
    """Bytes `at : at + size` of `file` are not what was written, or cannot be read."""

    file: str
    at: int
    size: int
    block: int | None  # None: the file as a whole
    problem: str
    tensors: tuple[str, ...]  # names of the logical tensors that have bytes there; () if the index does not say

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
    small = {f.name: f for f in manifest.files if f.blocks is None}
    content: dict[str, bytes] = {}
    found = [d for f in small.values() if (d := _check_small(f, read, content)) is not None]
    lines: list[dict[str, Any]] = []
    try:
        lines = parse_index(content.get(INDEX, b""))
        found += _gaps(lines, {f.name: f.size for f in manifest.files})
    except (ValueError, KeyError, TypeError) as e:
        lines = []
        found.append(Damage(INDEX, 0, 0, None, f"is none of an index ({type(e).__name__}: {e})", ()))
    large = [f for f in manifest.files if f.blocks is not None and f.blocks in content]
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        work = [
            pool.submit(_check_piece, f, content[f.blocks], at, read, seen)
            for f in large
            if f.blocks is not None
            for at in range(0, f.size, _PIECE)
        ]
        try:
            for done in work:
                for damage in done.result():
                    found.append(_with_tensors(damage, lines) if len(found) < _NAMED else damage)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _check_small(f: FileEntry, read: Read, content: dict[str, bytes]) -> Damage | None:
    try:
        data = read(f.name, 0, f.size)
    except OSError as e:
        return Damage(f.name, 0, f.size, None, e.strerror or str(e), ())
    if len(data) != f.size:
        return Damage(f.name, 0, f.size, None, f"{len(data)} bytes, expected {f.size}", ())
    if zlib.crc32(data) != f.crc32:
        return Damage(f.name, 0, f.size, None, "does not match its checksum in the manifest", ())
    content[f.name] = data
    return None


def _check_piece(f: FileEntry, sidecar: bytes, at: int, read: Read, seen: Seen) -> list[Damage]:
    """Some blocks from byte `at` on."""
    size = min(_PIECE, f.size - at)
    try:
        data = memoryview(read(f.name, at, size))
    except OSError as e:
        return [Damage(f.name, at, size, at // BLOCK, f"from byte {at}: {e.strerror or e}", ())]
    found: list[Damage] = []
    for begin in range(0, size, BLOCK):
        number, end = (at + begin) // BLOCK, min(begin + BLOCK, size)
        if len(data) < end:
            problem = f"block {number}: ends at byte {at + len(data)}, expected {f.size}"
            return [*found, Damage(f.name, at + begin, end - begin, number, problem, ())]
        if zlib.crc32(data[begin:end]) != struct.unpack_from("<I", sidecar, 4 * number)[0]:
            problem = f"block {number} (from byte {at + begin}) does not match its checksum"
            found.append(Damage(f.name, at + begin, end - begin, number, problem, ()))
    seen(size)
    return found


def parse_index(data: bytes) -> list[dict[str, Any]]:
    """The lines of an index, each with `name`, `dtype`, `shape` and `slices`.

    Raises:
        ValueError: a line is not what stoker writes; says which.
    """
    lines = []
    for number, text in enumerate(data.splitlines(), 1):
        try:
            line = json.loads(text)
            str(line["name"]), nbytes_of(line), int(line["slices"]["count"])
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"line {number}: {type(e).__name__}: {e}") from e
        lines.append(line)
    return lines


def slices_of(line: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(file, first byte, bytes) of each slice of a line of the index."""
    width, s = _SIZES.get(line["dtype"], 1), line["slices"]
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
    return int(prod(line["shape"])) * _SIZES.get(line["dtype"], 1)


def _gaps(lines: Iterable[dict[str, Any]], sizes: dict[str, int]) -> list[Damage]:
    """Tensors whose slices are not all there (what a save that lost a rank's part would leave)."""
    found = []
    for line in lines:
        name, slices = line["name"], list(slices_of(line))
        total = sum(size for _, _, size in slices)
        outside = [file for file, at, size in slices if at + size > sizes.get(file, 0)]
        if outside:
            found.append(Damage(INDEX, 0, 0, None, f"{name}: a slice lies beyond the end of {outside[0]}", (name,)))
        elif total != nbytes_of(line):
            found.append(Damage(INDEX, 0, 0, None, f"{name}: slices have {total} bytes of {nbytes_of(line)}", (name,)))
    return found


def _with_tensors(d: Damage, lines: Iterable[dict[str, Any]]) -> Damage:
    hit = [
        line["name"]
        for line in lines
        if any(file == d.file and at < d.at + d.size and d.at < at + size for file, at, size in slices_of(line))
    ]
    return Damage(d.file, d.at, d.size, d.block, d.problem, tuple(hit))


# That it was done, for whoever comes later.


def mark_verified(directory: Path, manifest: Manifest, when: float) -> None:
    """Note beside the manifest that all bytes are good as the files are now.

    Raises:
        OSError: it cannot be written.
    """
    write_json(directory / VERIFIED, {"time": when, "name": str(manifest.name), "files": _stamps(directory, manifest)})


def verified_at(directory: Path, manifest: Manifest) -> float | None:
    """When all bytes were checked; None if never, or if a file was written since."""
    try:
        with open(f"{directory}/{VERIFIED}", "rb") as f:
            raw = json.loads(f.read())
        if raw["files"] != _stamps(directory, manifest):
            return None
        return float(raw["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _stamps(directory: Path, manifest: Manifest) -> dict[str, list[int]]:
    """Size and time of each file, the manifest's own too; of those that lie elsewhere, the manifest says enough."""
    stamps = {}
    for name in [MANIFEST, *(f.name for f in manifest.files)]:
        try:
            s = os.stat(directory / name)
        except FileNotFoundError:
            continue
        stamps[name] = [s.st_size, s.st_mtime_ns]
    return stamps


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
    """Check all of a checkpoint, and note it beside the manifest if it is good; if it is not, an older note goes.
    `read`: of bytes that are elsewhere."""
    began = time.monotonic()
    try:
        manifest = read_manifest(directory)
    except InvalidCheckpointError as e:
        problem = str(e).removeprefix(f"{directory}/{MANIFEST}: ").removeprefix(f"{directory}: ")
        return Verdict(directory, 0, 0.0, (Damage(MANIFEST, 0, 0, None, problem, ()),))
    damage = tuple(all_damage(manifest, read or open_file(directory), seen, threads))
    seconds, note = time.monotonic() - began, ""
    if not damage:
        try:
            mark_verified(directory, manifest, time.time())
        except OSError as e:
            note = f"not noted beside it: {e.strerror}"
    else:  # bytes that rot on their own leave the files' times as they were
        try:
            (directory / VERIFIED).unlink(missing_ok=True)
        except OSError as e:
            note = f"{VERIFIED} still says that it is good, and cannot be removed: {e.strerror}"
    return Verdict(directory, sum(f.size for f in manifest.files), seconds, damage, note)


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
