"""Order by expert, rows into it and back by csrc/permute.cu: the ops' signatures over the raw ops, and their gradients.
Import after `library.load`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..moe_permute import check_moe_permute, check_moe_sort, check_moe_unpermute
from ..numerics import apply
from .library import fake, raw, refuse

_sort, _permute = raw("moe_sort"), raw("moe_permute")
_unpermute, _unpermute_grad = raw("moe_unpermute"), raw("moe_unpermute_grad")


def moe_sort(choice: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See stoker.kernels.moe_permute. At most 1,023 experts. What is no expert's number counts as none."""
    try:
        return _sort(choice, num_experts)  # type: ignore[no-any-return]
    except RuntimeError as error:
        refuse("moe_sort", error, lambda: check_moe_sort(choice, num_experts))


def moe_permute(x: Tensor, copies: Tensor, places: Tensor) -> Tensor:
    """See stoker.kernels.moe_permute. x: any dtype; float32, bfloat16 or float16 for a gradient."""
    try:
        if torch.is_grad_enabled() and x.requires_grad:
            rows: Tensor = apply(_Permute, x, places, copies.shape[0])
            return rows
        return _permute(x, places, copies.shape[0])  # type: ignore[no-any-return]
    except RuntimeError as error:
        refuse("moe_permute", error, lambda: check_moe_permute(x, copies, places))


def moe_unpermute(rows: Tensor, copies: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """See stoker.kernels.moe_permute. rows: float32, bfloat16 or float16 on CUDA; weights: float32."""
    try:
        if torch.is_grad_enabled() and (rows.requires_grad or weights.requires_grad):
            y: Tensor = apply(_Unpermute, rows, places, weights)
            return y
        return _unpermute(rows, places, weights)  # type: ignore[no-any-return]
    except RuntimeError as error:
        refuse("moe_unpermute", error, lambda: check_moe_unpermute(rows, copies, places, weights))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(places)
        return _permute(x, places, rows)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _unpermute(grad_rows, places, None), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, places, weights)
        return _unpermute(rows, places, weights)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, places, weights = ctx.saved_tensors
        grad_rows, grad_weights = _unpermute_grad(grad_y, rows, places, weights)
        return grad_rows, None, grad_weights


@fake("moe_sort")
def _(choice: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return choice.new_empty((choice.numel(),)), choice.new_empty(choice.shape), choice.new_empty((experts,))


@fake("moe_permute")
def _(x: Tensor, places: Tensor, rows: int) -> Tensor:
    return x.new_empty((rows, x.shape[1]))


@fake("moe_unpermute")
def _(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty((places.shape[0], rows.shape[1]))


@fake("moe_unpermute_grad")
def _(grad_y: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)
