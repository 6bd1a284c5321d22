"""The tensor axis: ranks that share each layer, and how tokens move between them.

Owns: the two forms of the residual stream (every rank holds all tokens, or its rows of them: sequence parallelism,
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2) and the collectives between them. The layers of linear.py and
vocabulary.py use these in both directions, with derivatives of their own; a compiled graph has `enter` and `leave`.

Shapes: T tokens of a micro-batch, R tokens of the residual stream on this rank (T, or T / size), D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels.numerics import apply
from ..comm import Communicator, Work


class TensorAxis:
    """Place on the tensor axis.

    cuts_tokens: the residual stream is cut, along the flat tokens. Layers take [R, D] from it, `gather` to [T, D], and
    come back from partial sums [T, D] by `reduce`. On an axis of one rank R = T and nothing is exchanged.
    """

    def __init__(self, comm: Communicator, sequence: bool = False) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.cuts_tokens = sequence and comm.size > 1

    def own(self, rows: Tensor) -> Tensor:
        """This rank's rows of a tensor [T, ...] that every rank has, as a view: [R, ...]."""
        if not self.cuts_tokens:
            return rows
        n = rows.shape[0] // self.size
        assert n * self.size == rows.shape[0], f"{rows.shape[0]} tokens over {self.size} ranks"
        return rows[self.rank * n : (self.rank + 1) * n]

    def gather(self, x_RD: Tensor) -> tuple[Tensor, Work]:
        """All ranks' tokens [T, D], once the work is waited for."""
        if not self.cuts_tokens:
            return x_RD, Work()
        return self.comm.all_gather_async(x_RD)

    def reduce(self, x_TD: Tensor) -> tuple[Tensor, Work]:
        """The sum over ranks, of it this rank's tokens [R, D], once the work is waited for; may overwrite x_TD."""
        if self.cuts_tokens:
            return self.comm.reduce_scatter_async(x_TD)
        return x_TD, self.comm.all_reduce_async(x_TD)


class Gathered:
    """Tokens of all ranks, of which only this rank's are kept until they are needed.

    Holding [T, D] from the forward to the backward pass, or until a deferred product, would cost what sequence
    parallelism is there to save; gathering them again costs one collective, most of it behind other work.
    """

    __slots__ = ("_all_TD", "_axis", "_work", "own_RD")

    def __init__(self, axis: TensorAxis, own_RD: Tensor) -> None:
        self._axis, self.own_RD = axis, own_RD
        self._all_TD: Tensor | None = None
        self._work = Work()

    def start(self) -> None:
        """Begin to gather; does nothing if begun."""
        if self._all_TD is None:
            self._all_TD, self._work = self._axis.gather(self.own_RD)

    def wait(self) -> Tensor:
        """[T, D]"""
        self.start()
        self._work.wait()
        assert self._all_TD is not None
        return self._all_TD


def enter(x_RD: Tensor, axis: TensorAxis) -> Tensor:
    """All tokens [T, D] of the residual stream, for a layer that forms part of the features: its gradients are parts of
    a sum. On an axis of one rank x itself."""
    y_TD: Tensor = x_RD if axis.size == 1 else apply(_Enter, x_RD, axis)
    return y_TD


def leave(x_TD: Tensor, axis: TensorAxis) -> Tensor:
    """The sum of what the ranks hold, as the residual stream [R, D]."""
    y_RD: Tensor = apply(_Leave, x_TD, axis)
    return y_RD


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.comm.all_gather(x_RD) if axis.cuts_tokens else x_RD.view_as(x_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        comm = ctx.axis.comm
        return comm.reduce_scatter(grad_TD) if ctx.axis.cuts_tokens else comm.all_reduce(grad_TD.clone()), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.comm.reduce_scatter(x_TD) if axis.cuts_tokens else axis.comm.all_reduce(x_TD.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.comm.all_gather(grad_RD) if ctx.axis.cuts_tokens else grad_RD, None
