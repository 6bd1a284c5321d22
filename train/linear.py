"""Linear layers whose backward pass returns dX and queues dW; embeddings, whose weight gradient goes the same way.

Owns: the autograd functions, the queue between them and whoever collects gradients, and the products themselves.
Does not own: where gradients live and when they are reduced (a `GradientSink`, see reducer.py).

Shapes: T tokens, I input features, O output features, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.numerics import apply


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Gradients are summed in float32, in float64 for float64 weights."""
    return torch.promote_types(dtype, torch.float32)


class GradientSink(Protocol):
    """Who holds gradients. One contribution to `weight` is: target(), add into it, ready()."""

    def target(self, weight: Tensor) -> tuple[Tensor, bool]:
        """The buffer of weight's gradient (its shape, in gradient_dtype), and whether it holds a sum to add to.

        If not, its contents are undefined and the contribution overwrites them.
        """

    def ready(self, weight: Tensor) -> None:
        """The contribution is in the buffer."""


class GradAttribute:
    """The sink of a model without a trainer: gradients go to `.grad`."""

    def target(self, weight: Tensor) -> tuple[Tensor, bool]:
        holds_sum = weight.grad is not None
        if weight.grad is None:
            weight.grad = torch.empty_like(weight)
        return weight.grad, holds_sum

    def ready(self, weight: Tensor) -> None:
        pass


class WeightGradients:
    """The queue of weight gradients that the backward pass leaves behind.

    Drains at once by default. With `is_deferred` the products wait until `drain`, which a schedule with a split
    backward pass calls where it would otherwise idle; inputs and output gradients stay alive until then.
    """

    def __init__(self, sink: GradientSink | None = None, is_deferred: bool = False) -> None:
        self.sink: GradientSink = sink or GradAttribute()
        self.is_deferred = is_deferred
        self._waiting: list[Callable[[], None]] = []

    def push(self, weight: Tensor, add: Callable[[Tensor, bool], None]) -> None:
        """Queue one contribution: `add(buffer, holds_sum)` puts it into the sink's buffer."""

        def work() -> None:
            add(*self.sink.target(weight))
            self.sink.ready(weight)

        if self.is_deferred:
            self._waiting.append(work)
        else:
            work()

    def take(self) -> Callable[[], None]:
        """Empty the queue; the queued work, in the order it came, is what the result does when called.

        So the weight gradients of one backward pass stay apart from those of the next (a pipeline's `dw_builder`).
        """
        waiting, self._waiting = self._waiting, []

        @torch.no_grad()  # inputs are graph members, and nobody differentiates their products again
        def work() -> None:
            for each in waiting:
                each()

        return work

    def drain(self) -> None:
        """Do all queued work."""
        self.take()()

    def clear(self) -> None:
        """Drop queued work: its step is void."""
        self._waiting.clear()


def add_or_copy(gradient: Tensor, buffer: Tensor, holds_sum: bool) -> None:
    """buffer (+)= gradient: a contribution that was formed elsewhere."""
    if holds_sum:
        buffer.add_(gradient)
    else:
        buffer.copy_(gradient)


def project(x: Tensor, weights: Sequence[Tensor], queue: WeightGradients) -> tuple[Tensor, ...]:
    """x @ w.T for each weight: projections of one input, whose gradients meet in one dX without a sum in between.

    x: [..., I]; weights: [O, I] each, of x's dtype. Returns a tensor [..., O] per weight.
    """
    return apply(_Project, x, queue, *weights)


def linear(x: Tensor, weight: Tensor, queue: WeightGradients) -> Tensor:
    """x @ weight.T; x: [..., I], weight: [O, I]."""
    return apply(_Project, x, queue, weight)[0]


def embed(tokens: Tensor, weight: Tensor, queue: WeightGradients) -> Tensor:
    """Rows of weight [V, D] by token id [...]: [..., D]."""
    return apply(_Embed, tokens, weight, queue)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, queue: WeightGradients, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        # Parameters, held as they are: the sink knows them by identity.
        ctx.weights, ctx.queue = weights, queue
        return tuple(F.linear(x, w) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x_TI = x.reshape(-1, x.shape[-1])
        dx_TI = None
        for weight, grad in zip(ctx.weights, grads, strict=True):
            dy_TO = grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[0]:
                dx_TI = dy_TO @ weight if dx_TI is None else dx_TI.addmm_(dy_TO, weight)
            if weight.requires_grad:
                ctx.queue.push(weight, Product(dy_TO, x_TI))
        return (None if dx_TI is None else dx_TI.view_as(x), *(None for _ in range(1 + len(grads))))


class Product:
    """buffer (+)= dy.T @ x, in the buffer's dtype."""

    __slots__ = ("dy_TO", "x_TI")

    def __init__(self, dy_TO: Tensor, x_TI: Tensor) -> None:
        self.dy_TO, self.x_TI = dy_TO, x_TI

    def __call__(self, buffer: Tensor, holds_sum: bool) -> None:
        dy_OT = self.dy_TO.t()
        if buffer.dtype == dy_OT.dtype:
            buffer.addmm_(dy_OT, self.x_TI, beta=int(holds_sum))
            return
        add_or_copy(narrow_product(dy_OT, self.x_TI, buffer.dtype), buffer, holds_sum)


def narrow_product(dy_OT: Tensor, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of half-precision factors: on CUDA it leaves the accumulators unrounded, elsewhere rounded once."""
    if dy_OT.is_cuda:
        return torch.mm(dy_OT, x_TI, dtype)
    return dy_OT @ x_TI


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, queue: WeightGradients) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.queue = weight, queue
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        if weight.requires_grad:

            def add(buffer: Tensor, holds_sum: bool) -> None:
                if not holds_sum:
                    buffer.zero_()
                buffer.index_add_(0, tokens.reshape(-1), grad.reshape(-1, grad.shape[-1]).to(buffer.dtype))

            ctx.queue.push(weight, add)
        return None, None, None
