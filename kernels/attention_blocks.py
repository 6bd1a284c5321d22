"""Attention of a block of queries to a block of keys, forward and backward, in memory that is linear in the length.

Owns: which keys a query sees, cutting queries into chunks, and the explicit form that does everything (soft cap, values
of another width). Fused kernels for chunks are attention_flash.py's; merging blocks is the callers' work. The form with
(out, log-sum-exp) and its derivative from them is FlashAttention's (Dao et al. 2022, arXiv:2205.14135, appendix B).

Shapes: B rows, H query heads, K key heads, G = H / K, Q queries, N keys, E features, V features of values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from . import attention_flash as flash
from .numerics import accumulate_dtype

CHUNK = 128  # queries whose mask (and, in the explicit form, whose scores) are in memory at a time
MAX_SCORES = 1 << 24  # scores in memory at a time, in the explicit form

Sight = Literal["none", "all", "causal", "some"]


@dataclass(frozen=True)
class Rule:
    """How scores are formed, and how far back a query sees; as in `attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Place:
    """Where a block lies in its rows: each of queries and keys is a run of neighbouring tokens."""

    q_start: int = 0
    k_start: int = 0
    q_docs: Tensor | None = None  # [B, Q], or None: all of one document
    k_docs: Tensor | None = None  # [B, N]


def sight(q_start: int, queries: int, k_start: int, keys: int, window: int | None) -> Sight:
    """Which of the keys the queries see by order and window: none, all, some, or each query those up to its own."""
    first, last = q_start - (k_start + keys - 1), q_start + queries - 1 - k_start  # least and greatest distance back
    if last < 0 or (window is not None and first >= window):
        return "none"
    is_near = window is None or last < window
    if is_near and first >= 0:
        return "all"
    return "causal" if is_near and q_start == k_start and queries == keys else "some"


def block_forward(q_BHQE: Tensor, k_BKNE: Tensor, v_BKNV: Tensor, rule: Rule, place: Place) -> tuple[Tensor, Tensor]:
    """(out [B, H, Q, V] in the dtype given, log-sum-exp of the scores [B, H, Q] in promote_types(dtype, float32)).

    A query that sees no key gets out 0 and log-sum-exp -inf.
    """
    band = _band(q_BHQE.shape[2], k_BKNE.shape[2], rule, place)
    if band is not None and flash.takes(q_BHQE, v_BKNV, rule.softcap, band):
        return flash.forward(q_BHQE, k_BKNE, v_BKNV, rule.scale, band)
    out_BHQV = q_BHQE.new_zeros(*q_BHQE.shape[:3], v_BKNV.shape[-1])
    lse_BHQ = q_BHQE.new_full(q_BHQE.shape[:3], -math.inf, dtype=accumulate_dtype(q_BHQE.dtype))
    for rows, keys, mask in _chunks(q_BHQE, k_BKNE, rule, place):
        part = (q_BHQE[:, :, rows], k_BKNE[:, :, keys], v_BKNV[:, :, keys])
        if flash.takes_mask(q_BHQE, v_BKNV, rule.softcap):
            out_BHQV[:, :, rows], lse_BHQ[:, :, rows] = flash.forward(*part, rule.scale, mask=mask)
        else:
            out_BHQV[:, :, rows], lse_BHQ[:, :, rows] = _explicit(*part, rule, mask)
    return out_BHQV, lse_BHQ


def block_backward(
    grad_BHQV: Tensor,
    q_BHQE: Tensor,
    k_BKNE: Tensor,
    v_BKNV: Tensor,
    out_BHQV: Tensor,
    lse_BHQ: Tensor,
    rule: Rule,
    place: Place,
    grad_lse_BHQ: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this block, in promote_types(dtype, float32).

    out, lse: of all keys that the queries see, in this block or in others. grad_lse: where the log-sum-exp is a result.
    """
    wide = accumulate_dtype(q_BHQE.dtype)
    band = _band(q_BHQE.shape[2], k_BKNE.shape[2], rule, place)
    if grad_lse_BHQ is None and band is not None and flash.takes(q_BHQE, v_BKNV, rule.softcap, band):
        dq, dk, dv = flash.backward(grad_BHQV, q_BHQE, k_BKNE, v_BKNV, out_BHQV, lse_BHQ, rule.scale, band)
        return dq.to(wide), dk.to(wide), dv.to(wide)
    dq_BHQE, dk_BKNE, dv_BKNV = (torch.zeros_like(t, dtype=wide) for t in (q_BHQE, k_BKNE, v_BKNV))
    for rows, keys, mask in _chunks(q_BHQE, k_BKNE, rule, place):
        q, k, v = q_BHQE[:, :, rows], k_BKNE[:, :, keys], v_BKNV[:, :, keys]
        part = (grad_BHQV[:, :, rows], q, k, v, out_BHQV[:, :, rows], lse_BHQ[:, :, rows])
        if grad_lse_BHQ is None and flash.takes_mask(q, v, rule.softcap):
            dq, dk, dv = flash.backward(*part, rule.scale, mask=mask)
        else:
            dq, dk, dv = _explicit_backward(
                *part, None if grad_lse_BHQ is None else grad_lse_BHQ[:, :, rows], rule, mask
            )
        dq_BHQE[:, :, rows] = dq
        dk_BKNE[:, :, keys] += dk
        dv_BKNV[:, :, keys] += dv
    return dq_BHQE, dk_BKNE, dv_BKNV


def _band(queries: int, keys: int, rule: Rule, place: Place) -> flash.Band | None:
    """Where the keys that each query sees are a band along the diagonal, so that no mask is needed."""
    if place.q_docs is not None:
        return None
    seen = sight(place.q_start, queries, place.k_start, keys, rule.window)
    if seen in ("all", "causal"):
        return flash.ALL if seen == "all" else flash.CAUSAL
    back = place.q_start - place.k_start
    if rule.window is None or queries != keys or rule.window <= back or 0 < back < keys:
        return None
    return flash.Band(rule.window - 1 - back, 0 if back == 0 else -1)


def _chunks(q_BHQE: Tensor, k_BKNE: Tensor, rule: Rule, place: Place) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(queries, keys that order and window let any of them see, mask [B or 1, 1, Q, N] or None for all)."""
    batch, heads, queries, _ = q_BHQE.shape
    n_keys = k_BKNE.shape[2]
    step = min(CHUNK, max(16, MAX_SCORES // max(1, batch * heads * n_keys)))
    back = place.q_start - place.k_start  # of query 0 to key 0
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        first = 0 if rule.window is None else max(0, back + start - rule.window + 1)
        last = min(n_keys, back + stop)
        if first < last:
            rows, keys = slice(start, stop), slice(first, last)
            yield rows, keys, _mask(rows, keys, rule.window, place, q_BHQE.device)


def _mask(rows: slice, keys: slice, window: int | None, place: Place, device: torch.device) -> Tensor | None:
    """True where a query sees a key."""
    q_start, k_start = place.q_start + rows.start, place.k_start + keys.start
    queries, n_keys = rows.stop - rows.start, keys.stop - keys.start
    mask = None
    if sight(q_start, queries, k_start, n_keys, window) != "all":
        back = torch.arange(q_start, q_start + queries, device=device).unsqueeze(1)
        back = back - torch.arange(k_start, k_start + n_keys, device=device)
        mask = back >= 0 if window is None else (back >= 0) & (back < window)
        mask = mask[None, None]
    if place.q_docs is not None:
        assert place.k_docs is not None
        same = (place.q_docs[:, rows].unsqueeze(2) == place.k_docs[:, keys].unsqueeze(1)).unsqueeze(1)
        mask = same if mask is None else mask & same
    return mask


def _scores(q_BHQE: Tensor, k_BKNE: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """Scores [B, K, G x Q, N] before the mask, and tanh(score / softcap)."""
    scores = (_grouped(q_BHQE, k_BKNE.shape[1]) * rule.scale) @ k_BKNE.transpose(-1, -2)
    if rule.softcap is None:
        return scores, None
    bent = scores.div_(rule.softcap).tanh_()
    return bent * rule.softcap, bent


def _explicit(q: Tensor, k: Tensor, v: Tensor, rule: Rule, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`block_forward` of a chunk with its scores in memory."""
    dtype, (batch, heads, queries, _) = q.dtype, q.shape
    q, k, v = (t.to(accumulate_dtype(dtype)) for t in (q, k, v))
    scores, _ = _scores(q, k, rule)
    _hide(scores, mask, queries)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp_()
    out = (weights @ v).view(batch, heads, queries, v.shape[-1])
    return out.to(dtype), lse.view(batch, heads, queries)


def _explicit_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    rule: Rule,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    wide, n_kv = accumulate_dtype(q.dtype), k.shape[1]
    grad, q, k, v, out = (t.to(wide) for t in (grad, q, k, v, out))
    scores, bent = _scores(q, k, rule)
    _hide(scores, mask, q.shape[2])
    weights = (scores - _grouped(lse.unsqueeze(-1), n_kv)).exp_()
    grad_grouped = _grouped(grad, n_kv)
    dv = weights.transpose(-1, -2) @ grad_grouped
    shift = (out * grad).sum(-1, keepdim=True)
    if grad_lse is not None:
        shift = shift - grad_lse.unsqueeze(-1)
    dscores = (grad_grouped @ v.transpose(-1, -2)).sub_(_grouped(shift, n_kv)).mul_(weights)
    if bent is not None:
        dscores = dscores.mul_(1 - bent.square())
    dq = (dscores @ k).mul_(rule.scale).view_as(q)
    dk = dscores.transpose(-1, -2) @ (_grouped(q, n_kv) * rule.scale)
    return dq, dk, dv


def _hide(scores: Tensor, mask: Tensor | None, queries: int) -> None:
    """-inf where a query does not see a key, in place."""
    if mask is not None:
        scores.unflatten(2, (scores.shape[2] // queries, queries)).masked_fill_(~mask.unsqueeze(2), -math.inf)


def _grouped(x_BHQE: Tensor, n_kv: int) -> Tensor:
    """[B, H, Q, E] to [B, K, G x Q, E]: the queries of all heads that read one key head."""
    batch, heads, queries, width = x_BHQE.shape
    return x_BHQE.reshape(batch, n_kv, heads // n_kv * queries, width)
