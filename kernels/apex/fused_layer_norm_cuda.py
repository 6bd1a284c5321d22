"""RMSNorm and LayerNorm by apex's extension fused_layer_norm_cuda, called as apex's own modules do.

Owns: what the extension asks for beyond our ops (no residual, no offset, contiguous tensors, less than 2^31 elements).
Half precision is rounded before the product with weight as well as after it. Signatures: github.com/NVIDIA/apex,
csrc/layer_norm_cuda.cpp and apex/normalization/fused_layer_norm.py. Never run on hardware.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import reference
from ..layernorm import check_layernorm
from ..numerics import accumulate_dtype, apply
from ..rmsnorm import check_rmsnorm

_extension: Any = importlib.import_module("fused_layer_norm_cuda")
_SAVED_OUTPUT = False  # memory_efficient: whether the backward pass is given y rather than x


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """See stoker.kernels.rmsnorm. x: float32, bfloat16 or float16 on CUDA, less than 2^31 elements (ValueError)."""
    check_rmsnorm(x, weight, residual)
    if not _fits("rmsnorm", x):
        return reference.rmsnorm(x, weight, eps, residual, offset)
    total = x if residual is None else x + residual
    factor = weight if weight.dtype == x.dtype else weight.float()
    if offset:
        factor = weight.float() + offset  # 1 plus a small weight is 1 in half precision
    y: Tensor = apply(_RmsNorm, total, factor, eps).to(x.dtype)
    return y if residual is None else (y, total)


def layernorm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """See stoker.kernels.layernorm. x: float32, bfloat16 or float16 on CUDA, less than 2^31 elements (ValueError)."""
    check_layernorm(x, weight, bias, residual)
    if not _fits("layernorm", x):
        return reference.layernorm(x, weight, bias, eps, residual)
    total = x if residual is None else x + residual
    if not weight.dtype == bias.dtype == x.dtype:
        # One dtype for both: the bias is read as if it had the weight's.
        weight, bias = weight.float(), bias.float()
    y: Tensor = apply(_LayerNorm, total, weight, bias, eps).to(x.dtype)
    return y if residual is None else (y, total)


def _fits(op: str, x: Tensor) -> bool:
    """False: there is nothing to launch. Raises ValueError: the extension finds rows by 32-bit numbers."""
    if x.numel() >= 2**31:
        raise ValueError(f"{op}: x has {x.numel()} elements, apex's kernels count to 2^31; choose kernels.{op}=native")
    return x.numel() > 0


# ---- the extension's functions as torch's ops, which torch.compile does not look into. Where weight is not in x's
# dtype, y is in weight's, and so is the grad_y that the extension takes.

_ops = torch.library.Library("stoker_apex", "FRAGMENT")
_ops.define("rmsnorm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
_ops.define("rmsnorm_grad(Tensor grad_y, Tensor rstd, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
_ops.define("layernorm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)")
_ops.define(
    "layernorm_grad(Tensor grad_y, Tensor mean, Tensor rstd, Tensor x, Tensor weight, Tensor bias, float eps)"
    " -> (Tensor, Tensor, Tensor)"
)


def _rmsnorm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, weight = x.contiguous(), weight.contiguous()
    is_mixed = x.dtype != weight.dtype
    forward = _extension.rms_forward_affine_mixed_dtypes if is_mixed else _extension.rms_forward_affine
    y, rstd = forward(x, list(weight.shape), weight, eps)
    return y, rstd


def _rmsnorm_grad(grad_y: Tensor, rstd: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    grad_y, x, weight = grad_y.contiguous(), x.contiguous(), weight.contiguous()
    grad_x, grad_weight = _extension.rms_backward_affine(
        grad_y, rstd, x, list(weight.shape), weight, eps, _SAVED_OUTPUT
    )
    return grad_x, grad_weight


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    is_mixed = x.dtype != weight.dtype
    forward = _extension.forward_affine_mixed_dtypes if is_mixed else _extension.forward_affine
    y, mean, rstd = forward(x, list(weight.shape), weight, bias, eps)
    return y, mean, rstd


def _layernorm_grad(
    grad_y: Tensor, mean: Tensor, rstd: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_y, x, weight, bias = (t.contiguous() for t in (grad_y, x, weight, bias))
    grad_x, grad_weight, grad_bias = _extension.backward_affine(
        grad_y, mean, rstd, x, list(weight.shape), weight, bias, eps, _SAVED_OUTPUT
    )
    return grad_x, grad_weight, grad_bias


def _rmsnorm_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=weight.dtype), _per_row(x)


def _rmsnorm_grad_fake(grad_y: Tensor, rstd: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _layernorm_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=weight.dtype), _per_row(x), _per_row(x)


def _layernorm_grad_fake(
    grad_y: Tensor, mean: Tensor, rstd: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _per_row(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[:-1].numel(),), dtype=accumulate_dtype(x.dtype))


for _name, _function, _fake in (
    ("rmsnorm", _rmsnorm, _rmsnorm_fake),
    ("rmsnorm_grad", _rmsnorm_grad, _rmsnorm_grad_fake),
    ("layernorm", _layernorm, _layernorm_fake),
    ("layernorm_grad", _layernorm_grad, _layernorm_grad_fake),
):
    _ops.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"stoker_apex::{_name}", _fake)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = torch.ops.stoker_apex.rmsnorm(x, weight, eps)
        ctx.save_for_backward(rstd, x, weight)
        ctx.eps = eps
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_x, grad_weight = torch.ops.stoker_apex.rmsnorm_grad(grad_y, *ctx.saved_tensors, ctx.eps)
        return grad_x, grad_weight, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, rstd = torch.ops.stoker_apex.layernorm(x, weight, bias, eps)
        ctx.save_for_backward(mean, rstd, x, weight, bias)
        ctx.eps = eps
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        grad_x, grad_weight, grad_bias = torch.ops.stoker_apex.layernorm_grad(grad_y, *ctx.saved_tensors, ctx.eps)
        return grad_x, grad_weight, grad_bias, None
