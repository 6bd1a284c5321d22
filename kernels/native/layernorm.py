"""LayerNorm by csrc/layernorm.cu: signature over the raw ops, and gradients. Import after `library.load`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layernorm import check_layernorm
from ..numerics import accumulate_dtype, apply
from .library import fake, raw, refuse

_forward, _forward_residual, _grad = raw("layernorm"), raw("layernorm_residual"), raw("layernorm_grad")


def layernorm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """See stoker.kernels.layernorm. x: float32, bfloat16 or float16 on CUDA; weight and bias: both x's dtype or both
    float32."""
    try:
        with_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad)
        if residual is None:
            if with_grad:
                y: Tensor = apply(_LayerNorm, x, weight, bias, eps)
                return y
            return _forward(x, weight, bias, eps)[0]  # type: ignore[no-any-return]
        if with_grad or (torch.is_grad_enabled() and residual.requires_grad):
            both: tuple[Tensor, Tensor] = apply(_LayerNormOfSum, x, residual, weight, bias, eps)
            return both
        return _forward_residual(x, residual, weight, bias, eps)[:2]  # type: ignore[no-any-return]
    except RuntimeError as error:
        refuse("layernorm", error, lambda: check_layernorm(x, weight, bias, residual))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, rstd = _forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = _grad(grad_y, None, x, weight, mean, rstd)
        return grad_x, grad_weight, grad_bias, None


class _LayerNormOfSum(torch.autograd.Function):
    """(norm of x + residual, x + residual): both gradients meet in one kernel, rounded once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, total, mean, rstd = _forward_residual(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.set_materialize_grads(False)  # a last layer's sum goes nowhere: no zeros for it
        return y, total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        total, weight, mean, rstd = ctx.saved_tensors
        grad_y = torch.zeros_like(total) if grad_y is None else grad_y
        grad_x, grad_weight, grad_bias = _grad(grad_y, grad_total, total, weight, mean, rstd)
        return grad_x, grad_x, grad_weight, grad_bias, None


@fake("layernorm")
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), _per_row(x), _per_row(x)


@fake("layernorm_residual")
def _(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), _per_row(x), _per_row(x)


@fake("layernorm_grad")
def _(
    grad_y: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _per_row(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[:-1].numel(),), dtype=accumulate_dtype(x.dtype))
