"""Numbers to float8 by csrc/fp8.cu: the op's signature over the raw ops. Import after `library.load`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantize_fp8 import SMALLEST_AMAX, check_quantize_fp8
from .library import fake, raw, refuse

_plain, _transposed = raw("quantize_fp8"), raw("quantize_fp8_transposed")


def quantize_fp8(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, transpose: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See stoker.kernels.quantize_fp8. x: on CUDA; conversions are fast from compute capability 8.9 on."""
    is_wide = dtype is torch.float8_e5m2
    try:
        if not is_wide and dtype is not torch.float8_e4m3fn:
            check_quantize_fp8(x, dtype, transpose)
        if transpose:
            return _transposed(x, is_wide, SMALLEST_AMAX)  # type: ignore[no-any-return]
        values, scale = _plain(x, is_wide, SMALLEST_AMAX)
        return values, scale, None
    except RuntimeError as error:
        refuse("quantize_fp8", error, lambda: check_quantize_fp8(x, dtype, transpose))


@fake("quantize_fp8")
def _(x: Tensor, is_wide: bool, smallest: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=_dtype(is_wide)), x.new_empty((), dtype=torch.float32)


@fake("quantize_fp8_transposed")
def _(x: Tensor, is_wide: bool, smallest: float) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _dtype(is_wide)
    turned = x.new_empty((x.shape[1], x.shape[0]), dtype=dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((), dtype=torch.float32), turned


def _dtype(is_wide: bool) -> torch.dtype:
    return torch.float8_e5m2 if is_wide else torch.float8_e4m3fn
