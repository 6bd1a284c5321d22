"""Attention over a ring of ranks: keys and values go round, and partial results merge by their log-sum-exp.

Owns: which blocks a rank computes in which turn, and the two passes around the ring (Liu et al. 2023,
arXiv:2310.01889). Blocks themselves are computed by kernels/attention_blocks.py.

Rank r of c holds chunks r and 2c-1-r of 2c, which gives every rank the same work under the causal order (as in Llama 3,
arXiv:2407.21783, section 3.3.2).

Shapes: B rows, s tokens of a row on this rank, H query heads, K key heads, E features, V features of values.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels.attention_blocks import Place, Rule, block_backward, block_forward, sight
from ...kernels.numerics import accumulate_dtype, apply
from ..comm import Communicator, Work
from ..data.dataset import RowPart

SHORT_DOCUMENT = 16  # tokens; where blocks of single documents are shorter on average, a mask is cheaper


def zigzag(rank: int, size: int) -> tuple[int, int]:
    """The two chunks of 2 x size that a rank holds: an early one and the late one that makes up for it."""
    return rank, 2 * size - 1 - rank


@dataclass(frozen=True)
class Pair:
    """One block: some of this rank's queries, and some of the keys at hand."""

    rows: slice
    queries: slice  # of this rank's s tokens
    keys: slice  # of the s tokens at hand
    place: Place


@dataclass(frozen=True)
class Ring:
    """The blocks of one attention over the ring, for this rank."""

    comm: Communicator
    rule: Rule
    part: RowPart

    def sources(self) -> list[int]:
        """Whose keys this rank has in each turn: its own, then those of the ranks before it."""
        return [(self.comm.rank - turn) % self.comm.size for turn in range(self.comm.size)]

    def pairs(self, source: int) -> Iterator[Pair]:
        """The blocks with keys of rank `source` in which some query sees some key. A chunk's own keys come before
        earlier ones, so that no query's first block is one where it sees nothing."""
        chunk = self.part.row_length // (2 * self.comm.size)
        slots = (slice(0, chunk), slice(chunk, 2 * chunk))
        for queries, q_chunk in zip(slots, zigzag(self.comm.rank, self.comm.size), strict=True):
            for keys, k_chunk in reversed(list(zip(slots, zigzag(source, self.comm.size), strict=True))):
                pair = Pair(slice(None), queries, keys, Place(q_chunk * chunk, k_chunk * chunk))
                if self._is_seen(*_ranges(pair.place, chunk)):
                    yield from [pair] if self.part.starts is None else self._by_documents(pair, chunk)

    def _is_seen(self, queries: range, keys: range) -> bool:
        return sight(queries.start, len(queries), keys.start, len(keys), self.rule.window) != "none"

    def _by_documents(self, pair: Pair, chunk: int) -> list[Pair]:
        """A pair as one block per document that both sides have tokens of; as a whole, where that is all one document
        or documents are so short that a mask costs less."""
        assert self.part.doc_ids is not None
        assert self.part.starts is not None
        place = pair.place
        q_chunk, k_chunk = _ranges(place, chunk)
        pieces = [
            (row, queries, keys)
            for row, starts in enumerate(self.part.starts)
            for queries, keys in _common_documents(starts, q_chunk, k_chunk)
            if self._is_seen(queries, keys)
        ]
        if len(pieces) == len(self.part.starts) and all(p[1:] == (q_chunk, k_chunk) for p in pieces):
            return [pair]
        if sum(len(queries) for _, queries, _ in pieces) < SHORT_DOCUMENT * len(pieces):
            docs = (self.part.doc_ids[:, side.start : side.stop] for side in (q_chunk, k_chunk))
            return [replace(pair, place=Place(place.q_start, place.k_start, *docs))]
        return [
            Pair(
                slice(row, row + 1),
                _shifted(queries, pair.queries.start - q_chunk.start),
                _shifted(keys, pair.keys.start - k_chunk.start),
                Place(queries.start, keys.start),
            )
            for row, queries, keys in pieces
        ]


def _ranges(place: Place, chunk: int) -> tuple[range, range]:
    return range(place.q_start, place.q_start + chunk), range(place.k_start, place.k_start + chunk)


def _common_documents(starts: Sequence[int], q_chunk: range, k_chunk: range) -> Iterator[tuple[range, range]]:
    """(queries, keys) of each document of a row that has some of both; the chunks are the same one, or apart."""
    first = bisect_right(starts, max(q_chunk.start, k_chunk.start)) - 1
    for number in range(first, len(starts)):
        begin, end = starts[number], starts[number + 1] if number + 1 < len(starts) else max(q_chunk.stop, k_chunk.stop)
        if begin >= min(q_chunk.stop, k_chunk.stop):
            return
        queries, keys = (range(max(begin, side.start), min(end, side.stop)) for side in (q_chunk, k_chunk))
        if queries and keys:
            yield queries, keys


def _shifted(places: range, by: int) -> slice:
    return slice(places.start + by, places.stop + by)


def ring_attention(q_BsHE: Tensor, k_BsKE: Tensor, v_BsKV: Tensor, ring: Ring) -> Tensor:
    """This rank's queries to the keys of the whole rows: [B, s, H, V]. Collective; raises PeerLostError."""
    out: Tensor = apply(_RingAttention, q_BsHE, k_BsKE, v_BsKV, ring)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BsHE: Tensor, k_BsKE: Tensor, v_BsKV: Tensor, ring: Ring) -> Tensor:
        k_BsKE, v_BsKV = k_BsKE.contiguous(), v_BsKV.contiguous()
        out_BHsV, lse_BHs = _forward(ring, q_BsHE, k_BsKE, v_BsKV)
        out_BsHV = out_BHsV.transpose(1, 2).to(q_BsHE.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q_BsHE, k_BsKE, v_BsKV, out_BsHV, lse_BHs)
        return out_BsHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BsHV: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse_BHs = ctx.saved_tensors
        dq, dk, dv = _backward(ctx.ring, grad_BsHV, q, k, v, out, lse_BHs)
        return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _forward(ring: Ring, q_BsHE: Tensor, k_BsKE: Tensor, v_BsKV: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, H, s, V], log-sum-exp [B, H, s]), both wide."""
    wide = accumulate_dtype(q_BsHE.dtype)
    q_BHsE = _operand(q_BsHE)
    out_BHsV = q_BHsE.new_zeros(*q_BHsE.shape[:3], v_BsKV.shape[-1], dtype=wide)
    lse_BHs = torch.full(q_BHsE.shape[:3], -math.inf, dtype=wide, device=q_BHsE.device)
    at_hand: Sequence[Tensor] = (k_BsKE, v_BsKV)
    sources = ring.sources()
    for turn, source in enumerate(sources):
        is_last = turn == len(sources) - 1
        coming, work = (at_hand, Work()) if is_last else ring.comm.shift(at_hand)
        k_BKsE, v_BKsV = (_operand(t) for t in at_hand)
        for pair in ring.pairs(source):
            mine, theirs = (pair.rows, slice(None), pair.queries), (pair.rows, slice(None), pair.keys)
            out, lse = block_forward(q_BHsE[mine], k_BKsE[theirs], v_BKsV[theirs], ring.rule, pair.place)
            _merge(out_BHsV[mine], lse_BHs[mine], out, lse)
        work.wait()
        at_hand = coming
    return out_BHsV, lse_BHs


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Into (out, lse), the result of other keys; of the two, one at least has seen a key."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(more * (more_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _backward(
    ring: Ring, grad_BsHV: Tensor, q_BsHE: Tensor, k_BsKE: Tensor, v_BsKV: Tensor, out_BsHV: Tensor, lse_BHs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [B, H, s, E], dk [B, s, K, E], dv [B, s, K, V]), all wide. The gradients of a block of keys follow it round
    the ring one turn behind, and arrive at its owner after the last."""
    wide = accumulate_dtype(q_BsHE.dtype)
    grad, q, out = (_operand(t) for t in (grad_BsHV, q_BsHE, out_BsHV))
    dq = torch.zeros_like(q, dtype=wide)
    at_hand: Sequence[Tensor] = (k_BsKE, v_BsKV)
    gathered, gathering = [torch.zeros_like(t, dtype=wide) for t in at_hand], Work()
    sent: Sequence[Tensor] = ()
    sources = ring.sources()
    for turn, source in enumerate(sources):
        is_last = turn == len(sources) - 1
        coming, work = (at_hand, Work()) if is_last else ring.comm.shift(at_hand)
        k, v = (_operand(t) for t in at_hand)
        parts = []
        for pair in ring.pairs(source):
            mine, theirs = (pair.rows, slice(None), pair.queries), (pair.rows, slice(None), pair.keys)
            tensors = (grad[mine], q[mine], k[theirs], v[theirs], out[mine], lse_BHs[mine])
            dq_part, *dkv = block_backward(*tensors, ring.rule, pair.place)
            dq[mine] += dq_part
            parts.append((pair, dkv))
        gathering.wait()
        for pair, dkv in parts:
            for total, part in zip(gathered, dkv, strict=True):
                total[pair.rows, pair.keys] += part.transpose(1, 2)
        work.wait()
        sent, at_hand = gathered, coming  # what is on its way must stay until it has arrived
        gathered, gathering = ring.comm.shift(sent)
    gathering.wait()
    dk, dv = gathered
    return dq, dk, dv


def _operand(x_BsHE: Tensor) -> Tensor:
    """[B, H, s, E] for a block. On the CPU in the dtype of sums, so that a result is rounded once."""
    x_BHsE = x_BsHE.transpose(1, 2)
    return x_BHsE.to(accumulate_dtype(x_BHsE.dtype)) if x_BHsE.device.type == "cpu" else x_BHsE
