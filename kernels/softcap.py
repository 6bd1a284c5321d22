"""Soft-capping of output logits, cap * tanh(x / cap) (Gemma 2, arXiv:2408.00118, section 2).

Owns the one formula and its derivative that every way to a loss shares: all logits, chunks of them, or the part of one
vocabulary shard. It works on each logit alone, so it goes between the projection and any statistics. The capping of
attention scores is attention's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .numerics import accumulate_dtype, apply, distinct


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), differentiable; x: any shape, floating dtype and strides. Returns that shape and dtype."""
    capped: Tensor = apply(_SoftCap, x, cap)
    return capped


def softcap_(x: Tensor, cap: float) -> Tensor:
    """The same in place, outside of autograd, for x in an accumulation dtype. Returns x."""
    return x.div_(cap).tanh_().mul_(cap)


def softcap_slope(capped: Tensor, cap: float, out: Tensor | None = None) -> Tensor:
    """The derivative at the logits that became `capped`: 1 - (capped / cap)^2. out: where to put it."""
    slope = torch.div(capped, cap, out=out)
    return slope.square_().neg_().add_(1.0)


class _SoftCap(torch.autograd.Function):
    """By hand: keeps the result, which the loss keeps anyway, instead of a second tensor of logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        capped = (torch.tanh(x.to(accumulate_dtype(x.dtype)) / cap) * cap).to(x.dtype)
        ctx.save_for_backward(capped)
        ctx.cap = cap
        return distinct(capped)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (capped,) = ctx.saved_tensors
        wide = accumulate_dtype(capped.dtype)
        return softcap_slope(capped.to(wide, copy=True), ctx.cap).mul_(grad).to(grad.dtype), None
