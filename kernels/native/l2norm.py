"""The norm of a list of tensors by csrc/l2norm.cu: the op's signature over the raw op. Import after `library.load`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .library import fake, raw_without_gradient, refuse

_l2norm = raw_without_gradient("l2norm")


def l2norm(tensors: Sequence[Tensor], squared: bool = False) -> Tensor:
    """See stoker.kernels.l2norm. tensors: float32, bfloat16 and float16, mixed or not; the result is float32.

    float32 sums of at most 32 squares, float64 from there on.
    """
    if not tensors:
        return torch.zeros(())
    try:
        return _l2norm(tensors, squared)  # type: ignore[no-any-return]
    except RuntimeError as error:
        refuse("l2norm", error, lambda: None)


@fake("l2norm")
def _(tensors: list[Tensor], squared: bool) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float32)
