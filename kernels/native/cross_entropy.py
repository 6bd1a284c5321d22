"""Cross-entropy by csrc/cross_entropy.cu: the ops' signatures over the raw ops. Import after `library.load`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..cross_entropy import check_targets
from ..numerics import accumulate_dtype, apply
from .library import fake, raw, refuse

_forward, _stats = raw("cross_entropy"), raw("cross_entropy_stats")
_grad, _grad_in_place = raw("cross_entropy_grad"), raw("cross_entropy_grad_")


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, z_loss: float = 0.0, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """See stoker.kernels.cross_entropy. logits: float32, bfloat16 or float16 on CUDA; rows that are dense and evenly
    spaced are read where they lie. A target that is no class fails an assertion on the device."""
    losses: Tensor
    try:
        if torch.is_grad_enabled() and logits.requires_grad:
            losses, lse = apply(_CrossEntropy, logits, targets, ignore_index, z_loss)
        else:
            losses, lse, _, _ = _forward(logits, targets, ignore_index, z_loss)
    except RuntimeError as error:
        refuse(
            "cross_entropy", error, lambda: check_targets(targets, logits.shape[:-1], logits.shape[-1], ignore_index)
        )
    return (losses, lse) if return_lse else losses


def cross_entropy_stats(logits: Tensor, targets: Tensor, vocab_start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """See stoker.kernels.cross_entropy."""
    try:
        return _stats(logits, targets, vocab_start)  # type: ignore[no-any-return]
    except RuntimeError as error:
        refuse("cross_entropy_stats", error, lambda: None)


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
    """See stoker.kernels.cross_entropy. lse, grad_losses: float32."""
    try:
        if in_place:
            _grad_in_place(logits, targets, lse, grad_losses, vocab_start, ignore_index, z_loss)
            return logits
        grad: Tensor = _grad(logits, targets, lse, grad_losses, None, None, vocab_start, ignore_index, z_loss)
        return grad
    except RuntimeError as error:
        refuse("cross_entropy_grad", error, lambda: None)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor]:
        losses, lse, maximum, sumexp = _forward(logits, targets, ignore_index, z_loss)
        ctx.save_for_backward(logits, targets, lse, maximum, sumexp)
        ctx.ignore_index, ctx.z_loss = ignore_index, z_loss
        ctx.mark_non_differentiable(lse)
        return losses, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, lse, maximum, sumexp = ctx.saved_tensors
        grad = _grad(logits, targets, lse, grad_losses, maximum, sumexp, 0, ctx.ignore_index, ctx.z_loss)
        return grad, None, None, None


@fake("cross_entropy")
def _(logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _per_row(logits), _per_row(logits), _per_row(logits), _per_row(logits)


@fake("cross_entropy_stats")
def _(logits: Tensor, targets: Tensor, vocab_start: int) -> tuple[Tensor, Tensor, Tensor]:
    return _per_row(logits), _per_row(logits), _per_row(logits)


@fake("cross_entropy_grad")
def _(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad_losses: Tensor,
    maximum: Tensor | None,
    sumexp: Tensor | None,
    vocab_start: int,
    ignore_index: int,
    z_loss: float,
) -> Tensor:
    return logits.new_empty(logits.shape)


@fake("cross_entropy_grad_")
def _(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad_losses: Tensor,
    vocab_start: int,
    ignore_index: int,
    z_loss: float,
) -> None:
    return None


def _per_row(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=accumulate_dtype(logits.dtype))
