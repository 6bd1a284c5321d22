"""The norm of a list of tensors, taken together: signature and reference. Reduces over no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .numerics import accumulate_dtype

ROW = 256
"""Elements summed in float32 before float64 takes over: torch.norm of two million is off by 3e-5."""


class L2Norm(Protocol):
    """The signature of `l2norm`, see there."""

    def __call__(self, tensors: Sequence[Tensor], squared: bool = False) -> Tensor: ...


def l2norm(tensors: Sequence[Tensor], squared: bool = False) -> Tensor:
    """sqrt(sum of squares of all elements of all tensors); with squared the sum itself, which ranks can add up.

    tensors: any number, shapes, floating dtypes and strides, on one device. Returns a 0-dim tensor on that device (an
    empty list: the CPU) in promote_types of all dtypes and float32; not differentiable, nothing is waited for.
    NaN and infinity come through.
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if not tensors:
        return torch.zeros((), dtype=dtype)
    with torch.no_grad():
        total = torch.stack([part for tensor in tensors for part in _sums_of_squares(tensor)]).sum()
        return (total if squared else total.sqrt()).to(dtype)


def _sums_of_squares(tensor: Tensor) -> list[Tensor]:
    """float64 sums of squares of the full rows of `ROW` elements and of the rest."""
    flat = tensor.reshape(-1)
    whole = flat.numel() // ROW * ROW
    wide = accumulate_dtype(tensor.dtype)
    parts = [flat[:whole].view(-1, ROW)] if whole else []
    if whole < flat.numel() or not whole:
        parts.append(flat[whole:].unsqueeze(0))
    return [torch.linalg.vector_norm(p, dim=1, dtype=wide).to(torch.float64).square().sum() for p in parts]
