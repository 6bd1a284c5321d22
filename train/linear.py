"""Linear layers whose backward pass returns dX and queues dW; embeddings, whose weight gradient goes the same way.

Owns: the autograd functions, whole or cut over the tensor axis (Shoeybi et al. 2019, arXiv:1909.08053, section 3), the
queue between them and whoever collects gradients, and the products themselves. Does not own: where gradients live and
when they are reduced (parallel/buckets.py), or what is exchanged on the tensor axis (parallel/tensor.py).

Shapes: T tokens, R tokens of the residual stream on this rank (see parallel/tensor.py), I input features, O output
features, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.numerics import apply, distinct
from ..kernels.weight_gradient import WeightGradient, weight_gradient
from .parallel.tensor import Gathered, TensorAxis, enter, leave


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


class Contribution(Protocol):
    """What is added to a weight's gradient: called with the sink's buffer and whether it holds a sum to add to."""

    def __call__(self, buffer: Tensor, holds_sum: bool) -> None: ...


class WeightGradients:
    """The queue of weight gradients that the backward pass leaves behind.

    Drains at once by default. With `is_deferred` the products wait until `drain`, which a schedule with a split
    backward pass calls where it would otherwise idle; inputs and output gradients stay alive until then.

    weight_gradient: the op that forms products and adds them.
    product: (x [..., I], weight [O, I]) -> [..., O], by which `project` then multiplies instead of queueing anything:
    autograd accumulates its gradients of weights, and the sink takes them in the hook that it has for all parameters.
    """

    def __init__(
        self,
        sink: GradientSink | None = None,
        is_deferred: bool = False,
        product: Callable[[Tensor, Tensor], Tensor] | None = None,
        weight_gradient: WeightGradient = weight_gradient,
    ) -> None:
        self.sink: GradientSink = sink or GradAttribute()
        self.is_deferred, self.product, self.weight_gradient = is_deferred, product, weight_gradient
        self._waiting: deque[tuple[Tensor, Contribution]] = deque()

    def push(self, weight: Tensor, add: Contribution) -> None:
        """Queue one contribution."""
        if self.is_deferred:
            self._waiting.append((weight, add))
        else:
            self._work(weight, add)

    def take(self) -> Callable[[], None]:
        """Empty the queue; the queued work, in the order it came, is what the result does when called (once).

        So the weight gradients of one backward pass stay apart from those of the next (a pipeline's `dw_builder`).
        """
        waiting, self._waiting = self._waiting, deque()
        return lambda: self._do(waiting)

    def drain(self) -> None:
        """Do all queued work."""
        if self._waiting:
            self.take()()

    def clear(self) -> None:
        """Drop queued work: its step is void."""
        self._waiting.clear()

    @torch.no_grad()
    def _do(self, waiting: deque[tuple[Tensor, Contribution]]) -> None:
        while waiting:
            weight, add = waiting.popleft()  # let go of one by one, with what it holds
            if waiting and isinstance(waiting[0][1], Product):
                waiting[0][1].start()  # its tokens come while this product is formed
            self._work(weight, add)

    def _work(self, weight: Tensor, add: Contribution) -> None:
        add(*self.sink.target(weight))
        self.sink.ready(weight)


def add_or_copy(gradient: Tensor, buffer: Tensor, holds_sum: bool) -> None:
    """buffer (+)= gradient: a contribution that was formed elsewhere."""
    if holds_sum:
        buffer.add_(gradient)
    else:
        buffer.copy_(gradient)


def project(
    x: Tensor,
    weights: Sequence[Tensor],
    queue: WeightGradients,
    axis: TensorAxis | None = None,
    biases: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """x @ w.T (+ b) for each weight: projections of one input, whose gradients meet in one dX without a sum in between.

    x: [..., I]; weights: [O, I] each, of x's dtype; biases: none, or one [O] per weight. Returns [..., O] per weight.
    axis: weights and biases are this rank's rows (column parallel); x is the residual stream [R, I], the results have
    all tokens and this rank's features [T, O].
    """
    if torch.compiler.is_compiling():
        # A queue is an effect that no graph can hold: there autograd accumulates gradients of weights itself, and the
        # sink takes them in the hook that it has for all parameters.
        return _products(x if axis is None else enter(x, axis), weights, biases)
    if axis is None or axis.size == 1:
        if queue.product is not None:
            return _products(x, weights, biases, queue.product)
        return apply(_Project, x, queue, biases, *weights)
    return apply(_ColumnParallel, x, queue, axis, biases, *weights)


def linear(x: Tensor, weight: Tensor, queue: WeightGradients) -> Tensor:
    """x @ weight.T; x: [..., I], weight: [O, I]."""
    return project(x, (weight,), queue)[0]


def reduce_linear(
    x: Tensor, weight: Tensor, queue: WeightGradients, axis: TensorAxis | None = None, bias: Tensor | None = None
) -> Tensor:
    """x @ weight.T (+ bias): back to the residual stream. x: [..., I], weight: [O, I], bias: [O].

    axis: x has all tokens and this rank's features [T, I], weight is this rank's columns, bias whole (row parallel).
    The sum over ranks comes back as the residual stream [R, O], with the bias added once. Under sequence parallelism
    each rank's gradient of the bias is that of its own tokens: a part of the sum.
    """
    if axis is None or axis.size == 1:
        return project(x, (weight,), queue, biases=() if bias is None else (bias,))[0]
    if torch.compiler.is_compiling():
        y = leave(F.linear(x, weight), axis)
        return y if bias is None else y + bias
    return apply(_RowParallel, x, weight, queue, axis, bias)


def embed(tokens: Tensor, weight: Tensor, queue: WeightGradients) -> Tensor:
    """Rows of weight [V, D] by token id [...]: [..., D]."""
    return apply(_Embed, tokens, weight, queue)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, queue: WeightGradients, biases: Sequence[Tensor], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        # Parameters, held as they are: the sink knows them by identity.
        ctx.weights, ctx.biases, ctx.queue = weights, biases, queue
        return _products(x, weights, biases)

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
                ctx.queue.push(weight, Product(dy_TO, x_TI, ctx.queue.weight_gradient))
        if ctx.biases:
            _push_biases(ctx.queue, ctx.biases, grads)
        return (None if dx_TI is None else dx_TI.view_as(x), None, None, *(None for _ in grads))


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RI: Tensor, queue: WeightGradients, axis: TensorAxis, biases: Sequence[Tensor], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_RI)
        ctx.weights, ctx.biases, ctx.queue, ctx.axis = weights, biases, queue, axis
        return _products(Gathered(axis, x_RI).wait(), weights, biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Behind dX the tokens for dW are gathered, and behind dW dX is reduced, where the backend does both at once.

        Deferred products hold this rank's tokens and gather when their turn comes: on every rank of the axis in the
        same order, as all run the same schedule.
        """
        queue, axis = ctx.queue, ctx.axis
        x_TI = Gathered(axis, ctx.saved_tensors[0])
        if not queue.is_deferred:
            x_TI.start()
        dx_RI, reduced = None, None
        if ctx.needs_input_grad[0]:
            dx_TI = grads[0] @ ctx.weights[0]
            for dy_TO, weight in zip(grads[1:], ctx.weights[1:], strict=True):
                dx_TI.addmm_(dy_TO, weight)
            dx_RI, reduced = axis.reduce(dx_TI)
        for dy_TO, weight in zip(grads, ctx.weights, strict=True):
            if weight.requires_grad:
                queue.push(weight, Product(dy_TO, x_TI, queue.weight_gradient))
        _push_biases(queue, ctx.biases, grads)
        if reduced is not None:
            reduced.wait()
        return (dx_RI, None, None, None, *(None for _ in grads))


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight: Tensor, queue: WeightGradients, axis: TensorAxis, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.weight, ctx.bias, ctx.queue, ctx.axis = weight, bias, queue, axis
        y_RO, reduced = axis.reduce(F.linear(x_TI, weight))
        reduced.wait()
        return distinct(y_RO if bias is None else y_RO.add_(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI,), weight, queue = ctx.saved_tensors, ctx.weight, ctx.queue
        dy_TO = Gathered(ctx.axis, dy_RO)
        dx_TI = dy_TO.wait() @ weight if ctx.needs_input_grad[0] else None
        if weight.requires_grad:
            dy = Gathered(ctx.axis, dy_RO) if queue.is_deferred else dy_TO
            queue.push(weight, Product(dy, x_TI, queue.weight_gradient))
        if ctx.bias is not None:
            _push_biases(queue, (ctx.bias,), (dy_RO,))
        return dx_TI, None, None, None, None


def _products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    product: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> tuple[Tensor, ...]:
    if not biases:
        return tuple(product(x, w) for w in weights)
    if product is F.linear:
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    return tuple(product(x, w) + b for w, b in zip(weights, biases, strict=True))


def _push_biases(queue: WeightGradients, biases: Sequence[Tensor], grads: Iterable[Tensor]) -> None:
    for bias, grad in zip(biases, grads, strict=False):
        if bias.requires_grad:
            queue.push(bias, _RowSum(grad.reshape(-1, grad.shape[-1])))


class Product:
    """buffer (+)= dy.T @ x, in the buffer's dtype, by `op`."""

    __slots__ = ("dy_TO", "op", "x_TI")

    def __init__(self, dy_TO: Tensor | Gathered, x_TI: Tensor | Gathered, op: WeightGradient) -> None:
        self.dy_TO, self.x_TI, self.op = dy_TO, x_TI, op

    def start(self) -> None:
        """Begin to gather what is to be gathered."""
        for factor in (self.dy_TO, self.x_TI):
            if isinstance(factor, Gathered):
                factor.start()

    def __call__(self, buffer: Tensor, holds_sum: bool) -> None:
        dy_TO, x_TI = (f.wait() if isinstance(f, Gathered) else f for f in (self.dy_TO, self.x_TI))
        self.op(buffer, dy_TO, x_TI, holds_sum)


class _RowSum:
    """buffer (+)= the sum of dy's rows, in the buffer's dtype."""

    __slots__ = ("dy_TO",)

    def __init__(self, dy_TO: Tensor) -> None:
        self.dy_TO = dy_TO

    def __call__(self, buffer: Tensor, holds_sum: bool) -> None:
        add_or_copy(self.dy_TO.sum(0, dtype=buffer.dtype), buffer, holds_sum)


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
