"""Many tensors copied into others of the same shapes, whatever their dtypes: signature and reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class CastCopy(Protocol):
    """The signature of `cast_copy`, see there."""

    def __call__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None: ...


def cast_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """targets[i] = sources[i], rounded to the nearest where the target is narrower.

    Any number, shapes, floating dtypes and strides, on one device; no target overlaps another tensor. Not
    differentiable. Raises ValueError when lists or shapes differ.
    """
    check_cast_copy(targets, sources)
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))


def check_cast_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Raises ValueError, see `cast_copy`."""
    if len(targets) != len(sources):
        raise ValueError(f"cast_copy: {len(sources)} sources for {len(targets)} targets")
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if target.shape != source.shape:
            raise ValueError(f"cast_copy: at {i} {tuple(source.shape)} into {tuple(target.shape)}")
