"""Output projection and cross-entropy in one, chunked over tokens, so that all logits never exist at once.

Signature and reference. The mathematics of the loss is `cross_entropy`'s; this file owns the chunking, the two ways to
get gradients (logits computed again, or gradients formed on the way forward) and how the weight's gradient leaves. All
implementations share these: they differ in `Arithmetic` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .cross_entropy import check_targets, exp_stats, exp_to_grad, losses_from_stats
from .numerics import accumulate_dtype, apply, flat_tokens
from .softcap import softcap_, softcap_slope

WeightGradSink = Callable[[Tensor], None]


class LinearCrossEntropy(Protocol):
    """The signature of `linear_cross_entropy`, see there."""

    @overload
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        z_loss: float = 0.0,
        return_lse: Literal[False] = False,
        token_grad: float | None = None,
        grad_weight_out: WeightGradSink | None = None,
        chunk_tokens: int | None = None,
        softcap: float | None = None,
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        z_loss: float = 0.0,
        *,
        return_lse: Literal[True],
        token_grad: float | None = None,
        grad_weight_out: WeightGradSink | None = None,
        chunk_tokens: int | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]: ...


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    return_lse: bool = False,
    token_grad: float | None = None,
    grad_weight_out: WeightGradSink | None = None,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """cross_entropy(x @ weight.T, targets), see there for losses, ignored targets, z_loss and return_lse.

    x: [..., D], weight: [V, D], of one floating dtype, any strides. targets: [...] int64. Logits are formed and
    kept in promote_types(dtype, float32), so bf16 inputs lose nothing to rounded logits.
    token_grad: None computes each chunk's logits again in the backward pass. A number promises that the objective's
    derivative with respect to every loss is that number (say 1 / tokens): gradients are then formed while a chunk's
    logits exist, which saves one of four matrix products and holds [V, D] from forward to backward. A backward that
    breaks the promise by one common factor is put right; any other raises ValueError (on a GPU the device asserts).
    grad_weight_out: called once per backward with the weight's gradient [V, D] in promote_types(dtype, float32), the
    receiver's to keep and overwrite; autograd then sees no gradient for weight.
    chunk_tokens: tokens per chunk; None chooses from V alone.
    softcap: logits become softcap * tanh(logit / softcap), see softcap.py; None leaves them as they are.
    Returns losses [...] in promote_types(dtype, float32), or (losses, lse). Raises ValueError on shapes and targets.
    """
    return chunked(
        _REFERENCE,
        x,
        weight,
        targets,
        ignore_index,
        z_loss,
        return_lse,
        token_grad,
        grad_weight_out,
        chunk_tokens,
        softcap,
    )


class Chunk(Protocol):
    """What becomes of one chunk: fills losses [n] and lse [n], returns the gradient of its logits [n, V], or None if
    grad_losses [n] is None. The result is valid until the next call."""

    def __call__(
        self, x: Tensor, targets: Tensor, grad_losses: Tensor | None, losses: Tensor, lse: Tensor
    ) -> Tensor | None: ...


class Arithmetic(Protocol):
    """All that implementations differ in."""

    def factors(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, D] and weight [V, D] in the dtype in which they are multiplied."""

    def chunk(self, weight: Tensor, plan: Plan, n_tokens: int, wants_grad: bool) -> Chunk:
        """What works on chunks of at most n_tokens, with its buffers."""

    def add_product(self, total: Tensor, grad_logits: Tensor, x: Tensor, holds_sum: bool) -> None:
        """total (+)= grad_logits.T @ x, total [V, D] in the accumulation dtype."""


@dataclass(frozen=True)
class Plan:
    """What is the same for every chunk."""

    arithmetic: Arithmetic
    ignore_index: int
    z_loss: float
    chunk: int
    token_grad: float | None
    sink: WeightGradSink | None
    weight_grad: bool
    softcap: float | None


def chunked(
    arithmetic: Arithmetic,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    z_loss: float,
    return_lse: bool,
    token_grad: float | None,
    grad_weight_out: WeightGradSink | None,
    chunk_tokens: int | None,
    softcap: float | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`linear_cross_entropy` by any arithmetic."""
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.dtype != x.dtype:
        raise ValueError(
            f"linear_cross_entropy: weight is {weight.dtype} {tuple(weight.shape)}, "
            f"expected {x.dtype} [classes, {x.shape[-1]}] as x has"
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"linear_cross_entropy: chunk_tokens={chunk_tokens}, expected at least 1 or None")
    if token_grad == 0.0:
        raise ValueError("linear_cross_entropy: token_grad=0 promises no gradient at all; use torch.no_grad()")
    check_targets(targets, x.shape[:-1], weight.shape[0], ignore_index)
    wants_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    plan = Plan(
        arithmetic=arithmetic,
        ignore_index=ignore_index,
        z_loss=z_loss,
        chunk=chunk_tokens or default_chunk(weight.shape[0], x.device.type),
        token_grad=token_grad if wants_grad else None,
        sink=grad_weight_out,
        weight_grad=weight.requires_grad or grad_weight_out is not None,
        softcap=softcap,
    )
    # Without an edge to the weight, a backward split into inputs and weights runs this function once, not twice.
    edge = weight.detach() if grad_weight_out is not None and x.requires_grad else weight
    losses, lse = apply(_LinearCrossEntropy, x, edge, targets, plan)
    return (losses, lse) if return_lse else losses


def default_chunk(n_classes: int, device: str = "cpu") -> int:
    """Tokens per chunk: 4 Mi logits (16 MiB in float32), and enough rows to keep the matrix products efficient.

    On a GPU they are more: there adding each chunk's [V, D] to the weight's gradient should not count.
    """
    return max(128 if device == "cpu" else 2048, 2**22 // max(n_classes, 1))


class _Wide:
    """The reference: everything in the accumulation dtype."""

    def factors(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        wide = accumulate_dtype(x.dtype)
        return x.to(wide), weight.to(wide)

    def chunk(self, weight: Tensor, plan: Plan, n_tokens: int, wants_grad: bool) -> Chunk:
        return _WideChunk(weight, plan, n_tokens, wants_grad)

    def add_product(self, total: Tensor, grad_logits: Tensor, x: Tensor, holds_sum: bool) -> None:
        total.addmm_(grad_logits.t(), x, beta=int(holds_sum))


_REFERENCE = _Wide()


class _WideChunk:
    """One buffer: logits become their exponentials, and these their gradient."""

    def __init__(self, weight: Tensor, plan: Plan, n_tokens: int, wants_grad: bool) -> None:
        self._weight, self._plan = weight, plan
        self._buffer = weight.new_empty(n_tokens, weight.shape[0])
        self._slopes = torch.empty_like(self._buffer) if plan.softcap and wants_grad else None

    def __call__(
        self, x: Tensor, targets: Tensor, grad_losses: Tensor | None, losses: Tensor, lse: Tensor
    ) -> Tensor | None:
        plan, slopes = self._plan, None
        logits = torch.mm(x, self._weight.t(), out=self._buffer[: x.shape[0]])
        if plan.softcap:
            softcap_(logits, plan.softcap)
            if self._slopes is not None:
                slopes = softcap_slope(logits, plan.softcap, out=self._slopes[: x.shape[0]])
        maximum, sumexp, target_logit, exps = exp_stats(logits, targets, 0, out=logits)
        of_tokens = losses_from_stats(maximum, sumexp, target_logit, targets, plan.ignore_index, plan.z_loss)
        losses.copy_(of_tokens[0])
        lse.copy_(of_tokens[1])
        if grad_losses is None:
            return None
        factor = grad_losses * (1 + 2 * plan.z_loss * lse) / sumexp
        grad_logits = exp_to_grad(exps, factor, grad_losses, targets, 0, plan.ignore_index, out=exps)
        return grad_logits if slopes is None else grad_logits.mul_(slopes)


@dataclass(frozen=True)
class _Flat:
    """Inputs as matrices, as the arithmetic wants them: x [N, D], weight [V, D], targets [N]."""

    x: Tensor
    weight: Tensor
    targets: Tensor

    @staticmethod
    def of(x: Tensor, weight: Tensor, targets: Tensor, arithmetic: Arithmetic) -> _Flat:
        flat = x.reshape(flat_tokens(x.shape), x.shape[-1])
        return _Flat(*arithmetic.factors(flat, weight), targets.reshape(-1))


class _Gradients:
    """Gradients under construction: dx is written chunk by chunk, dweight summed in the order of the chunks."""

    def __init__(self, flat: _Flat, plan: Plan) -> None:
        self.x, self._arithmetic = torch.empty_like(flat.x), plan.arithmetic
        self.weight: Tensor | None = None
        if plan.weight_grad:
            new = flat.weight.new_empty if flat.x.shape[0] > 0 else flat.weight.new_zeros
            self.weight = new(flat.weight.shape, dtype=accumulate_dtype(flat.weight.dtype))

    def add(self, flat: _Flat, tokens: slice, grad_logits: Tensor) -> None:
        torch.mm(grad_logits, flat.weight, out=self.x[tokens])
        if self.weight is not None:
            self._arithmetic.add_product(self.weight, grad_logits, flat.x[tokens], tokens.start > 0)


def _sweep(flat: _Flat, plan: Plan, grad_losses: Tensor | None) -> tuple[Tensor, Tensor, _Gradients | None]:
    """One pass over the chunks: (losses, lse, gradients for grad_losses [N] or None)."""
    n_tokens, wide = flat.x.shape[0], accumulate_dtype(flat.x.dtype)
    losses, lse = (flat.x.new_empty(n_tokens, dtype=wide) for _ in range(2))
    gradients = _Gradients(flat, plan) if grad_losses is not None else None
    chunk = plan.arithmetic.chunk(flat.weight, plan, min(plan.chunk, n_tokens), gradients is not None)
    for start in range(0, n_tokens, plan.chunk):
        tokens = slice(start, min(start + plan.chunk, n_tokens))
        grad = None if grad_losses is None else grad_losses[tokens]
        grad_logits = chunk(flat.x[tokens], flat.targets[tokens], grad, losses[tokens], lse[tokens])
        if gradients is not None and grad_logits is not None:
            gradients.add(flat, tokens, grad_logits)
    return losses, lse, gradients


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        flat = _Flat.of(x, weight, targets, plan.arithmetic)
        promised = None
        if plan.token_grad is not None:
            promised = flat.x.new_full((1,), plan.token_grad, dtype=accumulate_dtype(x.dtype)).expand(flat.x.shape[0])
        losses, lse, gradients = _sweep(flat, plan, promised)
        if gradients is None:
            ctx.save_for_backward(x, weight, targets)
        else:
            ctx.save_for_backward(targets, gradients.x.to(x.dtype), gradients.weight)
        ctx.plan, ctx.shape, ctx.dtype = plan, x.shape, x.dtype
        lse = lse.reshape(targets.shape)
        ctx.mark_non_differentiable(lse)
        return losses.reshape(targets.shape), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        plan: Plan = ctx.plan
        grad_weight: Tensor | None
        if plan.token_grad is None:
            x, weight, targets = ctx.saved_tensors
            flat = _Flat.of(x, weight, targets, plan.arithmetic)
            gradients = _sweep(flat, plan, grad_losses.reshape(-1))[2]
            assert gradients is not None
            grad_x, grad_weight = gradients.x, gradients.weight
        else:
            targets, grad_x, grad_weight = ctx.saved_tensors
            ratio = _common_ratio(grad_losses, targets, plan)
            if isinstance(ratio, Tensor):
                # In place, as [V, D] twice would be much; a second backward pass is then refused by autograd.
                grad_x, grad_weight = grad_x.mul_(ratio), None if grad_weight is None else grad_weight.mul_(ratio)
            elif ratio != 1.0:
                grad_x = grad_x * ratio
                grad_weight = None if grad_weight is None else grad_weight * ratio
        if plan.sink is not None and grad_weight is not None:
            plan.sink(grad_weight)
            grad_weight = None
        return (
            grad_x.reshape(ctx.shape).to(ctx.dtype),
            None if grad_weight is None else grad_weight.to(ctx.dtype),
            None,
            None,
        )


def _common_ratio(grad_losses: Tensor, targets: Tensor, plan: Plan) -> float | Tensor:
    """By what the gradients formed ahead must be multiplied: the losses' actual gradient over the promised one."""
    if grad_losses.is_meta:
        return 1.0
    if grad_losses.device.type != "cpu" and grad_losses.numel() > 0:
        return _common_ratio_on_device(grad_losses, targets == plan.ignore_index, plan)
    actual = grad_losses[targets != plan.ignore_index]
    if actual.numel() == 0:
        return 1.0
    low, high = (float(v) for v in actual.aminmax())
    promised = float(torch.tensor(plan.token_grad, dtype=actual.dtype))
    if low == high and promised != 0.0:
        return low / promised
    raise ValueError(
        f"linear_cross_entropy: token_grad={plan.token_grad} promised one gradient for every loss, "
        f"but they reach from {low:g} to {high:g}; weight the losses before, or leave token_grad=None"
    )


def _common_ratio_on_device(grad_losses: Tensor, ignored: Tensor, plan: Plan) -> Tensor:
    """The same where looking means to wait: multiplying by 1 costs less, and a broken promise fails on the device."""
    assert plan.token_grad is not None
    low, high = grad_losses.masked_fill(ignored, math.inf).amin(), grad_losses.masked_fill(ignored, -math.inf).amax()
    torch._assert_async(low >= high, "linear_cross_entropy: token_grad promised one gradient for every loss")
    return torch.where(ignored.all(), 1.0, high / plan.token_grad)
