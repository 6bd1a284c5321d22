"""What a rank holds of the run's state, and which part of it this rank writes.

Owns: entries (named local tensors with their place in the logical tensor) and the division of the writing among ranks
that hold the same. Does not own: bytes and files (segment.py, writer.py), or which tensors a trainer has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..box import ALONE, Box, Replica

# Names of the safetensors format.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_WHOLE_BELOW = 1024 * 1024  # bytes; smaller tensors are not cut: the index would grow for nothing


@dataclass(frozen=True, eq=False)
class Entry:
    """A local tensor, of any device and stride, that holds the region `box` of the logical tensor `name` of `shape`.

    `replica`: which of the ranks that hold the same box with the same values this one is; each writes a part.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    replica: Replica = ALONE

    def __post_init__(self) -> None:
        assert tuple(self.tensor.shape) == self.box.shape, f"{self.name}: {tuple(self.tensor.shape)}, {self.box}"
        assert len(self.shape) == len(self.box.shape), f"{self.name}: {self.shape}, {self.box}"
        assert self.tensor.dtype in DTYPES, f"{self.name}: {self.tensor.dtype} cannot be stored"

    @staticmethod
    def whole(name: str, tensor: torch.Tensor, replica: Replica = ALONE) -> Entry:
        """An unsharded tensor."""
        shape = tuple(tensor.shape)
        return Entry(name, tensor, shape, Box.whole(shape), replica)


@dataclass(frozen=True, eq=False)
class Slice:
    """A part of an entry, as one shard stores it: whole rows (dim 0) of its tensor. `tensor` is a view."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]  # of the logical tensor
    box: Box

    @property
    def key(self) -> str:
        """Its name in the shard; a part is told from the whole, so that shards can be put together."""
        if self.box == Box.whole(self.shape):
            return self.name
        return f"{self.name}@{','.join(map(str, self.box.start))}"


def check(entries: Sequence[Entry]) -> None:
    """Names are unique and no memory is listed twice.

    Raises:
        ValueError: names the entries.
    """
    names: set[str] = set()
    memory: dict[tuple[object, ...], str] = {}
    for e in entries:
        if e.name in names:
            raise ValueError(f"state entry {e.name!r} is listed twice")
        names.add(e.name)
        if e.tensor.numel() == 0:
            continue
        place = (e.tensor.device, e.tensor.data_ptr(), e.tensor.stride(), e.box.shape)
        if place in memory:
            raise ValueError(
                f"state entries {memory[place]!r} and {e.name!r} are the same memory: "
                "list a tied tensor once, under one name"
            )
        memory[place] = e.name


def plan(entries: Sequence[Entry]) -> list[Slice]:
    """The slices that this rank writes, by name. A pure function: each rank computes its own alone.

    Entries with the same holders, laid end to end in the order of their names, are cut into as many parts of equal
    bytes as there are holders. A cut is moved to the nearest row of the tensor that it falls into, or to its nearest
    end if the tensor is small: parts differ by no more than one row or 1 MiB. Over all ranks each element is in exactly
    one slice.
    """
    held: dict[Replica, list[Entry]] = {}
    for e in sorted(entries, key=lambda e: e.name):
        held.setdefault(e.replica, []).append(e)
    slices = [s for replica, shared in held.items() for s in _share(shared, replica.index, replica.count)]
    return sorted(slices, key=lambda s: s.name)


def _share(shared: Sequence[Entry], index: int, count: int) -> list[Slice]:
    """Part `index` of `count`."""
    ends = list(accumulate(e.tensor.nbytes for e in shared))
    first, last = _cut(shared, ends, index, count), _cut(shared, ends, index + 1, count)
    own = []
    for i in range(first[0], len(shared)):
        if (i, 0) >= last:
            break
        begin = first[1] if i == first[0] else 0
        end = last[1] if i == last[0] else _rows(shared[i])
        own.append(_part(shared[i], begin, end))
    return own


def _rows(e: Entry) -> int:
    return e.box.shape[0] if e.box.shape else 1


def _part(e: Entry, begin: int, end: int) -> Slice:
    tensor = e.tensor.detach()
    if begin == 0 and end == _rows(e):
        return Slice(e.name, tensor, e.shape, e.box)
    return Slice(e.name, tensor[begin:end], e.shape, e.box.rows(begin, end - begin))


def _cut(shared: Sequence[Entry], ends: Sequence[int], number: int, size: int) -> tuple[int, int]:
    """Where part `number` begins: (entry, row). Grows with `number`, so that parts neither overlap nor leave gaps."""
    if number == 0:
        return (0, 0)
    if number == size:
        return (len(shared), 0)
    target = ends[-1] * number // size if ends else 0
    i = bisect_right(ends, target)
    if i == len(shared):
        return (i, 0)
    nbytes, rows = shared[i].tensor.nbytes, _rows(shared[i])
    past = target - (ends[i] - nbytes)
    if nbytes < _WHOLE_BELOW:
        return (i, 0) if 2 * past < nbytes else (i + 1, 0)
    row = (2 * past * rows + nbytes) // (2 * nbytes)
    return (i, row) if row < rows else (i + 1, 0)
