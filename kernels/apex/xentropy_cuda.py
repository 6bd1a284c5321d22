"""Cross-entropy by apex's extension xentropy_cuda, called as apex.contrib.xentropy's SoftmaxCrossEntropyLoss does.

Owns: what the extension has not (z-loss, ignored targets whatever their logits, more than two dimensions) and is made
of what it returns. Signatures: github.com/NVIDIA/apex, apex/contrib/csrc/xentropy: interface.cpp, xentropy_kernel.cu.
Never run on hardware.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..cross_entropy import check_targets
from ..numerics import apply, flat_tokens

_xentropy: Any = importlib.import_module("xentropy_cuda")

NO_SMOOTHING = 0.0
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, z_loss: float = 0.0, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """See stoker.kernels.cross_entropy. The forward pass reads logits twice, and at large logits (thousands) the loss
    has fewer digits than the reference's. ValueError for float64, and for 2^32 logits or more, which apex's backward
    pass counts in 32 bits."""
    check_targets(targets, logits.shape[:-1], logits.shape[-1], ignore_index)
    if logits.dtype not in _DTYPES:
        raise ValueError(
            f"cross_entropy: logits is {logits.dtype}; apex has float32, bfloat16 and float16; "
            "choose kernels.cross_entropy=reference"
        )
    if logits.numel() >= 2**32:
        raise ValueError(
            f"cross_entropy: {logits.numel()} logits; apex counts them in 32 bits; choose kernels.cross_entropy=native"
        )
    losses, lse = apply(_CrossEntropy, logits, targets, ignore_index, z_loss)
    return (losses, lse) if return_lse else losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor]:
        flat, labels = logits.reshape(flat_tokens(logits.shape), logits.shape[-1]), targets.reshape(-1)
        ignored = labels == ignore_index
        # The kernels read the logit of every label, checked or not.
        labels = labels.masked_fill(ignored, 0)
        if labels.device.type != "cpu":
            text = "cross_entropy: a target is neither a class nor ignore_index"
            torch._assert_async(((labels >= 0) & (labels < flat.shape[1])).all(), text)
        if flat.numel() == 0:  # which apex refuses
            losses = lse = flat.new_zeros(labels.shape, dtype=torch.float32)
        else:
            losses, lse = _xentropy.forward(flat, labels, NO_SMOOTHING, flat.dtype != torch.float32)
        if z_loss != 0.0:
            losses = losses + z_loss * lse.square()
        losses = losses.masked_fill(ignored, 0.0)
        ctx.save_for_backward(flat, labels, ignored, lse)
        ctx.shape, ctx.z_loss = logits.shape, z_loss
        lse = lse.reshape(targets.shape)
        ctx.mark_non_differentiable(lse)
        return losses.reshape(targets.shape), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        flat, labels, ignored, lse = ctx.saved_tensors
        if flat.numel() == 0:
            return flat.new_zeros(ctx.shape), None, None, None
        grad = grad_losses.reshape(-1).masked_fill(ignored, 0.0)
        # Of probability - 1 at the target apex scales both by one factor; z-loss belongs to the first alone.
        factor = grad * (1 + 2 * ctx.z_loss * lse) if ctx.z_loss != 0.0 else grad
        grad_logits: Tensor = _xentropy.backward(factor.contiguous(), flat, lse, labels, NO_SMOOTHING)
        if ctx.z_loss != 0.0:
            grad_logits.scatter_add_(1, labels.unsqueeze(1), (factor - grad).to(flat.dtype).unsqueeze(1))
        # Not by the product with 0 alone: logits of ignored tokens may be infinite.
        grad_logits.masked_fill_(ignored.unsqueeze(1), 0.0)
        return grad_logits.reshape(ctx.shape), None, None, None
