"""Whole matrices out of shards, for update rules that need them: each is gathered on one rank, worked on there once,
and its parts go back to all who hold some of it.

Owns: what the matrices are (a 3-D parameter is a stack of them: experts), who works on which, and the way of the parts.
Knows neither axis nor layout: who holds what is asked of all ranks once. Does not own what is done to a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from ..box import Box
from ..comm import Communicator
from ..params import ParamFacts
from .newton_schulz import flops

ROUND = 1 << 26  # elements that a rank works on between two exchanges

Read = Callable[[str, Box], Tensor]
"""(parameter, box in it) -> the values there, of the box's shape."""
Write = Callable[[str, Box, Tensor], None]
"""Takes the values of a box in a parameter, of the box's shape."""


@dataclass(frozen=True)
class Piece:
    """A part of a matrix, and the ranks that hold it, all with the same values."""

    box: Box
    holders: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A 2-D parameter, or one matrix of a 3-D one. Boxes are those in the logical parameter."""

    name: str
    box: Box
    pieces: tuple[Piece, ...]  # which tile it
    owner: int  # who works on it; holds some of it

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.box.shape[-2:]
        return rows, columns


@dataclass(frozen=True)
class _Transfer:
    """`box` of a matrix goes from rank `source` to rank `target`."""

    source: int
    target: int
    matrix: Matrix
    box: Box


class Exchange:
    """The plan of a group of ranks, the same on all of them."""

    def __init__(
        self, facts: Sequence[ParamFacts], boxes: Mapping[str, Box], comm: Communicator, dtype: torch.dtype
    ) -> None:
        """facts: the 2-D and 3-D parameters of the group, in one order on all ranks; boxes: this rank's places in them.
        dtype: of all values. Collective; raises PeerLostError.
        """
        self._comm, self._dtype = comm, dtype
        mine = [(boxes[f.name].start, boxes[f.name].shape) if f.name in boxes else None for f in facts]
        everyone = [
            {f.name: Box(tuple(place[0]), tuple(place[1])) for f, place in zip(facts, rank, strict=True) if place}
            for rank in comm.all_gather_json(mine)
        ]
        self.matrices = _deal(_matrices(facts, everyone), comm.size)
        self._rounds = _rounds(self.matrices, comm.size)

    def apply(self, read: Read, work: Callable[[Tensor], Tensor], write: Write) -> None:
        """Write each part of work(matrix) that this rank holds. Collective; raises PeerLostError.

        work: [n, rows, columns] to the same shape, for matrices of one shape.
        """
        for matrices in self._rounds:
            whole = self._gather(matrices, read)
            _work_on(whole, work)
            self._scatter(matrices, whole, write)

    def _gather(self, matrices: Sequence[Matrix], read: Read) -> dict[Matrix, Tensor]:
        """Those of `matrices` that this rank owns."""
        rank = self._comm.rank
        own = [m for m in matrices if m.owner == rank]
        whole = {m: torch.empty(m.box.shape, dtype=self._dtype, device=self._comm.device) for m in own}
        for m in own:
            for piece in m.pieces:
                if rank in piece.holders:
                    _part(whole, m, piece.box).copy_(read(m.name, piece.box))
        missing = [
            _Transfer(p.holders[0], m.owner, m, p.box) for m in matrices for p in m.pieces if m.owner not in p.holders
        ]
        self._move(missing, lambda m, box: read(m.name, box), lambda m, box, values: _part(whole, m, box).copy_(values))
        return whole

    def _scatter(self, matrices: Sequence[Matrix], whole: dict[Matrix, Tensor], write: Write) -> None:
        rank = self._comm.rank
        parts = [(m, p) for m in matrices for p in m.pieces]
        for m, p in parts:
            if m.owner == rank and rank in p.holders:
                write(m.name, p.box, _part(whole, m, p.box))
        sent = [_Transfer(m.owner, to, m, p.box) for m, p in parts for to in p.holders if to != m.owner]
        self._move(sent, partial(_part, whole), lambda m, box, values: write(m.name, box, values))

    def _move(
        self,
        transfers: Sequence[_Transfer],
        read: Callable[[Matrix, Box], Tensor],
        write: Callable[[Matrix, Box, Tensor], object],
    ) -> None:
        """All transfers of the group in one all-to-all. Each pair of ranks lists its transfers in the same order."""
        if not transfers:
            return
        rank, ranks = self._comm.rank, range(self._comm.size)
        sent = sorted((t for t in transfers if t.source == rank), key=lambda t: t.target)
        awaited = sorted((t for t in transfers if t.target == rank), key=lambda t: t.source)
        empty = torch.empty(0, dtype=self._dtype, device=self._comm.device)
        received = self._comm.all_to_all(
            torch.cat([empty, *(read(t.matrix, t.box).reshape(-1).to(self._dtype) for t in sent)]),
            [sum(t.box.numel for t in sent if t.target == to) for to in ranks],
            [sum(t.box.numel for t in awaited if t.source == source) for source in ranks],
        )
        for t, values in zip(awaited, received.split([t.box.numel for t in awaited]), strict=True):
            write(t.matrix, t.box, values.view(t.box.shape))


def _part(whole: Mapping[Matrix, Tensor], matrix: Matrix, box: Box) -> Tensor:
    """View of `box`, a part of the matrix."""
    return whole[matrix][box.slices_in(matrix.box)]


def _work_on(whole: dict[Matrix, Tensor], work: Callable[[Tensor], Tensor]) -> None:
    """In place, matrices of one shape together."""
    by_shape: dict[tuple[int, int], list[Matrix]] = {}
    for m in whole:
        by_shape.setdefault(m.shape, []).append(m)
    for shape, members in by_shape.items():
        done = work(torch.stack([whole[m].view(shape) for m in members]))
        for m, result in zip(members, done, strict=True):
            whole[m] = result.reshape(m.box.shape)


def _matrices(
    facts: Sequence[ParamFacts], everyone: Sequence[Mapping[str, Box]]
) -> list[tuple[ParamFacts, Box, list[Piece]]]:
    """Parameter, box and pieces of every matrix; everyone: what each rank holds."""
    found = []
    for f in facts:
        whole = Box.whole(f.shape)
        assert len(f.shape) in (2, 3), f"{f.name}: {f.shape} is neither a matrix nor a stack of them"
        for box in [whole] if len(f.shape) == 2 else [whole.rows(i, 1) for i in range(f.shape[0])]:
            holders: dict[Box, list[int]] = {}
            for rank, boxes in enumerate(everyone):
                common = boxes[f.name].intersect(box) if f.name in boxes else None
                if common is not None:
                    holders.setdefault(common, []).append(rank)
            assert sum(b.numel for b in holders) == box.numel, f"{f.name}: {list(holders)} do not tile {box}"
            found.append((f, box, [Piece(b, tuple(ranks)) for b, ranks in holders.items()]))
    return found


def _deal(matrices: Sequence[tuple[ParamFacts, Box, list[Piece]]], size: int) -> list[Matrix]:
    """Owners: the largest matrices first, each to the rank with the least work so far among those that hold some."""
    load = [0] * size
    owners: dict[tuple[str, Box], int] = {}
    for f, box, pieces in sorted(matrices, key=lambda m: -_work(m[1])):
        owner = min({rank for p in pieces for rank in p.holders}, key=lambda rank: (load[rank], rank))
        load[owner] += _work(box)
        owners[f.name, box] = owner
    return [Matrix(f.name, box, tuple(pieces), owners[f.name, box]) for f, box, pieces in matrices]


def _work(box: Box) -> int:
    rows, columns = box.shape[-2:]
    return flops(rows, columns, steps=1)


def _rounds(matrices: Sequence[Matrix], size: int) -> list[list[Matrix]]:
    """Cut so that no rank has more than ROUND elements at once, or a single matrix."""
    of_rank: list[list[list[Matrix]]] = []
    for rank in range(size):
        rounds: list[list[Matrix]] = []
        room = 0
        for m in matrices:
            if m.owner != rank:
                continue
            if not rounds or m.box.numel > room:
                rounds.append([])
                room = ROUND
            rounds[-1].append(m)
            room -= m.box.numel
        of_rank.append(rounds)
    return [[m for part in parts for m in part] for parts in zip_longest(*of_rank, fillvalue=[])]
