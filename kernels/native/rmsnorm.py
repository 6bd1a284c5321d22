"""RMSNorm by csrc/rmsnorm.cu: the op's signature over the raw ops, and its gradients. Import after `library.load`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..numerics import accumulate_dtype, apply
from ..rmsnorm import check_rmsnorm
from .library import fake, raw, refuse

_forward, _forward_residual, _grad = raw("rmsnorm"), raw("rmsnorm_residual"), raw("rmsnorm_grad")


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """See stoker.kernels.rmsnorm. x: float32, bfloat16 or float16 on CUDA; weight: x's dtype or float32."""
    try:
        if residual is None:
            if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
                y: Tensor = apply(_RmsNorm, x, weight, eps, offset)
                return y
            return _forward(x, weight, eps, offset)[0]  # type: ignore[no-any-return]
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or residual.requires_grad):
            both: tuple[Tensor, Tensor] = apply(_RmsNormOfSum, x, residual, weight, eps, offset)
            return both
        return _forward_residual(x, residual, weight, eps, offset)[:2]  # type: ignore[no-any-return]
    except RuntimeError as error:
        refuse("rmsnorm", error, lambda: check_rmsnorm(x, weight, residual))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        y, rstd = _forward(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, rstd = ctx.saved_tensors
        grad_x, grad_weight = _grad(grad_y, None, x, weight, rstd, ctx.offset)
        return grad_x, grad_weight, None, None


class _RmsNormOfSum(torch.autograd.Function):
    """(norm of x + residual, x + residual): both gradients meet in one kernel, rounded once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        y, total, rstd = _forward_residual(x, residual, weight, eps, offset)
        ctx.save_for_backward(total, weight, rstd)
        ctx.offset = offset
        ctx.set_materialize_grads(False)  # a last layer's sum goes nowhere: no zeros for it
        return y, total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        total, weight, rstd = ctx.saved_tensors
        grad_y = torch.zeros_like(total) if grad_y is None else grad_y
        grad_x, grad_weight = _grad(grad_y, grad_total, total, weight, rstd, ctx.offset)
        return grad_x, grad_x, grad_weight, None, None


@fake("rmsnorm")
def _(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _rstd(x)


@fake("rmsnorm_residual")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), _rstd(x)


@fake("rmsnorm_grad")
def _(
    grad_y: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _rstd(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[:-1].numel(),), dtype=accumulate_dtype(x.dtype))
