"""Rotary embedding by apex's extension fused_rotary_positional_embedding, in its form for tables of cosines and sines.

Owns: how our op is put to it (every token a sequence position of one row, so that rows may have different positions),
and what it has not. Signatures: github.com/NVIDIA/apex, csrc/megatron/fused_rotary_positional_embedding.cpp and
fused_rotary_positional_embedding_cuda.cu. Never run on hardware.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..numerics import apply
from ..rope import check_rope, rope_cos_sin

_extension: Any = importlib.import_module("fused_rotary_positional_embedding")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LIMIT = 2**31  # its offsets are of C's type int


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
    """See stoker.kernels.rope. float32, bfloat16 or float16 on CUDA, halves only, less than 2^31 elements. Cosines,
    sines, products and sums are each rounded to the dtype of q and k, which is coarser than the reference in half
    precision. Raises ValueError for the rest.
    """
    check_rope(q, k, positions, inv_freq, cos_sin)
    if interleaved:
        raise ValueError("rope: apex pairs halves only; choose kernels.rope=native or reference for interleaved pairs")
    for name, x in (("q", q), ("k", k)):
        if x.dtype not in _DTYPES:
            text = f"rope: {name} is {x.dtype}, apex takes float32, bfloat16 or float16"
            raise ValueError(f"{text}; choose kernels.rope=reference")
        if max(_span(x), x.numel()) >= _LIMIT:
            text = f"rope: {name} {tuple(x.shape)} with strides {x.stride()} reaches past 2^31 elements"
            raise ValueError(f"{text}, apex does not; choose kernels.rope=native")
    cos, sin = rope_cos_sin(positions, inv_freq, scale, q.dtype) if cos_sin is None else cos_sin
    rotated: tuple[Tensor, Tensor] = apply(_Rope, q, k, _table(cos), _table(sin))
    return rotated


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(_extension.forward_cached, q, cos, sin), _rotate(_extension.forward_cached, k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        rotated = [_rotate(_extension.backward_cached, grad, cos, sin) for grad in (grad_q, grad_k)]
        return rotated[0], rotated[1], None, None


def _rotate(kernel: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, S, N, D]; what it calls [s, b, h, d] is [B S, 1, N, D]: no copy where rows follow one another."""
    if x.numel() == 0:
        return torch.empty_like(x)
    rotated: Tensor = kernel(x.reshape(-1, 1, *x.shape[2:]), cos, sin, False)
    return rotated.view(x.shape)


def _table(half: Tensor) -> Tensor:
    """[B, S, R / 2] for pairs to [B S, 1, 1, R] for features, contiguous."""
    return torch.cat((half, half), -1).view(half.shape[0] * half.shape[1], 1, 1, 2 * half.shape[2])


def _span(x: Tensor) -> int:
    """Elements from the first to the last."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
