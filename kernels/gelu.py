"""GELU, the activation of a feed-forward layer without a gate: signature and reference."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from .numerics import accumulate_dtype


class Gelu(Protocol):
    """The signature of `gelu`, see there."""

    def __call__(self, x: Tensor) -> Tensor: ...


def gelu(x: Tensor) -> Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), GPT-2's form of GELU (Hendrycks and Gimpel 2016,
    arXiv:1606.08415, section 2).

    x: any shape, floating dtype and strides. Returns that shape and dtype, rounded once.
    """
    return F.gelu(x.to(accumulate_dtype(x.dtype)), approximate="tanh").to(x.dtype)
