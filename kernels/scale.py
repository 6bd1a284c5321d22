"""Many tensors times one factor, in place: signature and reference. Computes no factor: clipping is the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .numerics import accumulate_dtype


class Scale(Protocol):
    """The signature of `scale`, see there."""

    def __call__(self, tensors: Sequence[Tensor], factor: float | Tensor) -> None: ...


def scale(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Each element becomes element * factor, the factor in promote_types(dtype, float32), the product rounded once.

    tensors: any number, shapes, floating dtypes and strides, on one device. factor: a float, or a tensor of one element
    that is not waited for. Not differentiable. Raises ValueError for a factor of more elements or integer tensors.
    """
    check_scale(tensors, factor)
    with torch.no_grad():
        for tensor in tensors:
            wide = accumulate_dtype(tensor.dtype)
            by = factor.to(tensor.device, wide).view(()) if isinstance(factor, Tensor) else factor
            if wide == tensor.dtype:
                tensor.mul_(by)
            else:
                tensor.copy_(tensor.to(wide).mul_(by))


def check_scale(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Raises ValueError, see `scale`."""
    if isinstance(factor, Tensor) and factor.numel() != 1:
        raise ValueError(f"scale: factor has shape {tuple(factor.shape)}, expected one element")
    for i, tensor in enumerate(tensors):
        if not tensor.is_floating_point():
            raise ValueError(f"scale: tensors[{i}] is {tensor.dtype}, expected a floating dtype")
