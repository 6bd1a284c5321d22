"""Layer normalisation, optionally with the residual addition in front of it: signature and reference.

Does not know where in a block it is used; sharding a hidden dimension is the caller's concern.
"""

from __future__ import annotations

from typing import Any, Protocol, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .numerics import accumulate_dtype, apply, distinct


class LayerNorm(Protocol):
    """The signature of `layernorm`, see there."""

    @overload
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: None = None) -> Tensor: ...
    @overload
    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor
    ) -> tuple[Tensor, Tensor]: ...


def layernorm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension (Ba et al. 2016,
    arXiv:1607.06450); the variance is the mean squared deviation.

    x: [..., D], any floating dtype and strides. weight, bias: [D], any floating dtype. eps: inside the root.
    residual: None, or of x's shape and dtype; then x + residual, rounded to x's dtype, is what is normalised.
    Returns y: [..., D] in x's dtype; with residual (y, x + residual). All is computed in the accumulation dtype and
    rounded once. Raises ValueError when weight, bias or residual does not fit x.
    """
    check_layernorm(x, weight, bias, residual)
    if residual is None:
        y: Tensor = apply(_LayerNorm, x, weight, bias, eps)
        return y
    total = x + residual
    return apply(_LayerNorm, total, weight, bias, eps), total


def check_layernorm(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> None:
    """ValueError when weight, bias or residual does not fit x."""
    if weight.shape != x.shape[-1:] or bias.shape != x.shape[-1:]:
        raise ValueError(
            f"layernorm: weight has shape {tuple(weight.shape)}, bias {tuple(bias.shape)}, "
            f"x needs {tuple(x.shape[-1:])} of both"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"layernorm: residual is {residual.dtype} {tuple(residual.shape)}, x is {x.dtype} {tuple(x.shape)}; "
            "both must be alike"
        )


class _LayerNorm(torch.autograd.Function):
    """torch's own on widened values, of which none outlives its pass. On half precision itself, torch's sums the
    gradients of weight and bias in it on a CPU: off by two thirds for 4096 tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = accumulate_dtype(x.dtype)
        y, mean, rstd = torch.native_layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return distinct(y.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        wide = rstd.dtype
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad_y.to(wide), x.to(wide), x.shape[-1:], mean, rstd, weight.to(wide), bias.to(wide), [True, True, True]
        )
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), None
