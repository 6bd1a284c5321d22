"""Rotary embedding by csrc/rope.cu: the op over the raw ops, and its gradients. Import after `library.load`.

Where a gradient is asked for, nothing is turned in place. It would save no traffic, only memory for a moment; autograd
would copy the gradients of views whole, and what is made again in a backward pass would be known by a storage that
holds something else by then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..numerics import apply
from ..rope import check_rope, rope_cos_sin
from .library import fake, raw, refuse

_rope, _rope_in_place = raw("rope"), raw("rope_")


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    scale: float = 1.0,
    interleaved: bool = False,
    cos_sin: tuple[Tensor, Tensor] | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """See stoker.kernels.rope. q, k: one of float32, bfloat16, float16 on CUDA; read where they lie if features are
    side by side. cos_sin: float32. inplace: features lie side by side."""
    try:
        cos, sin = rope_cos_sin(positions, inv_freq, scale, q.dtype) if cos_sin is None else cos_sin
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            both: tuple[Tensor, Tensor] = apply(_Rope, q, k, cos, sin, interleaved)
            return both
        if inplace:
            _rope_in_place(q, k, cos, sin, interleaved, 1)
            return q, k
        return _rope(q, k, cos, sin, interleaved, 1)  # type: ignore[no-any-return]
    except RuntimeError as error:
        refuse("rope", error, lambda: check_rope(q, k, positions, inv_freq, cos_sin))


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rope(q, k, cos, sin, interleaved, 1)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return (*_rope(grad_q, grad_k, cos, sin, ctx.interleaved, -1), None, None, None)


@fake("rope")
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@fake("rope_")
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> None:
    return None
