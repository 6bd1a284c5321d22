"""Norms: of the residual stream before a branch, of what a branch adds to it, and of queries and keys.

Owns: which norms a branch has, and the choice between RMSNorm and LayerNorm, made once. Their arithmetic is the
kernels', but for the norm over features that lie on several ranks.

Shapes: T tokens, D hidden, F features of this rank.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...conf.schema import Norm
from ...kernels.numerics import accumulate_dtype, apply, distinct
from ..comm import Communicator
from .parts import Parts


class StreamNorm(Protocol):
    """The norm of [..., D] with a module's weights."""

    def alone(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x, normed."""

    def of_sum(self, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normed x + branch, x + branch); branch None is nothing to add."""


def stream_norm(parts: Parts) -> StreamNorm:
    """As the model is configured."""
    return _Layer(parts) if parts.config.norm is Norm.layernorm else _Rms(parts)


class Branch(nn.Module):
    """What adds to the residual stream. It holds the parameters of the norms around it, which the block applies: `norm`
    before it, `post_norm` behind it, each if the model has it there."""

    norm: nn.Parameter
    norm_bias: nn.Parameter | None
    post_norm: nn.Parameter
    post_norm_bias: nn.Parameter | None

    def __init__(self, parts: Parts, name: str) -> None:
        super().__init__()
        for norm in ("norm", "post_norm"):
            setattr(self, norm, parts.optional(f"{name}.{norm}"))
            setattr(self, f"{norm}_bias", parts.optional(f"{name}.{norm}_bias"))


class _Rms:
    def __init__(self, parts: Parts) -> None:
        self._op, self._eps, self._offset = parts.ops.rmsnorm, parts.config.norm_eps, parts.config.norm_offset

    def alone(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._op(x, weight, self._eps, offset=self._offset)

    def of_sum(self, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if branch is None:
            return self._op(x, weight, self._eps, offset=self._offset), x
        return self._op(branch, weight, self._eps, residual=x, offset=self._offset)


class _Layer:
    def __init__(self, parts: Parts) -> None:
        self._op, self._eps = parts.ops.layernorm, parts.config.norm_eps

    def alone(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return self._op(x, weight, bias, self._eps)

    def of_sum(self, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        assert bias is not None
        if branch is None:
            return self._op(x, weight, bias, self._eps), x
        return self._op(branch, weight, bias, self._eps, residual=x)


class HeadsNorm:
    """RMSNorm over the features of all heads together, of which this rank has some: [T, F] to [T, F]."""

    def __init__(self, parts: Parts) -> None:
        self._op, self._comm = parts.ops.rmsnorm, parts.tensor.comm
        self._eps, self._offset = parts.config.norm_eps, parts.config.norm_offset

    def __call__(self, x_TF: Tensor, weight_F: Tensor) -> Tensor:
        if self._comm.size == 1:
            return self._op(x_TF, weight_F, self._eps, offset=self._offset)
        y_TF: Tensor = apply(_CutRmsNorm, x_TF, weight_F, self._eps, self._offset, self._comm)
        return y_TF


class _CutRmsNorm(torch.autograd.Function):
    """RMSNorm whose features lie on the ranks of `comm`, on each equally many: kernels/rmsnorm.py with both means taken
    over all of them. Where several ranks hold the same features (key heads fewer than ranks), each counts as often in
    sum and number, and gradients of them are parts of a sum, as they are everywhere behind the projection.
    """

    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, weight_F: Tensor, eps: float, offset: float, comm: Communicator) -> Tensor:
        wide = x_TF.to(accumulate_dtype(x_TF.dtype))
        factor = weight_F.to(wide.dtype) + offset
        features = x_TF.shape[-1] * comm.size
        rstd = comm.all_reduce(wide.square().sum(-1, keepdim=True)).div_(features).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TF, factor, rstd)
        ctx.comm, ctx.features, ctx.dtype = comm, features, weight_F.dtype
        return distinct((wide * rstd).mul_(factor).to(x_TF.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_TF, factor, rstd = ctx.saved_tensors
        grad = grad_TF.to(rstd.dtype)
        normed = x_TF * rstd
        grad_normed = grad * normed
        grad_weight = grad_normed.sum(0)
        along = ctx.comm.all_reduce(grad_normed.mul_(factor).sum(-1, keepdim=True)).div_(ctx.features)
        grad_x = (grad * factor).sub_(normed.mul_(along)).mul_(rstd)
        return grad_x.to(x_TF.dtype), grad_weight.to(ctx.dtype), None, None, None
