"""Scaling and copying lists of tensors by csrc/multi_copy.cu. Import after `library.load`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..cast_copy import check_cast_copy
from ..scale import check_scale
from .library import fake, raw_without_gradient, refuse
from .multi_tensor import mutated, number_and_tensor

_scale, _cast_copy = raw_without_gradient("scale"), raw_without_gradient("cast_copy")


def scale(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """See stoker.kernels.scale; the same bits. tensors: float32, bfloat16 and float16, mixed or not."""
    if not tensors:
        return check_scale(tensors, factor)
    try:
        number, tensor = number_and_tensor(factor, tensors)
        _scale(tensors, tensor, number)
    except RuntimeError as error:
        refuse("scale", error, lambda: check_scale(tensors, factor))
    mutated(tensors)


def cast_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """See stoker.kernels.cast_copy; the same bits. float32, bfloat16 and float16 into each other, mixed or not."""
    if not targets:
        return check_cast_copy(targets, sources)
    try:
        _cast_copy(targets, sources)
    except RuntimeError as error:
        refuse("cast_copy", error, lambda: check_cast_copy(targets, sources))
    mutated(targets)


@fake("scale")
def _(tensors: list[Tensor], factor: Tensor | None, number: float) -> None:
    return None


@fake("cast_copy")
def _(targets: list[Tensor], sources: list[Tensor]) -> None:
    return None
