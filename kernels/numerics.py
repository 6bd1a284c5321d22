"""What every reference shares: the accumulation dtype, a typed `apply`, what a `forward` returns, number of tokens.

Owns no operation. Each op's own file holds its signature, its docstring and its reference.
"""

from __future__ import annotations

from typing import Any

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are held in: float32 for anything narrower, float64 stays float64."""
    return torch.promote_types(dtype, torch.float32)


def apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply(*args)`, which torch leaves untyped on a named subclass."""
    return function.apply(*args)


def distinct(result: torch.Tensor) -> torch.Tensor:
    """What an autograd.Function's `forward` returns where `result` may be a tensor with more names than one: written in
    place, or passed through a `.to` that had nothing to do.

    Compiled by torch 2.11, such an output gets no gradient, silently: its tracer knows an output by the tensor, and
    finds the name that is none of the function's outputs. A view is a tensor of its own. Not compiled, `result`.
    """
    return result.view_as(result) if torch.compiler.is_compiling() else result


def flat_tokens(shape: torch.Size) -> int:
    """Number of tokens of a tensor whose last dimension is the feature (an explicit count: -1 fails when it is 0)."""
    return shape[:-1].numel()
