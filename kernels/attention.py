"""Causal self-attention with grouped queries, packed documents, sliding window and soft cap: signature and reference.

Probability dropout is not offered. Memory is linear in the length: what torch's own attention cannot do without a mask
goes by chunks of queries (attention_blocks.py).
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .attention_blocks import Place, Rule, block_backward, block_forward
from .numerics import accumulate_dtype, apply


class Attention(Protocol):
    """The signature of `attention`, see there."""

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        doc_ids: Tensor | None = None,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        doc_ids: Tensor | None = None,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        *,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc_ids: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T, causal) v, each query head reading the key head of its group.

    q: [B, S, H, D], k: [B, S, KV, D], v: [B, S, KV, Dv], of one floating dtype, any strides; KV divides H and query
    head h reads key head h // (H / KV). doc_ids: [B, S] integers; a token sees only tokens of its own number. None:
    one document per row. window: keys a query sees, itself included (Mistral's sliding window); None: all before it.
    scale: None means 1 / sqrt(D). softcap: scores become softcap * tanh(score / softcap) after scaling (Gemma 2).
    Returns [B, S, H, Dv] in the dtype of q; with return_lse also the log-sum-exp of each query's scores, [B, H, S] in
    promote_types(dtype, float32), differentiable here. Everything is computed in that dtype and rounded once.
    Raises ValueError on shapes, window < 1, softcap <= 0.
    """
    check_attention(q, k, v, doc_ids, window, softcap)
    wide = accumulate_dtype(q.dtype)
    # On meta tensors torch's own would be the form with all scores in memory.
    if is_plain(q, doc_ids, window, softcap) and not return_lse and not q.is_meta:
        return plain_attention(q.to(wide), k.to(wide), v.to(wide), scale).to(q.dtype)
    out, lse = chunked_attention(q.to(wide), k.to(wide), v.to(wide), doc_ids, window, scale, softcap)
    out = out.to(q.dtype)
    return (out, lse) if return_lse else out


def is_plain(q: Tensor, doc_ids: Tensor | None, window: int | None, softcap: float | None) -> bool:
    """Whether causal order is all there is to it."""
    return doc_ids is None and softcap is None and (window is None or window >= q.shape[1])


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Torch's own, in the dtype of q: the kernel is its choice."""
    grouped = q.shape[2] != k.shape[2]
    if grouped and q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        # No fused kernel takes groups in these dtypes, and without one all scores would be in memory.
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
        grouped = False
    # Heads before sequence, as torch's own attention has it.
    q_BHSD, k_BKSD, v_BKSD = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSD, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc_ids: Tensor | None,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) in the dtype of q: nothing of S x S is in memory at once, nor kept for the backward pass."""
    rule = Rule(1 / math.sqrt(q.shape[-1]) if scale is None else scale, window, softcap)
    result: tuple[Tensor, Tensor] = apply(_Chunked, q, k, v, doc_ids, rule)
    return result


class _Chunked(torch.autograd.Function):
    """One block: all queries to all keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.rule = rule
        place = Place(q_docs=doc_ids, k_docs=doc_ids)
        out_BHSD, lse_BHS = block_forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), rule, place)
        out = out_BHSD.transpose(1, 2)
        ctx.save_for_backward(q, k, v, doc_ids, out, lse_BHS)
        return out, lse_BHS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, doc_ids, out, lse = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(out)
        g_BHSD, q_BHSD, k_BKSD, v_BKSD, out_BHSD = (t.transpose(1, 2) for t in (grad, q, k, v, out))
        place = Place(q_docs=doc_ids, k_docs=doc_ids)
        grads = block_backward(g_BHSD, q_BHSD, k_BKSD, v_BKSD, out_BHSD, lse, ctx.rule, place, grad_lse)
        dq, dk, dv = (g.transpose(1, 2).to(q.dtype) for g in grads)
        return dq, dk, dv, None, None


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None, window: int | None, softcap: float | None
) -> None:
    """Raises ValueError for what `attention` refuses, whatever computes it."""
    if q.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3:] != q.shape[3:] or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; "
            "expected [B, S, H, D], [B, S, KV, D], [B, S, KV, Dv]"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"attention: {q.shape[2]} query heads cannot be shared among {k.shape[2]} key heads")
    if doc_ids is not None and doc_ids.shape != q.shape[:2]:
        raise ValueError(f"attention: doc_ids is {tuple(doc_ids.shape)}, expected [B, S] = {tuple(q.shape[:2])}")
    if window is not None and window < 1:
        raise ValueError(f"attention: window={window}, expected at least 1 (the token itself) or None")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"attention: softcap={softcap}, expected a positive number or None")
