"""Linear layers of many experts at once: rows that are sorted by expert times the expert's own matrix.

Owns: the autograd function and the products. As in linear.py, backward returns dX and queues dW, one contribution per
parameter, which holds all experts of this rank. Does not own: how rows came into that order (parallel/experts.py).

Shapes: M rows in all, those of each expert beside each other; E experts, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.numerics import apply
from ..kernels.weight_gradient import WeightGradient
from .linear import WeightGradients
from .parallel.experts import Groups


def grouped_project(
    x_MI: Tensor, weights: Sequence[Tensor], groups: Groups, queue: WeightGradients
) -> tuple[Tensor, ...]:
    """For each weight [E, O, I], of x's dtype: the rows of expert e times weight[e].T. Returns [M, O] per weight."""
    return apply(_GroupedProject, x_MI, groups, queue, *weights)


def grouped_linear(x_MI: Tensor, weight: Tensor, groups: Groups, queue: WeightGradients) -> Tensor:
    """grouped_project with one weight."""
    return apply(_GroupedProject, x_MI, groups, queue, weight)[0]


def grouped_mm(x_MI: Tensor, weight_EIO: Tensor, groups: Groups) -> Tensor:
    """The rows of expert e times weight_EIO[e]: [M, O].

    In bfloat16 on CUDA one kernel does all experts (torch._grouped_mm) if I and O are multiples of 8, as it wants them;
    else there is a product per expert.
    """
    inputs, outputs = weight_EIO.shape[1:]
    is_fit = x_MI.is_cuda and x_MI.dtype == torch.bfloat16 and not inputs % 8 and not outputs % 8
    if is_fit and x_MI.shape[0]:
        return torch._grouped_mm(x_MI, weight_EIO, offs=groups.ends)
    out_MO = x_MI.new_empty(x_MI.shape[0], outputs)
    for rows, weight_IO in zip(groups.slices(), weight_EIO, strict=True):
        torch.mm(x_MI[rows], weight_IO, out=out_MO[rows])
    return out_MO


class _GroupedProject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, groups: Groups, queue: WeightGradients, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_MI)
        # Parameters, held as they are: the sink knows them by identity.
        ctx.groups, ctx.weights, ctx.queue = groups, weights, queue
        return tuple(grouped_mm(x_MI, w.transpose(1, 2), groups) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_MI,) = ctx.saved_tensors
        dx_MI = None
        for weight, dy_MO in zip(ctx.weights, grads, strict=True):
            if ctx.needs_input_grad[0]:
                part_MI = grouped_mm(dy_MO.contiguous(), weight, ctx.groups)
                dx_MI = part_MI if dx_MI is None else dx_MI.add_(part_MI)
            if weight.requires_grad:
                ctx.queue.push(weight, _GroupedProduct(dy_MO, x_MI, ctx.groups, ctx.queue.weight_gradient))
        return (dx_MI, None, None, *(None for _ in grads))


class _GroupedProduct:
    """buffer[e] (+)= dy.T @ x over the rows of each expert e, by `op`; an expert without rows adds zero.

    A product per expert: a grouped one would round the sums to half precision, and wants counts of its own alignment.
    """

    __slots__ = ("dy_MO", "groups", "op", "x_MI")

    def __init__(self, dy_MO: Tensor, x_MI: Tensor, groups: Groups, op: WeightGradient) -> None:
        self.dy_MO, self.x_MI, self.groups, self.op = dy_MO, x_MI, groups, op

    def __call__(self, buffer_EOI: Tensor, holds_sum: bool) -> None:
        for rows, buffer_OI in zip(self.groups.slices(), buffer_EOI, strict=True):
            if rows.start < rows.stop:
                self.op(buffer_OI, self.dy_MO[rows], self.x_MI[rows], holds_sum)
            elif not holds_sum:
                buffer_OI.zero_()
