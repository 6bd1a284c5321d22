"""RMSNorm and LayerNorm by apex's extension fused_layer_norm_cuda (csrc/layer_norm_cuda.cpp), called as
apex/normalization/fused_layer_norm.py calls it. Never run on hardware.

The extension knows no residual and no offset: the addition comes before it, and weight + offset is a tensor.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layernorm import check_layernorm
from ..numerics import apply
from ..rmsnorm import check_rmsnorm

_extension = importlib.import_module("fused_layer_norm_cuda")


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """See stoker.kernels.rmsnorm. x: float32, bfloat16 or float16 on CUDA; weight: x's dtype or float32."""
    check_rmsnorm(x, weight, residual)
    # In float32, where 1 plus a small weight is not 1.
    factor = weight.float() + offset if offset else weight
    if residual is None:
        y: Tensor = apply(_RmsNorm, x, factor, eps).to(x.dtype)
        return y
    total = x + residual
    return apply(_RmsNorm, total, factor, eps).to(x.dtype), total


def layernorm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """See stoker.kernels.layernorm. x: float32, bfloat16 or float16 on CUDA; weight and bias: both x's dtype or both
    float32."""
    check_layernorm(x, weight, bias, residual)
    if weight.dtype != bias.dtype:
        # The extension reads the bias as if it had the weight's dtype.
        weight, bias = weight.float(), bias.float()
    if residual is None:
        y: Tensor = apply(_LayerNorm, x, weight, bias, eps).to(x.dtype)
        return y
    total = x + residual
    return apply(_LayerNorm, total, weight, bias, eps).to(x.dtype), total


class _RmsNorm(torch.autograd.Function):
    """y is in weight's dtype, as is what the extension takes for grad_y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        shape = list(weight.shape)
        forward = (
            _extension.rms_forward_affine if x.dtype == weight.dtype else _extension.rms_forward_affine_mixed_dtypes
        )
        y, rstd = forward(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps = eps
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        memory_efficient = False  # x is what was saved, not y
        grad_x, grad_weight = _extension.rms_backward_affine(
            grad_y.contiguous(), rstd, x, list(weight.shape), weight, ctx.eps, memory_efficient
        )
        return grad_x, grad_weight, None


class _LayerNorm(torch.autograd.Function):
    """y is in weight's dtype, as is what the extension takes for grad_y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        shape = list(weight.shape)
        forward = _extension.forward_affine if x.dtype == weight.dtype else _extension.forward_affine_mixed_dtypes
        y, mean, rstd = forward(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.eps = eps
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        memory_efficient = False  # x is what was saved, not y
        grad_x, grad_weight, grad_bias = _extension.backward_affine(
            grad_y.contiguous(), mean, rstd, x, list(weight.shape), weight, bias, ctx.eps, memory_efficient
        )
        return grad_x, grad_weight, grad_bias, None
