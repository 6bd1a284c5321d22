"""Torch's fused attention kernels in the form that blocks need: (out, log-sum-exp) and the derivative from them.

Owns: which kernel takes which tensors, and how each spells its arguments. CPU: any floating dtype, masks included.
CUDA: FlashAttention 2 in half precision, without masks but with windows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

MAX_WIDTH = 256  # features per head that FlashAttention 2 has kernels for


class Band(NamedTuple):
    """Of as many keys as queries, how many before and after its own number a query sees; -1: no limit."""

    before: int
    after: int


ALL, CAUSAL = Band(-1, -1), Band(-1, 0)


def takes_mask(q_BHQE: Tensor, v_BKNV: Tensor, softcap: float | None) -> bool:
    """Whether there is a kernel that takes these with a mask."""
    return _is_host(q_BHQE) and takes(q_BHQE, v_BKNV, softcap, ALL)


def takes(q_BHQE: Tensor, v_BKNV: Tensor, softcap: float | None, band: Band) -> bool:
    """Whether there is a kernel for these without a mask."""
    width = q_BHQE.shape[-1]
    if softcap is not None or v_BKNV.shape[-1] != width or not q_BHQE.numel() or not v_BKNV.numel():
        return False
    if q_BHQE.device.type == "cuda":
        return is_for_flash(q_BHQE)
    return _is_host(q_BHQE) and band in (ALL, CAUSAL)


def _is_host(x: Tensor) -> bool:
    """Meta tensors, which have shapes and no values, count as the CPU's: that kernel knows its shapes."""
    return x.device.type in ("cpu", "meta")


def is_for_flash(q: Tensor) -> bool:
    """Whether FlashAttention 2 has a kernel for the dtype and width of q, and for its GPU if it is on one."""
    width = q.shape[-1]
    if q.dtype not in (torch.float16, torch.bfloat16) or width % 8 or width > MAX_WIDTH:
        return False
    return not q.is_cuda or torch.cuda.get_device_capability(q.device) >= (8, 0)


def forward(
    q_BHQE: Tensor, k_BKNE: Tensor, v_BKNE: Tensor, scale: float, band: Band = ALL, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out [B, H, Q, E], lse [B, H, Q]); mask [B or 1, 1, Q, N], True where a key is seen. `takes` them must hold."""
    if q_BHQE.device.type == "cuda":
        assert mask is None
        return cuda_forward(q_BHQE, k_BKNE, v_BKNE, scale, band)
    bias = None if mask is None else _bias(mask, q_BHQE.dtype)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHQE, k_BKNE, v_BKNE, 0.0, band == CAUSAL, attn_mask=bias, scale=scale
    )
    if mask is not None:  # the kernel says 0 for a query that sees nothing
        lse = lse.masked_fill(~mask.any(-1), -math.inf)
    return out, lse


def backward(
    grad_BHQE: Tensor,
    q_BHQE: Tensor,
    k_BKNE: Tensor,
    v_BKNE: Tensor,
    out_BHQE: Tensor,
    lse_BHQ: Tensor,
    scale: float,
    band: Band = ALL,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the dtypes of q, k, v; out and lse may be those of more keys than these."""
    if q_BHQE.device.type == "cuda":
        assert mask is None
        return cuda_backward(grad_BHQE, q_BHQE, k_BKNE, v_BKNE, out_BHQE, lse_BHQ, scale, band)
    bias = None if mask is None else _bias(mask, q_BHQE.dtype)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_BHQE, q_BHQE, k_BKNE, v_BKNE, out_BHQE, lse_BHQ, 0.0, band == CAUSAL, attn_mask=bias, scale=scale
    )
    return dq, dk, dv


def cuda_forward(q_BHQE: Tensor, k_BKNE: Tensor, v_BKNE: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
    """FlashAttention 2 as torch has it."""
    q, k, v = (t.transpose(1, 2) for t in (q_BHQE, k_BKNE, v_BKNE))
    sizes = (None, None, q.shape[1], k.shape[1])
    out, lse, *_ = aten._flash_attention_forward(
        q,
        k,
        v,
        *sizes,
        0.0,
        band == CAUSAL,
        False,
        scale=scale,
        window_size_left=band.before,
        window_size_right=band.after,
    )
    return out.transpose(1, 2), lse


def cuda_backward(
    grad_BHQE: Tensor,
    q_BHQE: Tensor,
    k_BKNE: Tensor,
    v_BKNE: Tensor,
    out_BHQE: Tensor,
    lse_BHQ: Tensor,
    scale: float,
    band: Band,
) -> tuple[Tensor, Tensor, Tensor]:
    """The derivative of `cuda_forward`."""
    tensors = (t.transpose(1, 2) for t in (grad_BHQE, q_BHQE, k_BKNE, v_BKNE, out_BHQE))
    sizes = (None, None, q_BHQE.shape[2], k_BKNE.shape[2])
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_BHQE.device)
    nothing = torch.empty(0, device=q_BHQE.device)
    grads = aten._flash_attention_backward(
        *tensors,
        lse_BHQ.contiguous(),
        *sizes,
        0.0,
        band == CAUSAL,
        no_dropout,
        nothing,
        scale=scale,
        window_size_left=band.before,
        window_size_right=band.after,
    )
    dq, dk, dv = (t.transpose(1, 2) for t in grads)
    return dq, dk, dv


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)
