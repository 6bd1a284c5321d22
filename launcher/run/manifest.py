"""Checkpoint manifest: schema, block checksums, sizes. No valid manifest = no checkpoint.

    checkpoints/step-00001000-a0001/
      shard-00000.safetensors   tensors of one writer (slices of logical tensors)
      shard-00000.crc32         little-endian uint32 per 4 MiB block of the file beside it
      index.jsonl               one line per logical tensor, sorted by name: dtype, shape, slices
      index.offsets             little-endian uint64 per line: where in index.jsonl it begins, so that a rank parses
                                only what it needs
      manifest.json             written last; names every other file with its size and digest, and has one of itself

Owns: that schema and what a look can say, with the standard library alone, so that the supervisor and tools that have
no torch can look. Does not own: reading it all (verification.py), what tensors mean (stoker.train.state).
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .files import parse_json, write_atomic
from .layout import CheckpointName

MANIFEST = "manifest.json"
INDEX = "index.jsonl"
OFFSETS = "index.offsets"
LARGEST_SMALL = 2**30  # bytes of a file that is read at once: an index of 1,024 ranks takes a few MB
BLOCK = 4 * 1024 * 1024  # bytes covered by one checksum: small enough that a partial reader verifies what it reads
Crc32 = Callable[..., int]  # zlib's, or another that gives the same values faster
_SOME, _AT_ONCE = 50, 16  # files after which it is decided whether the rest is worth threads, and how many of those
_FAR = 0.0005  # seconds per file: more than a call to the kernel takes, less than one over a network
_FORMAT, _VERSION = "stoker-checkpoint", 1


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def sidecar_name(number: int) -> str:
    """Of the block checksums of that shard."""
    return f"shard-{number:05d}.crc32"


class InvalidCheckpointError(Exception):
    """A checkpoint that must not be loaded; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint. `crc32` covers the whole file; `blocks` names a sidecar of block checksums instead
    (large files: readers verify the blocks they read)."""

    name: str
    size: int  # bytes
    crc32: int | None = None
    blocks: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is. `layout`: sizes of the mesh that wrote it; `state`: the trainer's plain values
    (consumed samples, data fingerprint, ...), JSON all the way down. `location`: what stands before each file's name
    where the bytes lie in an object store (s3://...); None: they lie beside the manifest."""

    run: str
    step: int
    attempt: int
    generation: int
    time: float
    layout: dict[str, int]
    state: dict[str, Any]
    files: tuple[FileEntry, ...]
    location: str | None = None

    @property
    def name(self) -> CheckpointName:
        return CheckpointName(self.step, self.attempt)

    def encode(self) -> bytes:
        """The content of `manifest.json`."""
        # As it will be read back: JSON has no tuples and no number for a key.
        body = json.loads(json.dumps(asdict(self), allow_nan=False))
        whole = {"format": _FORMAT, "version": _VERSION, "crc32": _digest(body)} | body
        return (json.dumps(whole, indent=2, allow_nan=False) + "\n").encode()

    def write(self, directory: Path) -> None:
        """Write `manifest.json` into `directory`; every file that it names must be there and fsynced already."""
        write_atomic(directory / MANIFEST, self.encode())


def _digest(body: dict[str, Any]) -> int:
    """Over the values, not the text: spaces do not count, and a value that changed does, wherever it stands."""
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def block_checksums(data: memoryview | bytes, crc32: Crc32 = zlib.crc32) -> bytes:
    """The sidecar's bytes for a file with this content."""
    view = memoryview(data).cast("B")
    crcs = [crc32(view[at : at + BLOCK]) for at in range(0, len(view), BLOCK)]
    return struct.pack(f"<{len(crcs)}I", *crcs)


def describe(name: str, data: bytes) -> FileEntry:
    """Describe a small file by the content that it was given (not by what a disk gives back)."""
    return FileEntry(name, len(data), zlib.crc32(data))


def read_manifest(directory: Path, is_glance: bool = False) -> Manifest:
    """Parse and check the schema; files are not looked at. `is_glance`, for lists of thousands: nor is the manifest's
    own checksum, which is half of the work.

    Raises:
        InvalidCheckpointError: no manifest, not JSON, another format, or fields missing.
    """
    path = directory / MANIFEST
    try:
        manifest = parse_manifest(path.read_bytes(), str(path), is_glance)
    except FileNotFoundError:
        raise InvalidCheckpointError(f"{directory}: no {MANIFEST} (the save was not finished)") from None
    except OSError as e:
        raise InvalidCheckpointError(f"{path}: {e.strerror}") from e
    named = CheckpointName.parse(directory.name)
    if named is not None and named != manifest.name:
        raise InvalidCheckpointError(f"{path}: says {manifest.name}, but the directory is {directory.name}")
    return manifest


def parse_manifest(data: bytes, where: str, is_glance: bool = False) -> Manifest:
    """Parse the content of a `manifest.json` and check the schema. Raises InvalidCheckpointError."""
    try:
        return _parse(parse_json(data, where), is_glance)
    except ValueError as e:
        text = str(e)
        raise InvalidCheckpointError(text if text.startswith(where) else f"{where}: {text}") from e
    except (TypeError, KeyError, AttributeError) as e:
        raise InvalidCheckpointError(f"{where}: {e}") from e


def _parse(raw: dict[str, Any], is_glance: bool) -> Manifest:
    if raw.pop("format", None) != _FORMAT or raw.pop("version", None) != _VERSION:
        raise ValueError(f"not a {_FORMAT} manifest of version {_VERSION}")
    said = raw.pop("crc32", None)
    if not is_glance and said != _digest(raw):
        raise ValueError("checksum does not match (the file was changed or damaged)")
    files = tuple(FileEntry(**f) for f in raw.pop("files"))
    for f in files:
        # A name leads nowhere but into the directory.
        is_inside = f.name and f.name.isprintable() and "/" not in f.name and not f.name.startswith(".")
        is_size = type(f.size) is int and 0 <= f.size < 2**63
        has_one = (type(f.crc32), type(f.blocks)) in ((int, type(None)), (type(None), str))
        if not is_inside or not is_size or not has_one:
            raise ValueError(f"bad file entry {f}")
    manifest = Manifest(files=files, **raw)
    if not _is_typed(manifest):
        raise ValueError("fields of other types than a manifest has")
    if manifest.location is not None and not re.fullmatch(r"s3://\S+", manifest.location):
        raise ValueError(f"bad location {manifest.location!r}")
    return manifest


def _is_typed(m: Manifest) -> bool:
    numbers = all(type(n) is int and n >= 0 for n in (m.step, m.attempt, m.generation))
    is_time = type(m.time) in (int, float) and 0 <= m.time < 2**40  # not NaN
    return numbers and is_time and type(m.run) is str and type(m.layout) is type(m.state) is dict


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Every named file is there with its size, and the small ones (index, sidecars) have their checksums.

    Reads kilobytes, not gigabytes: what a supervisor does before it starts workers. For bytes in an object store, only
    the manifest is looked at (they are checked where a client for the store is: train/storage/objects.py).

    Raises:
        InvalidCheckpointError: names the file.
    """
    check_entries(manifest, str(directory / MANIFEST))
    if manifest.location is not None:
        return
    began = time.monotonic()
    for f in manifest.files[:_SOME]:
        _check_file(directory, f)
    rest = manifest.files[_SOME:]
    if time.monotonic() - began < _FAR * _SOME:
        for f in rest:  # on this node's disk, threads would cost more than they save
            _check_file(directory, f)
        return
    from concurrent.futures import ThreadPoolExecutor  # tools that list checkpoints start without it

    # On a parallel file system each file takes a round trip to its server: two thousand of them, seconds.
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sizes") as pool:
        for _ in pool.map(lambda f: _check_file(directory, f), rest):
            pass


def _check_file(directory: Path, f: FileEntry) -> None:
    path = f"{directory}/{f.name}"  # thousands of Path objects take as long as the calls
    try:
        size = os.stat(path).st_size
        if size != f.size:
            raise InvalidCheckpointError(f"{path}: {size} bytes, expected {f.size}")
        if f.crc32 is not None and _crc32_of(path) != f.crc32:
            raise InvalidCheckpointError(f"{path}: checksum does not match (the file was changed or damaged)")
    except OSError as e:
        raise InvalidCheckpointError(f"{path}: {e.strerror}") from e


def check_entries(manifest: Manifest, where: str) -> None:
    """The manifest names all that a checkpoint consists of: index, and block checksums of each large file; what is
    read at once is small.

    Raises:
        InvalidCheckpointError: says what is missing, or too large.
    """
    sidecars = {f.name: f for f in manifest.files if f.crc32 is not None}
    missing = {INDEX, OFFSETS} - sidecars.keys()
    if missing:
        raise InvalidCheckpointError(f"{where}: does not name {', '.join(sorted(missing))}")
    for f in manifest.files:
        if f.crc32 is not None and f.size > LARGEST_SMALL:
            raise InvalidCheckpointError(f"{where}: {f.name} has {f.size} bytes, expected {LARGEST_SMALL} at most")
        if f.blocks is not None and (
            f.blocks not in sidecars or sidecars[f.blocks].size != 4 * ((f.size + BLOCK - 1) // BLOCK)
        ):
            text = f"block checksums {f.blocks} of {f.name} are missing or of the wrong length"
            raise InvalidCheckpointError(f"{where}: {text}")


class BlockChecker:
    """Checks blocks of one file as a reader gets to them."""

    def __init__(self, path: Path | str, sidecar: bytes | bytearray, crc32: Crc32 = zlib.crc32) -> None:
        """`path` is the file (for messages only), `sidecar` the content of its sidecar."""
        self.path = path
        self.count = len(sidecar) // 4
        self._crcs = struct.unpack(f"<{self.count}I", sidecar[: 4 * self.count])
        self._crc32 = crc32

    def check(self, number: int, *data: bytes | memoryview) -> None:
        """`data`, one behind the other, is block `number` (4 MiB; the last one may be shorter).

        Raises:
            InvalidCheckpointError: the block is not what was written.
        """
        crc = 0
        for part in data:
            crc = self._crc32(part, crc)
        if number >= self.count or crc != self._crcs[number]:
            at = number * BLOCK
            raise InvalidCheckpointError(f"{self.path}: block {number} (from byte {at}) does not match its checksum")


def _crc32_of(path: str) -> int:
    crc = 0
    with open(path, "rb", buffering=0) as f:
        while chunk := f.read(BLOCK):
            crc = zlib.crc32(chunk, crc)
    return crc
