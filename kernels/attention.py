"""Causal self-attention with grouped queries, packed documents, sliding window and soft cap: signature and reference.

Probability dropout is not offered. Sequence parallelism combines results by the log-sum-exp given on request.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .numerics import accumulate_dtype


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
    _check(q, k, v, doc_ids, window, softcap)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    wide = accumulate_dtype(q.dtype)
    # Heads before sequence, as torch's own attention has it.
    q_BHSD, k_BKSD, v_BKSD = (t.to(wide).transpose(1, 2) for t in (q, k, v))
    mask = _visible(q.shape[1], doc_ids, window, q.device)
    if softcap is None and not return_lse:
        out = F.scaled_dot_product_attention(
            q_BHSD,
            k_BKSD,
            v_BKSD,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2).to(q.dtype)
    out, lse = _explicit(q_BHSD, k_BKSD, v_BKSD, mask, scale, softcap)
    out = out.transpose(1, 2).to(q.dtype)
    return (out, lse) if return_lse else out


def _visible(length: int, doc_ids: Tensor | None, window: int | None, device: torch.device) -> Tensor | None:
    """True where a query (row) may look at a key (column): [B or 1, 1, S, S], or None for plain causal."""
    if doc_ids is None and (window is None or window >= length):
        return None
    at = torch.arange(length, device=device)
    distance = at.unsqueeze(1) - at
    mask = (distance >= 0).unsqueeze(0)
    if window is not None:
        mask = mask & (distance < window)
    if doc_ids is not None:
        mask = mask & (doc_ids.unsqueeze(2) == doc_ids.unsqueeze(1))
    return mask.unsqueeze(1)


def _explicit(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """With all scores in memory: what torch's own attention does not offer."""
    n_kv, length = k_BKSD.shape[1], q_BHSD.shape[2]
    q_BKGSD = q_BHSD.unflatten(1, (n_kv, q_BHSD.shape[1] // n_kv))
    scores = (q_BKGSD * scale) @ k_BKSD.unsqueeze(2).transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()[None, None]
    scores = scores.masked_fill(~mask.unsqueeze(2), -math.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ v_BKSD.unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _check(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None, window: int | None, softcap: float | None) -> None:
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
