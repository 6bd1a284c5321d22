"""Fills local tensors from a checkpoint that any number of ranks wrote, in any division.

Owns: finding the stored slices that meet each entry's box, telling a damaged checkpoint from one of another model, and
copying. Does not own: which checkpoint, and agreement among ranks (checkpointer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ...launcher.run.manifest import InvalidCheckpointError
from ..box import Box
from .entry import DTYPES, Entry
from .index import Index, Line, Stored
from .past_cache import pages
from .reader import Range, VerifiedReader


@dataclass(frozen=True, eq=False)
class Piece:
    """`region` of the logical tensor is in `stored`, and belongs into `entry`."""

    entry: Entry
    stored: Stored
    region: Box


@dataclass(frozen=True)
class Match:
    """What an index has for a list of entries."""

    pieces: tuple[Piece, ...]
    lines: tuple[int, ...]  # numbers of the index lines that were used
    differences: tuple[str, ...]  # how the entries differ from what was saved; empty if they fit


def match(index: Index, entries: Sequence[Entry]) -> Match:
    """Look up each entry.

    Raises:
        InvalidCheckpointError: the index is damaged: a tensor's slices leave gaps.
    """
    pieces: list[Piece] = []
    lines, differences = [], []
    for e in sorted(entries, key=lambda e: e.name):
        line = index.find(e.name)
        difference = _difference(e, line)
        if difference is not None:
            differences.append(difference)
        if line is None:
            continue
        lines.append(line.number)
        if difference is None:
            pieces += _pieces(e, line)
    return Match(tuple(pieces), tuple(lines), tuple(differences))


def _difference(e: Entry, line: Line | None) -> str | None:
    if line is None:
        return f"{e.name}: not in the checkpoint"
    if line.shape != e.shape:
        return f"{e.name}: shape {list(line.shape)} in the checkpoint, {list(e.shape)} here"
    if line.dtype != DTYPES[e.tensor.dtype]:
        return f"{e.name}: {line.dtype} in the checkpoint, {DTYPES[e.tensor.dtype]} here"
    return None


def _pieces(e: Entry, line: Line) -> list[Piece]:
    pieces = [Piece(e, stored, region) for stored, region in line.meeting(e.box)]
    found = sum(p.region.numel for p in pieces)
    if found != e.box.numel:
        raise InvalidCheckpointError(f"index: {e.name}: {found} elements of {e.box}, expected {e.box.numel}")
    return pieces


def load(reader: VerifiedReader, pieces: Sequence[Piece], is_by_all: bool = False) -> None:
    """Copy all pieces into their entries' tensors.

    is_by_all: every rank loads its pieces now, so that those of an entry without replicas are no other's.

    Raises:
        InvalidCheckpointError: a block is bad; what was copied before stays, so all tensors are then void.
    """
    is_pinned = any(p.entry.tensor.is_cuda for p in pieces)
    reader.read([_range(p, is_by_all) for p in pieces], lambda size: _staging(size, is_pinned))


def _staging(size: int, is_pinned: bool) -> memoryview:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data if is_pinned else pages(size)


def _range(p: Piece, is_by_all: bool) -> Range:
    """The whole rows (dim 0) of the stored slice that have elements of the piece: they lie together."""
    tensor = p.entry.tensor.detach()
    target = tensor[p.region.slices_in(p.entry.box)]
    if not p.region.shape:
        rows = inner = Box((), ())
        first, size = 0, tensor.element_size()
    else:
        rows = p.stored.box.rows(p.region.start[0] - p.stored.box.start[0], p.region.shape[0])
        row = prod(rows.shape[1:]) * tensor.element_size()
        first, size = (rows.start[0] - p.stored.box.start[0]) * row, p.region.shape[0] * row
    at = p.stored.at + first
    is_own = is_by_all and p.entry.replica.count == 1 and rows.shape == p.region.shape
    if rows.shape == p.region.shape and target.device.type == "cpu" and target.is_contiguous():
        # A dim of size 1 may have any stride, which a view of other elements would not take.
        into = target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy().data
        return Range(p.stored.file, at, size, into=into, is_own=is_own)
    inner = Box(tuple(a - b for a, b in zip(p.region.start, rows.start, strict=True)), p.region.shape)
    return Range(p.stored.file, at, size, None, lambda at, data: _take(target, inner, rows.shape, at, data), is_own)


def _take(target: torch.Tensor, inner: Box, shape: tuple[int, ...], at: int, data: memoryview) -> None:
    """Copy the elements of `inner`, a region of a tensor of `shape`, that are among its bytes `at : at + len(data)`.

    target: of inner's shape, any device and stride.
    """
    size = target.element_size()
    values = torch.frombuffer(data, dtype=torch.uint8).view(target.dtype)
    for box, first in boxes(shape, at // size, (at + len(data)) // size):
        region = box.intersect(inner)
        if region is not None:
            source = values[first - at // size :][: box.numel].view(box.shape)
            target[region.slices_in(inner)].copy_(source[region.slices_in(box)])


def boxes(shape: tuple[int, ...], first: int, end: int) -> Iterator[tuple[Box, int]]:
    """Elements `first : end` of a row-major tensor of `shape` as boxes, each with the number of its first element."""
    if first >= end:
        return
    if not shape:
        yield Box((), ()), 0
        return
    row = prod(shape[1:])
    whole, behind = -(-first // row), end // row
    if whole < behind:
        yield Box((whole, *(0 for _ in shape[1:])), (behind - whole, *shape[1:])), whole * row
    # The row in which it begins and the row in which it ends, as far as it does not have them whole.
    ends = ((behind, first, end),) if whole > behind else ((whole - 1, first, whole * row), (behind, behind * row, end))
    for i, a, b in ends:
        if a < b:
            for box, at in boxes(shape[1:], a - i * row, b - i * row):
                yield Box((i, *box.start), (1, *box.shape)), i * row + at
