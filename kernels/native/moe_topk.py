"""Choice of experts by csrc/router.cu: the op's signature over the raw ops, and its gradient. Import after
`library.load`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..moe_topk import SMALLEST_SUM, check_moe_topk
from ..numerics import apply
from .library import fake, raw, refuse

_forward, _grad = raw("moe_topk"), raw("moe_topk_grad")


def moe_topk(
    scores: Tensor, k: int, bias: Tensor | None = None, normalize: bool = False, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """See stoker.kernels.moe_topk. scores: float32 on CUDA, at most 512 experts, of which at most 32 are chosen."""
    try:
        if torch.is_grad_enabled() and scores.requires_grad:
            chosen: tuple[Tensor, Tensor] = apply(_Topk, scores, k, bias, normalize, scale)
            return chosen
        return _forward(scores, k, bias, normalize, scale, SMALLEST_SUM)  # type: ignore[no-any-return]
    except RuntimeError as error:
        refuse("moe_topk", error, lambda: check_moe_topk(scores, k, bias))


class _Topk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, k: int, bias: Tensor | None, normalize: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        choice, weights = _forward(scores, k, bias, normalize, scale, SMALLEST_SUM)
        ctx.mark_non_differentiable(choice)
        ctx.save_for_backward(scores, choice)
        ctx.normalize, ctx.scale = normalize, scale
        return choice, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, grad_weights: Tensor) -> tuple[Tensor, None, None, None, None]:
        scores, choice = ctx.saved_tensors
        return _grad(grad_weights, scores, choice, ctx.normalize, ctx.scale, SMALLEST_SUM), None, None, None, None


@fake("moe_topk")
def _(
    scores: Tensor, k: int, bias: Tensor | None, normalize: bool, scale: float, smallest: float
) -> tuple[Tensor, Tensor]:
    shape = (scores.shape[0], k)
    return scores.new_empty(shape, dtype=torch.int64), scores.new_empty(shape)


@fake("moe_topk_grad")
def _(grad_weights: Tensor, scores: Tensor, choice: Tensor, normalize: bool, scale: float, smallest: float) -> Tensor:
    return scores.new_empty(scores.shape)
