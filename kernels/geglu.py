"""The gate of a GeGLU feed-forward layer: signature and reference. The two projections are the caller's."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from .numerics import accumulate_dtype


class GeGlu(Protocol):
    """The signature of `geglu`, see there."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor: ...


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up (Shazeer 2020, arXiv:2002.05202), with the tanh form of GELU that Gemma uses.

    gate, up: of one shape and floating dtype, any strides. Returns that shape and dtype, rounded once.
    Raises ValueError when shapes or dtypes differ.
    """
    check_geglu(gate, up)
    return (F.gelu(gate.to(accumulate_dtype(gate.dtype)), approximate="tanh") * up).to(gate.dtype)


def check_geglu(gate: Tensor, up: Tensor) -> None:
    """ValueError when shapes or dtypes differ."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"geglu: gate is {gate.dtype} {tuple(gate.shape)}, up is {up.dtype} {tuple(up.shape)}; both must be alike"
        )
