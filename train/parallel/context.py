"""Context parallelism: the ranks of an axis share the tokens of each row, and attend to all of it together.

Owns: which tokens a rank holds (`cut_rows`), and attention by exchanging heads for tokens; that by a ring is ring.py's.
Losses and token counts are sums, so nothing else of the model knows.

ring: a row is cut into 2c chunks, and rank r holds chunks r and 2c-1-r. ulysses: rank r holds the r-th of c parts;
all-to-all turns parts with all heads into whole rows with a share of the heads, and back (Jacobs et al. 2023,
arXiv:2309.14509). Key heads fewer than ranks are repeated.

Shapes: B rows, s tokens of a row on this rank, S of the whole row, H query heads, K key heads, E features, V features
of values, c ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...conf.schema import ContextMethod
from ...kernels.attention_blocks import Rule
from ...kernels.numerics import accumulate_dtype, apply
from ..comm import Communicator
from ..data.dataset import Batch, RowPart
from .ring import Ring, ring_attention, zigzag

if TYPE_CHECKING:
    from ...kernels.attention import Attention


def cut_rows(batch: Batch, method: ContextMethod, rank: int, size: int) -> Batch:
    """A rank's tokens of a batch of whole rows; positions, documents and token numbers stay the rows' own.

    Raises ValueError where the length of the rows does not divide, or a document's number comes back after another's.
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
    doc_ids = batch.doc_ids
    return Batch(
        batch.tokens[:, indices],
        batch.targets[:, indices],
        batch.positions[:, indices],
        None if doc_ids is None else doc_ids[:, indices],
        batch.samples,
        RowPart(indices, length, doc_ids, None if doc_ids is None else _starts(doc_ids)),
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
            return ring_attention(q_BsHE, k_BsKE, v_BsKV, ring)
        q, k, v = apply(_HeadsForTokens, self.comm, q_BsHE, k_BsKE, v_BsKV)
        whole: Tensor = self._attention(q, k, v, batch.part.doc_ids, window, scale, softcap)
        out: Tensor = apply(_TokensForHeads, self.comm, whole)
        return out


def _starts(doc_ids_BS: Tensor) -> tuple[tuple[int, ...], ...]:
    """Per row, where documents begin."""
    steps = doc_ids_BS.diff(dim=1)
    if bool((steps < 0).any()):
        raise ValueError("context parallelism: document numbers within a row must not decrease")
    return tuple((0, *(row.nonzero().flatten() + 1).tolist()) for row in steps)


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
