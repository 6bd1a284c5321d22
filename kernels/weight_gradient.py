"""The gradient of a linear layer's weight, added where gradients are summed: signature and reference.

Owns no kernel: on a GPU the product is cuBLAS's, by torch or by apex's extension, which adds to a float32 sum without a
float32 product in between. That is what it is an op for (Megatron-LM calls it gradient accumulation fusion). When it is
formed, and into which buffer, is the trainer's.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .numerics import accumulate_dtype


class WeightGradient(Protocol):
    """The signature of `weight_gradient`, see there."""

    def __call__(self, total: Tensor, grad_output: Tensor, x: Tensor, holds_sum: bool) -> None: ...


def weight_gradient(total: Tensor, grad_output: Tensor, x: Tensor, holds_sum: bool) -> None:
    """total (+)= grad_output.T @ x, in total's dtype.

    total: [O, I], any floating dtype; overwritten unless it holds_sum. grad_output: [T, O], x: [T, I], of one floating
    dtype, any strides. The product of half-precision factors reaches a float32 sum unrounded on CUDA; elsewhere it is
    rounded to their dtype before. Returns nothing. Not differentiable. Raises ValueError on shapes and dtypes.
    """
    check_weight_gradient(total, grad_output, x)
    if total.dtype == x.dtype:
        total.addmm_(grad_output.t(), x, beta=int(holds_sum))
        return
    is_wider = total.dtype == accumulate_dtype(x.dtype)
    product = torch.mm(grad_output.t(), x, total.dtype) if x.is_cuda and is_wider else grad_output.t() @ x
    if holds_sum:
        total.add_(product)
    else:
        total.copy_(product)


def check_weight_gradient(total: Tensor, grad_output: Tensor, x: Tensor) -> None:
    """Raises ValueError, see `weight_gradient`."""
    if grad_output.dim() != 2 or x.dim() != 2 or grad_output.shape[0] != x.shape[0] or grad_output.dtype != x.dtype:
        raise ValueError(
            f"weight_gradient: grad_output is {grad_output.dtype} {tuple(grad_output.shape)} and x is {x.dtype} "
            f"{tuple(x.shape)}, expected [tokens, outputs] and [tokens, inputs] of one dtype"
        )
    shape = (grad_output.shape[1], x.shape[1])
    if total.shape != shape or not total.is_floating_point():
        raise ValueError(
            f"weight_gradient: total is {total.dtype} {tuple(total.shape)}, expected a floating dtype and {shape}"
        )
