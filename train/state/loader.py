"""Fills local tensors from a checkpoint that any number of ranks wrote, in any division.

Owns: finding the stored slices that meet each entry's box, telling a damaged checkpoint from one of another model, and
copying. Does not own: which checkpoint, and agreement among ranks (checkpointer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ...launcher.run.manifest import InvalidCheckpointError
from ..box import Box
from .entry import DTYPES, Entry
from .index import Index, Line, Stored
from .source import VerifiedReader

_STAGING = 64 * 1024 * 1024  # bytes of host memory through which a restore passes


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
    met = ((s, s.box.intersect(e.box)) for s in line.slices)
    pieces = [Piece(e, s, region) for s, region in met if region is not None]
    found = sum(p.region.numel for p in pieces)
    if found != e.box.numel:
        raise InvalidCheckpointError(f"index: {e.name}: {found} elements of {e.box}, expected {e.box.numel}")
    return pieces


def load(reader: VerifiedReader, pieces: Sequence[Piece]) -> None:
    """Copy all pieces into their entries' tensors.

    Raises:
        InvalidCheckpointError: a block is bad; what was copied before stays, so all tensors are then void.
    """
    staging = bytearray(0)
    for p in sorted(pieces, key=lambda p: (p.stored.file, p.stored.at)):
        need = min(_STAGING, p.stored.box.numel * p.entry.tensor.element_size())
        row = prod(p.stored.box.shape[1:]) * p.entry.tensor.element_size()
        if len(staging) < max(need, row):
            staging = bytearray(max(need, row))
        _copy(reader, p, staging)


def _copy(reader: VerifiedReader, p: Piece, staging: bytearray) -> None:
    """Read whole stored rows, which lie together, as many at a time as `staging` holds; take the region's columns."""
    tensor = p.entry.tensor.detach()
    target = tensor[p.region.slices_in(p.entry.box)]
    taken = (slice(None), *p.region.slices_in(p.stored.box)[1:])
    width = p.stored.box.shape[1:]
    row = prod(width) * tensor.element_size()
    if not p.region.shape:  # a scalar is one row
        target, first, count = target.view(1), 0, 1
    else:
        first, count = p.region.start[0] - p.stored.box.start[0], p.region.shape[0]
    step = max(1, len(staging) // row)
    for done in range(0, count, step):
        n = min(step, count - done)
        reader.read(p.stored.file, p.stored.at + (first + done) * row, memoryview(staging)[: n * row])
        rows = torch.frombuffer(staging, dtype=torch.uint8, count=n * row).view(tensor.dtype).view((n, *width))
        target[done : done + n].copy_(rows[taken])
