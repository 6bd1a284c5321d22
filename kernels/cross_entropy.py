"""Cross-entropy per token, whole or in the pieces a vocabulary shard needs: signatures and references.

Owns the mathematics of loss, z-loss and ignored targets, which `linear_cross_entropy` uses too. Reduces nothing
over tokens or ranks: losses are per token, the caller sums.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .numerics import accumulate_dtype, apply, flat_tokens


class CrossEntropy(Protocol):
    """The signature of `cross_entropy`, see there."""

    @overload
    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        z_loss: float = 0.0,
        return_lse: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        z_loss: float = 0.0,
        *,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...


class CrossEntropyStats(Protocol):
    """The signature of `cross_entropy_stats`, see there."""

    def __call__(self, logits: Tensor, targets: Tensor, vocab_start: int = 0) -> tuple[Tensor, Tensor, Tensor]: ...


class CrossEntropyGrad(Protocol):
    """The signature of `cross_entropy_grad`, see there."""

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        lse: Tensor,
        grad_losses: Tensor,
        vocab_start: int = 0,
        ignore_index: int = -100,
        z_loss: float = 0.0,
        in_place: bool = False,
    ) -> Tensor: ...


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, z_loss: float = 0.0, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """losses = lse - logits[target] + z_loss * lse^2, with lse the log-sum-exp of a token's logits.

    logits: [..., V], any floating dtype and strides. targets: [...] int64; where they equal ignore_index the loss
    and the gradient are exactly 0, whatever the logits are. z_loss: coefficient of lse^2 (PaLM, arXiv:2204.02311).
    Returns losses: [...] in promote_types(dtype, float32); with return_lse (losses, lse), lse detached, so that a
    caller can tell the two parts of the loss apart.
    Raises ValueError for a target that is no class (checked on the CPU; on a GPU the kernel asserts).
    """
    check_targets(targets, logits.shape[:-1], logits.shape[-1], ignore_index)
    losses, lse = apply(_CrossEntropy, logits, targets, ignore_index, z_loss)
    return (losses, lse) if return_lse else losses


def cross_entropy_stats(logits: Tensor, targets: Tensor, vocab_start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """What one vocabulary shard knows: its largest logit, its sum of exponentials, its logit of the target.

    logits: [..., V_local], classes vocab_start .. vocab_start + V_local. targets: [...] int64, global class numbers.
    Returns (maximum, sumexp, target_logit), each [...] in promote_types(dtype, float32): sumexp is relative to this
    maximum; target_logit is 0 where the target lies elsewhere. Not differentiable. To combine, with `all` over ranks:
    M = all_max(maximum), S = all_sum(sumexp * exp(maximum - M)), T = all_sum(target_logit), then `losses_from_stats`.
    """
    with torch.no_grad():
        wide = logits.reshape(flat_tokens(logits.shape), logits.shape[-1]).to(accumulate_dtype(logits.dtype))
        maximum, sumexp, target_logit, _ = exp_stats(wide, targets.reshape(-1), vocab_start)
    shape = logits.shape[:-1]
    return maximum.reshape(shape), sumexp.reshape(shape), target_logit.reshape(shape)


def cross_entropy_grad(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad_losses: Tensor,
    vocab_start: int = 0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    in_place: bool = False,
) -> Tensor:
    """The gradient of sum(grad_losses * losses) with respect to one vocabulary shard's logits.

    logits, targets, vocab_start: as for `cross_entropy_stats`. lse: [...], over the whole vocabulary.
    grad_losses: [...]. in_place: write it over the logits, which are then returned.
    Returns [..., V_local] in the logits' dtype; exactly 0 for ignored targets.
    """
    with torch.no_grad():
        wide = logits.reshape(flat_tokens(logits.shape), logits.shape[-1]).to(accumulate_dtype(logits.dtype))
        flat_lse = lse.reshape(-1).to(wide.dtype)
        probabilities = torch.sub(wide, flat_lse.unsqueeze(-1)).exp_()
        flat_grad = grad_losses.reshape(-1).to(wide.dtype)
        factor = flat_grad * (1 + 2 * z_loss * flat_lse)
        exp_to_grad(probabilities, factor, flat_grad, targets.reshape(-1), vocab_start, ignore_index, out=probabilities)
        grad = probabilities.reshape(logits.shape)
        return logits.copy_(grad) if in_place else grad.to(logits.dtype)


def losses_from_stats(
    maximum: Tensor,
    sumexp: Tensor,
    target_logit: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(losses, lse) per token from statistics of the whole vocabulary; all arguments and results of one shape."""
    log_sum = sumexp.log()
    lse = maximum + log_sum
    # Not lse - target_logit: at large logits that difference has lost the digits of log_sum.
    losses = (maximum - target_logit).add_(log_sum)
    if z_loss != 0.0:
        losses = losses + z_loss * lse.square()
    return losses.masked_fill(targets == ignore_index, 0.0), lse


def check_targets(targets: Tensor, tokens: torch.Size, n_classes: int, ignore_index: int) -> None:
    """ValueError unless targets is int64 of shape `tokens` and, where it is cheap to look, every value is a class."""
    if targets.dtype != torch.int64 or targets.shape != tokens:
        raise ValueError(
            f"cross_entropy: targets is {targets.dtype} {tuple(targets.shape)}, expected int64 {tuple(tokens)}"
        )
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad = ((targets < 0) | (targets >= n_classes)) & (targets != ignore_index)
    if bool(bad.any()):
        raise ValueError(
            f"cross_entropy: target {int(targets[bad][0])} is neither a class (0 to {n_classes - 1}) nor "
            f"ignore_index={ignore_index}; does the tokenizer match the model's vocabulary?"
        )


def exp_stats(
    logits: Tensor, targets: Tensor, vocab_start: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(maximum, sumexp, target_logit, exp(logits - maximum)); the last goes to `out` if given, which may be `logits`.

    logits: [N, V_local] in an accumulation dtype. targets: [N], global classes; those of other shards give 0.
    """
    mine, index = _local_targets(targets, vocab_start, logits.shape[-1])
    target_logit = logits.gather(1, index.unsqueeze(-1)).squeeze(-1).masked_fill_(~mine, 0.0)
    maximum = logits.amax(-1)
    exps = torch.sub(logits, maximum.unsqueeze(-1), out=out).exp_()
    return maximum, exps.sum(-1), target_logit, exps


def exp_to_grad(
    exps: Tensor,
    factor: Tensor,
    grad_losses: Tensor,
    targets: Tensor,
    vocab_start: int,
    ignore_index: int,
    out: Tensor | None = None,
) -> Tensor:
    """The logits' gradient from exponentials [N, V_local]: row * factor, minus grad_losses at the target.

    out: where to put it, may be `exps`; None allocates.
    """
    mine, index = _local_targets(targets, vocab_start, exps.shape[-1])
    grad = torch.mul(exps, factor.unsqueeze(-1), out=out)
    grad.scatter_add_(1, index.unsqueeze(-1), grad_losses.masked_fill(~mine, 0.0).neg_().unsqueeze(-1))
    # Not by a product with 0: logits of ignored tokens may be infinite.
    ignored = targets == ignore_index
    if grad.device.type == "cpu":
        return grad.index_fill_(0, ignored.nonzero().squeeze(-1), 0.0)  # costs nothing where there are none
    return grad.masked_fill_(ignored.unsqueeze(-1), 0.0)  # to find the rows would be to wait for the device


def _local_targets(targets: Tensor, vocab_start: int, n_local: int) -> tuple[Tensor, Tensor]:
    local = targets - vocab_start
    mine = (local >= 0) & (local < n_local)
    return mine, local.masked_fill(~mine, 0)


class _CrossEntropy(torch.autograd.Function):
    """By hand: one exponential per logit for both directions, 0.75 of the time of torch's own on a CPU."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor]:
        flat = logits.reshape(flat_tokens(logits.shape), logits.shape[-1])
        wide = flat.to(accumulate_dtype(logits.dtype))
        flat_targets = targets.reshape(-1)
        maximum, sumexp, target_logit, exps = exp_stats(wide, flat_targets, 0)
        losses, lse = losses_from_stats(maximum, sumexp, target_logit, flat_targets, ignore_index, z_loss)
        ctx.save_for_backward(exps, sumexp, lse, flat_targets)
        ctx.options = (logits.shape, logits.dtype, ignore_index, z_loss)
        lse = lse.reshape(targets.shape)
        ctx.mark_non_differentiable(lse)
        return losses.reshape(targets.shape), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        exps, sumexp, lse, targets = ctx.saved_tensors
        shape, dtype, ignore_index, z_loss = ctx.options
        grad = grad_losses.reshape(-1).to(exps.dtype)
        factor = grad * (1 + 2 * z_loss * lse) / sumexp
        grad_logits = exp_to_grad(exps, factor, grad, targets, 0, ignore_index)
        return grad_logits.reshape(shape).to(dtype), None, None, None
