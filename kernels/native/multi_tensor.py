"""What the ops over lists of tensors share on the Python side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def number_and_tensor(factor: float | Tensor, beside: Sequence[Tensor]) -> tuple[float, Tensor | None]:
    """A factor as the raw ops take it: a number, or float32 on the tensors' device, which nobody waits for."""
    if not isinstance(factor, Tensor):
        return factor, None
    return 1.0, factor.to(beside[0].device, torch.float32, non_blocking=True)


def mutated(tensors: Sequence[Tensor]) -> None:
    """Have autograd know, so that a tensor that it has saved and a kernel has written to is an error."""
    if not torch.compiler.is_compiling():
        torch._C._increment_version(tensors)
