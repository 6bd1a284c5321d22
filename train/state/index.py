"""The index of a checkpoint: which file holds which region of which logical tensor.

Owns: index.jsonl (one line per tensor, sorted by name) and index.offsets (where each line begins), their parts while a
checkpoint is written, and look-up by name. A reader parses the lines of the tensors it needs, not the whole.

    {"name":"model/w","dtype":"F32","shape":[8,4],"slices":[{"file":"shard-00000.safetensors","key":"model/w@0,0",
     "start":[0,0],"shape":[4,4],"at":256}, ...]}      on one line; `at`: first byte of the slice in its file
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import Any

from ...launcher.run.files import to_json
from ...launcher.run.manifest import INDEX, OFFSETS, FileEntry, InvalidCheckpointError, describe
from ..box import Box
from ..storage.base import Target
from .entry import DTYPES
from .segment import Placed
from .writer import write_file, write_small

_NAME_AT = len('{"name":')
_SLICES = b',"slices":['
_READERS = 16  # parts read at a time: each is small, and a file of another node takes a round trip


@dataclass(frozen=True)
class Stored:
    """One slice in a file."""

    file: str
    at: int  # its first byte
    box: Box


@dataclass(frozen=True)
class Line:
    """All that a checkpoint holds of one logical tensor."""

    number: int  # of the line in the index
    name: str
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]
    slices: tuple[Stored, ...]


def part_name(rank: int) -> str:
    return f"index-{rank:05d}.part"


def part(file: str, placed: Sequence[Placed]) -> bytes:
    """One rank's lines, for the slices that it wrote to `file`."""
    lines = []
    for p in sorted(placed, key=lambda p: p.slice.name):
        s = p.slice
        stored = {"file": file, "key": s.key, "start": list(s.box.start), "shape": list(s.box.shape), "at": p.at}
        lines.append(to_json(_fields(s.name, DTYPES[s.tensor.dtype], s.shape, [stored])))
    return "".join(f"{line}\n" for line in lines).encode()


def _fields(name: str, dtype: str, shape: Sequence[int], slices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape), "slices": slices}


def merge_parts(directory: Path, digests: Sequence[int]) -> tuple[FileEntry, FileEntry]:
    """Merge the ranks' parts into the index, delete them, and return the manifest's entries for index and offsets.

    Args:
        digests: crc32 of each rank's part, from the rank itself: what is read of another's file may be stale.

    Raises:
        OSError: with the file's name.
    """
    parts = [_read_part(directory / part_name(rank), digest) for rank, digest in enumerate(digests)]
    index, offsets = bytearray(), []
    for name, same in groupby(merge(*parts, key=lambda f: f["name"]), key=lambda f: f["name"]):
        found = list(same)
        first = found[0]
        assert all((f["dtype"], f["shape"]) == (first["dtype"], first["shape"]) for f in found), (
            f"ranks differ: {found}"
        )
        slices = [s for f in found for s in f["slices"]]
        offsets.append(len(index))
        index += to_json(_fields(name, first["dtype"], first["shape"], slices)).encode() + b"\n"
    table = struct.pack(f"<{len(offsets)}Q", *offsets)
    write_file(directory / INDEX, bytes(index))
    write_file(directory / OFFSETS, table)
    for rank in range(len(digests)):
        (directory / part_name(rank)).unlink()
    return describe(INDEX, bytes(index)), describe(OFFSETS, table)


def merge_index(target: Target, digests: Sequence[int], before: Callable[[str], None]) -> tuple[FileEntry, FileEntry]:
    """Merge the ranks' parts into the index of `target`, delete them, and return the manifest's entries for index and
    offsets. Of a line only the name is parsed: slices of one tensor are put one behind the other as text.

    Args:
        digests: crc32 of each rank's part, from the rank itself: what is read of another's file may be stale.
        before: called with "index" and "offsets" before that file is made.

    Raises:
        OSError: with the file's name; what `before` raises.
    """
    found: dict[str, list[bytes]] = {}  # name: head of its line, slices by rank
    names = [part_name(rank) for rank in range(len(digests))]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="parts") as pool:
        for name, digest, data in zip(names, digests, pool.map(target.read, names), strict=True):
            if zlib.crc32(data) != digest:
                raise OSError(None, "not what its rank wrote", name)
            for line in data.splitlines():
                head, _, slices = line.partition(_SLICES)
                same = found.setdefault(_name_of(line.decode()), [head])
                assert same[0] == head, f"ranks differ: {same[0]!r}, {head!r}"
                same.append(slices.removesuffix(b"]}"))
    offsets, index = array("Q"), bytearray()
    for name in sorted(found):
        offsets.append(len(index))
        index += found[name][0] + _SLICES + b",".join(found[name][1:]) + b"]}\n"
    if sys.byteorder == "big":
        offsets.byteswap()
    files = {INDEX: bytes(index), OFFSETS: offsets.tobytes()}
    for name, word in ((INDEX, "index"), (OFFSETS, "offsets")):
        before(word)
        write_small(target, name, files[name])
    target.delete(names)
    return describe(INDEX, files[INDEX]), describe(OFFSETS, files[OFFSETS])


def _name_of(line: str) -> str:
    name, _ = json.JSONDecoder().raw_decode(line, _NAME_AT)
    return str(name)


def _read_part(path: Path, digest: int) -> Iterator[dict[str, Any]]:
    data = path.read_bytes()
    if zlib.crc32(data) != digest:
        raise OSError(None, "not what its rank wrote", str(path))
    return map(json.loads, data.splitlines())


class Index:
    """An index in memory. The bytes have been checked against the manifest; `where` is for messages."""

    def __init__(self, index: bytes | bytearray, offsets: bytes | bytearray, where: str) -> None:
        self._data, self._where = index, where
        self._offsets = struct.unpack(f"<{len(offsets) // 8}Q", offsets[: len(offsets) // 8 * 8])

    def __len__(self) -> int:
        return len(self._offsets)

    def name(self, number: int) -> str:
        """The name in line `number`; the rest of the line is not parsed."""
        text = self._line(number)
        try:
            name, _ = json.JSONDecoder().raw_decode(text, _NAME_AT)
        except ValueError as e:
            raise InvalidCheckpointError(f"{self._where}: line {number + 1}: {e}") from e
        return str(name)

    def find(self, name: str) -> Line | None:
        """Binary search.

        Raises:
            InvalidCheckpointError: a line cannot be read.
        """
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.name(middle) < name:
                low = middle + 1
            else:
                high = middle
        return self._parse(low) if low < len(self) and self.name(low) == name else None

    def _line(self, number: int) -> str:
        begin = self._offsets[number]
        end = self._offsets[number + 1] if number + 1 < len(self) else len(self._data)
        return self._data[begin:end].decode(errors="replace")

    def _parse(self, number: int) -> Line:
        try:
            raw = json.loads(self._line(number))
            slices = tuple(
                Stored(s["file"], int(s["at"]), Box(tuple(s["start"]), tuple(s["shape"]))) for s in raw["slices"]
            )
            return Line(number, raw["name"], raw["dtype"], tuple(raw["shape"]), slices)
        except (ValueError, KeyError, TypeError) as e:
            raise InvalidCheckpointError(f"{self._where}: line {number + 1}: {e}") from e
