"""The index of a checkpoint: which file holds which region of which logical tensor.

Owns: index.jsonl (one line per tensor, sorted by name) and index.offsets (where each line begins), their parts while a
checkpoint is written, and look-up by name. A reader parses the lines of the tensors it needs, not the whole, and makes
objects of the slices it needs. Columns are runs [first, step, count] (columns.py); `file` is a shard's number and `at`
a slice's first byte in it. Slices are sorted by their start.

    {"name":"model/w","dtype":"F32","shape":[8,4],"slices":{"count":2,"file":[[0,1,2]],"at":[[256,0,2]],
     "start":[[[0,4,2]],[[0,0,2]]],"shape":[[[4,0,2]],[[4,0,2]]]}}      on one line; start and shape: a column per dim
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...launcher.run.files import to_json
from ...launcher.run.index_bounds import Bounds
from ...launcher.run.manifest import INDEX, OFFSETS, FileEntry, InvalidCheckpointError, describe, shard_name
from ..box import Box
from ..storage.base import Target
from .columns import Column, from_columns, from_runs, to_runs
from .entry import DTYPES
from .regions import Regions
from .segment import Placed
from .writer import shard_number, write_small

_NAME_AT = len('{"name":')
_SLICES = b',"slices":'
_AT, _START = ',"at":', ',"start":'  # a name cannot have these: in it, quotes are escaped
_RUNS = re.compile(r"\[(\[-?\d+,-?\d+,\d+\],?)*\]")
_READERS = 16  # parts read at a time: each is small, and a file of another node takes a round trip


@dataclass(frozen=True)
class Stored:
    """One slice in a file."""

    file: str
    at: int  # its first byte
    box: Box


@dataclass(frozen=True, eq=False)
class Line:
    """All that a checkpoint holds of one logical tensor."""

    number: int  # of the line in the index
    name: str
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]
    files: Column  # [slices]: number of the shard
    at: Column  # [slices]: first byte in it
    regions: Regions

    def meeting(self, box: Box) -> list[tuple[Stored, Box]]:
        """The slices that have elements of `box`, each with the region that they have in common."""
        hit, found = self.regions.meeting(box)
        places = zip(self.files[hit].tolist(), self.at[hit].tolist(), found, strict=True)
        return [(Stored(shard_name(file), at, whole), common) for file, at, (whole, common) in places]


def part_name(rank: int) -> str:
    return f"index-{rank:05d}.part"


def part(file: str, placed: Sequence[Placed]) -> bytes:
    """One rank's lines, for the slices that it wrote to shard `file`: a row [file, at, *start, *shape] for each."""
    number = shard_number(file)
    lines = []
    for p in sorted(placed, key=lambda p: p.slice.name):
        s = p.slice
        row = [number, p.at, *s.box.start, *s.box.shape]
        lines.append(
            to_json({"name": s.name, "dtype": DTYPES[s.tensor.dtype], "shape": list(s.shape), "slices": [row]})
        )
    return "".join(f"{line}\n" for line in lines).encode()


def merged(parts: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Index and offsets of a checkpoint whose shards have these lines."""
    found: dict[bytes, list[bytes]] = {}  # head of a line (all but the slices): rows by rank
    for data in parts:
        for line in data.splitlines():
            head, _, rows = line.rpartition(_SLICES)
            found.setdefault(head, []).append(rows.removeprefix(b"[").removesuffix(b"]}"))
    heads: dict[str, bytes] = {}
    for head in found:
        same = heads.setdefault(_name_of(head.decode()), head)
        assert same == head, f"ranks differ: {same!r}, {head!r}"
    offsets, index = [], bytearray()
    for name in sorted(heads):
        offsets.append(len(index))
        some = found[heads[name]]
        text = b",".join(some).replace(b"[", b"").replace(b"]", b"").decode()
        columns = np.fromstring(text, np.int64, sep=",").reshape(sum(rows.count(b"[") for rows in some), -1).T
        index += heads[name] + _SLICES + to_json(_fields(columns)).encode() + b"}\n"
    return bytes(index), struct.pack(f"<{len(offsets)}Q", *offsets)


def _fields(columns: Column) -> dict[str, Any]:
    """columns: [2 + 2 * dims, slices]"""
    dims = (len(columns) - 2) // 2
    # By start, then file: the key that sorts first is the last.
    columns = columns[:, np.lexsort((columns[0], *columns[2 : 2 + dims][::-1]))]
    file, at, *rest = [to_runs(c) for c in columns]
    return {"count": columns.shape[1], "file": file, "at": at, "start": rest[:dims], "shape": rest[dims:]}


def merge_index(target: Target, digests: Sequence[int], before: Callable[[str], None]) -> tuple[FileEntry, FileEntry]:
    """Merge the ranks' parts into the index of `target`, delete them, and return the manifest's entries for index and
    offsets.

    Args:
        digests: crc32 of each rank's part, from the rank itself: what is read of another's file may be stale.
        before: called with "index" and "offsets" before that file is made.

    Raises:
        OSError: with the file's name; what `before` raises.
    """
    names = [part_name(rank) for rank in range(len(digests))]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="parts") as pool:
        parts = list(pool.map(target.read, names))
    for name, digest, data in zip(names, digests, parts, strict=True):
        if zlib.crc32(data) != digest:
            raise OSError(None, "not what its rank wrote", name)
    index, table = merged(parts)
    for name, word, data in ((INDEX, "index", index), (OFFSETS, "offsets", table)):
        before(word)
        write_small(target, name, data)
    target.delete(names)
    return describe(INDEX, index), describe(OFFSETS, table)


def _name_of(line: str) -> str:
    name, _ = json.JSONDecoder().raw_decode(line, _NAME_AT)
    return str(name)


class Index:
    """An index in memory. The bytes have been checked against the manifest; `where` is for messages."""

    def __init__(self, index: bytes | bytearray, offsets: bytes | bytearray, where: str, bounds: Bounds) -> None:
        """Raises InvalidCheckpointError: these are not the offsets of its lines."""
        self._data, self._where, self._bounds = index, where, bounds
        self._regions: dict[str, Regions] = {}  # by text: layers are divided alike
        self._offsets = struct.unpack(f"<{len(offsets) // 8}Q", offsets[: len(offsets) // 8 * 8])
        begins = np.frombuffer(offsets, "<u8", len(self._offsets))
        ends = np.flatnonzero(np.frombuffer(index, np.uint8) == ord("\n"))
        if len(begins) != len(ends) or (begins[:1] != 0).any() or (begins[1:] != ends[:-1] + 1).any():
            raise InvalidCheckpointError(f"{where}: {OFFSETS} does not say where its lines begin")

    def __len__(self) -> int:
        return len(self._offsets)

    def name(self, number: int) -> str:
        """The name in line `number`; the rest of the line is not parsed."""
        try:
            return _name_of(self._line(number))
        except (ValueError, RecursionError) as e:
            raise InvalidCheckpointError(f"{self._where}: line {number + 1}: {e}") from e

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {self.name(number): number for number in range(len(self))}

    def find(self, name: str) -> Line | None:
        """The line of this tensor.

        Raises:
            InvalidCheckpointError: a line cannot be read.
        """
        number = self._numbers.get(name)
        return None if number is None else self._parse(number)

    def lines(self) -> Iterator[Line]:
        """All of them, sorted by name. Raises as `find`."""
        return map(self._parse, range(len(self)))

    def _line(self, number: int) -> str:
        begin = self._offsets[number]
        end = self._offsets[number + 1] if number + 1 < len(self) else len(self._data)
        return self._data[begin:end].decode(errors="replace")

    def _parse(self, number: int) -> Line:
        try:
            # What tells tensors apart is parsed one by one. The places in the files are the longest part of a line.
            text, is_ours, rest = self._line(number).partition(_AT)
            places, is_so, divided = rest.partition(_START)
            if not is_ours or not is_so:
                raise ValueError("not as it is written here")
            raw = json.loads(f"{text}}}}}")
            self._bounds.check(raw)
            slices, shape = raw["slices"], tuple(raw["shape"])
            count = slices["count"]
            files, at = from_runs(slices["file"], count), from_columns(_numbers_of(places), count)
            if count and (files.min() < 0 or files.max() >= self._bounds.shards or at.min() < 0):
                raise ValueError("a slice in no shard")
            regions = self._regions.get(divided)
            if regions is None:
                regions = self._regions[divided] = _regions_of(divided, len(shape), count)
            if regions.starts.shape != (len(shape), count):
                raise ValueError(f"regions of other than {count} slices of {len(shape)} dims")
            if any(end > size for end, size in zip(regions.ends, shape, strict=True)):
                raise ValueError(f"a slice lies beyond shape {list(shape)}")
            return Line(number, raw["name"], raw["dtype"], shape, files, at, regions)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
            raise InvalidCheckpointError(f"{self._where}: line {number + 1}: {e}") from e


def _numbers_of(runs: str) -> Column:
    """All that is in JSON's `[[1,2,3],[4,5,6]]`. Raises ValueError."""
    if runs == "[]":
        return np.zeros(0, np.int64)
    if not _RUNS.fullmatch(runs):
        raise ValueError(f"no runs: {runs[:40]}")
    return np.fromstring(runs.replace("[", "").replace("]", ""), np.int64, sep=",")


def _regions_of(text: str, dims: int, count: int) -> Regions:
    """text: a line from behind `"start":` on."""
    slices = json.JSONDecoder().decode(f'{{"start":{text.rstrip()[:-1]}')
    starts, shapes = (
        np.array([from_runs(runs, count) for runs in slices[key]], np.int64).reshape(dims, count)
        for key in ("start", "shape")
    )
    return Regions(starts, shapes)
