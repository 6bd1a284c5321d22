"""Context parallelism: the ranks of an axis share the tokens of each row, and attend to all of it together.

Owns: which tokens a rank holds (`cut_rows`), and attention over them by a ring or by exchanging heads. Losses and token
counts are sums, so nothing else of the model knows. Blocks are computed by kernels/attention_blocks.py.

ring: a row is cut into 2c chunks, and rank r holds chunks r and 2c-1-r, which gives every rank the same work under the
causal order. Keys and values go round while the block at hand is computed; partial results merge by their log-sum-exp
(Liu et al. 2023, arXiv:2310.01889; zig-zag order as in Llama 3, arXiv:2407.21783, section 3.3.2).
ulysses: rank r holds the r-th of c parts; all-to-all turns parts with all heads into whole rows with a share of the
heads, and back (Jacobs et al. 2023, arXiv:2309.14509). Key heads fewer than ranks are repeated.

Shapes: B rows, s tokens of a row on this rank, S of the whole row, L = s / 2 of a chunk, H query heads, K key heads,
E features, V features of values, c ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...conf.schema import ContextMethod
from ...kernels.attention_blocks import Place, Rule, block_backward, block_forward, sight
from ...kernels.numerics import accumulate_dtype, apply
from ..comm import Communicator, Work
from ..data.dataset import Batch, RowPart

if TYPE_CHECKING:
    from ...kernels.attention import Attention


def cut_rows(batch: Batch, method: ContextMethod, rank: int, size: int) -> Batch:
    """A rank's tokens of a batch of whole rows; positions, documents and token numbers stay the rows' own.

    Raises ValueError where the length of the rows does not divide.
    """
    if size == 1:
        return batch
    length, is_ring = batch.tokens.shape[1], method is ContextMethod.ring
    parts = 2 * size if is_ring else size
    if length % parts:
        raise ValueError(f"context parallelism: rows of {length} tokens do not divide into {parts} parts")
    chunk = length // parts
    indices = torch.cat(
        [torch.arange(c * chunk, (c + 1) * chunk) for c in (zigzag(rank, size) if is_ring else (rank,))]
    )
    doc_ids, spans = batch.doc_ids, None
    if doc_ids is not None and is_ring:
        spans = _spans(doc_ids, parts)
    return Batch(
        batch.tokens[:, indices],
        batch.targets[:, indices],
        batch.positions[:, indices],
        None if doc_ids is None else doc_ids[:, indices],
        batch.samples,
        RowPart(indices, length, doc_ids, spans),
    )


class ContextAxis:
    """Attention over the tokens of whole rows that are cut over ranks. With one rank it is `attention` itself."""

    def __init__(self, comm: Communicator, method: ContextMethod, attention: Attention) -> None:
        """attention: the op for whole rows."""
        self.comm, self.method, self._attention = comm, method, attention

    def attention(
        self,
        q_BsHE: Tensor,
        k_BsKE: Tensor,
        v_BsKV: Tensor,
        batch: Batch,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """As kernels.attention, of this rank's queries to the keys of the whole rows: [B, s, H, V]. Collective.

        batch: as `cut_rows` made it. Raises PeerLostError.
        """
        if self.comm.size == 1:
            return self._attention(q_BsHE, k_BsKE, v_BsKV, batch.doc_ids, window, scale, softcap)
        assert batch.part is not None, "a batch that was not cut"
        if self.method is ContextMethod.ring:
            scale = 1 / math.sqrt(q_BsHE.shape[-1]) if scale is None else scale
            ring = Ring(self.comm, Rule(scale, window, softcap), batch.part)
            out: Tensor = apply(_RingAttention, q_BsHE, k_BsKE, v_BsKV, ring)
            return out
        q, k, v = apply(_HeadsForTokens, self.comm, q_BsHE, k_BsKE, v_BsKV)
        whole: Tensor = self._attention(q, k, v, batch.part.doc_ids, window, scale, softcap)
        out = apply(_TokensForHeads, self.comm, whole)
        return out


def zigzag(rank: int, size: int) -> tuple[int, int]:
    """The two chunks of 2 x size that a rank holds: an early one and the late one that makes up for it."""
    return rank, 2 * size - 1 - rank


def _spans(doc_ids_BS: Tensor, chunks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per row and chunk, the least and greatest document number."""
    low, high = doc_ids_BS.unflatten(1, (chunks, -1)).aminmax(dim=2)
    return tuple(tuple(zip(lows, highs, strict=True)) for lows, highs in zip(low.tolist(), high.tolist(), strict=True))


# The ring.


@dataclass(frozen=True)
class Pair:
    """One block: a chunk of this rank's queries, and a chunk of the keys at hand."""

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
                if sight(q_chunk * chunk, chunk, k_chunk * chunk, chunk, self.rule.window) == "none":
                    continue
                documents = self._documents(q_chunk, k_chunk)
                if documents == "none":
                    continue
                whole = self.part.doc_ids if documents == "some" else None
                q_docs, k_docs = (
                    None if whole is None else whole[:, c * chunk : (c + 1) * chunk] for c in (q_chunk, k_chunk)
                )
                yield Pair(queries, keys, Place(q_chunk * chunk, k_chunk * chunk, q_docs, k_docs))

    def _documents(self, q_chunk: int, k_chunk: int) -> str:
        """Whether two chunks have documents in common: none, some, or all tokens of both are of the same one."""
        if self.part.spans is None:
            assert self.part.doc_ids is None, "documents without their spans"
            return "all"
        spans = [(row[q_chunk], row[k_chunk]) for row in self.part.spans]
        if all(q[1] < k[0] or k[1] < q[0] for q, k in spans):
            return "none"
        return "all" if all(q == k and q[0] == q[1] for q, k in spans) else "some"


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
            rows, keys = pair.queries, pair.keys
            out, lse = block_forward(q_BHsE[:, :, rows], k_BKsE[:, :, keys], v_BKsV[:, :, keys], ring.rule, pair.place)
            _merge(out_BHsV[:, :, rows], lse_BHs[:, :, rows], out, lse)
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
            rows, keys = pair.queries, pair.keys
            tensors = (
                grad[:, :, rows],
                q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                out[:, :, rows],
                lse_BHs[:, :, rows],
            )
            dq_part, *dkv = block_backward(*tensors, ring.rule, pair.place)
            dq[:, :, rows] += dq_part
            parts.append((keys, dkv))
        gathering.wait()
        for keys, dkv in parts:
            for total, part in zip(gathered, dkv, strict=True):
                total[:, keys] += part.transpose(1, 2)
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


# Heads for tokens and back.


class _HeadsForTokens(torch.autograd.Function):
    """Tensors [B, s, heads, width] with all heads of some tokens, to [B, S, share of the heads, width]."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.heads = comm, [t.shape[2] for t in tensors]
        repeated = [_repeat_heads(t, comm.size) for t in tensors]
        return tuple(_gather_tokens(comm, repeated))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        spread = _gather_heads(ctx.comm, grads)
        return (None, *(_sum_heads(g, heads) for g, heads in zip(spread, ctx.heads, strict=True)))


class _TokensForHeads(torch.autograd.Function):
    """The way back, of one tensor: [B, S, share of the heads, width] to [B, s, heads, width]."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, x: Tensor) -> Tensor:
        ctx.comm = comm
        return _gather_heads(comm, [x])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, _gather_tokens(ctx.comm, [grad])[0]


def _repeat_heads(x: Tensor, size: int) -> Tensor:
    """Each head as often as it takes for `size` to divide their number; the groups of query heads stay together."""
    times = math.lcm(x.shape[2], size) // x.shape[2]
    return x if times == 1 else x.repeat_interleave(times, 2)


def _sum_heads(x: Tensor, heads: int) -> Tensor:
    """The derivative of `_repeat_heads`, summed in promote_types(dtype, float32)."""
    if x.shape[2] == heads:
        return x
    return x.unflatten(2, (heads, -1)).sum(3, dtype=accumulate_dtype(x.dtype)).to(x.dtype)


def _gather_tokens(comm: Communicator, tensors: Sequence[Tensor]) -> list[Tensor]:
    """[B, s, N, width] each to [B, c x s, N / c, width], in one exchange."""
    parts = [t.unflatten(2, (comm.size, -1)).movedim(2, 0).flatten(3) for t in tensors]  # [c, B, s, N / c x width]
    received = comm.all_to_all(torch.cat(parts, -1)).split([p.shape[-1] for p in parts], -1)
    return [
        r.movedim(0, 1).flatten(1, 2).unflatten(2, (-1, t.shape[-1])) for r, t in zip(received, tensors, strict=True)
    ]


def _gather_heads(comm: Communicator, tensors: Sequence[Tensor]) -> list[Tensor]:
    """[B, c x s, n, width] each to [B, s, c x n, width], in one exchange."""
    parts = [t.unflatten(1, (comm.size, -1)).movedim(1, 0).flatten(3) for t in tensors]  # [c, B, s, n x width]
    received = comm.all_to_all(torch.cat(parts, -1)).split([p.shape[-1] for p in parts], -1)
    return [
        r.unflatten(3, (-1, t.shape[-1])).movedim(0, 2).flatten(2, 3) for r, t in zip(received, tensors, strict=True)
    ]
