"""RMS normalisation, optionally with the residual addition in front of it: signature and reference.

Does not know where in a block it is used; sharding a hidden dimension is the caller's concern.
"""

from __future__ import annotations

from typing import Any, Protocol, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .numerics import accumulate_dtype, apply, distinct, flat_tokens


class RmsNorm(Protocol):
    """The signature of `rmsnorm`, see there."""

    @overload
    def __call__(self, x: Tensor, weight: Tensor, eps: float, residual: None = None, offset: float = 0.0) -> Tensor: ...
    @overload
    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]: ...


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """y = x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension (Zhang and Sennrich 2019,
    arXiv:1910.07467).

    x: [..., D], any floating dtype and strides. weight: [D], any floating dtype. eps: inside the root.
    residual: None, or of x's shape and dtype; then x + residual, rounded to x's dtype, is what is normalised.
    offset: added to the weight in the accumulation dtype: 1 for weights that start at 0 (Gemma), which half precision
    resolves better than weights near 1.
    Returns y: [..., D] in x's dtype; with residual (y, x + residual). The product with weight is taken in the
    accumulation dtype and rounded once. Raises ValueError when weight or residual does not fit x.
    """
    check_rmsnorm(x, weight, residual)
    if residual is None:
        y: Tensor = apply(_RmsNorm, x, weight, eps, offset)
        return y
    total = x + residual
    return apply(_RmsNorm, total, weight, eps, offset), total


def check_rmsnorm(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    """ValueError when weight or residual does not fit x."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rmsnorm: weight has shape {tuple(weight.shape)}, x needs {tuple(x.shape[-1:])}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"rmsnorm: residual is {residual.dtype} {tuple(residual.shape)}, x is {x.dtype} {tuple(x.shape)}; "
            "both must be alike"
        )


class _RmsNorm(torch.autograd.Function):
    """By hand because autograd's own backward of the composite takes 1.5 times as long on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        wide = x.to(accumulate_dtype(x.dtype))
        rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        # x rather than its normalised copy: in a pre-norm block x is alive anyway.
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return distinct((wide * rstd).mul_(_factor(weight, offset, wide.dtype)).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, rstd = ctx.saved_tensors
        factor = _factor(weight, ctx.offset, rstd.dtype)
        grad = grad_y.to(rstd.dtype)
        normed = x * rstd
        grad_normed = grad * normed
        grad_weight = grad_normed.reshape(flat_tokens(x.shape), x.shape[-1]).sum(0)
        along = grad_normed.mul_(factor).mean(-1, keepdim=True)
        grad_x = (grad * factor).sub_(normed.mul_(along)).mul_(rstd)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


def _factor(weight: Tensor, offset: float, wide: torch.dtype) -> Tensor:
    return weight.to(wide).add(offset) if offset else weight
