"""Numbers to float8 with one scale per tensor: signature and reference.

For layers of a plug-in: the trainer's own float8 layers (train/float8.py) quantise inside torchao. Does not multiply,
and has no gradient: what a product's backward pass is, is the product's to know.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

SMALLEST_AMAX = 1e-12  # what a tensor of zeros is scaled as
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class QuantizeFp8(Protocol):
    """The signature of `quantize_fp8`, see there."""

    def __call__(
        self, x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, transpose: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...


@torch.no_grad()
def quantize_fp8(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, transpose: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x * scale in float8, with scale = the largest number of the format / max(|x|, 1e-12) (Micikevicius et al. 2022,
    arXiv:2209.05433).

    This is the rule of torchao's "tensorwise" recipe (0.18, torchao/float8/float8_utils.py: tensor_to_scale and
    to_fp8_saturated), bit by bit: max |x| in float64, at least 1e-12; the quotient in float64, rounded once to float32;
    x in float32, times scale, cut off at the format's largest, rounded to the nearest even. torchao's "rowwise" recipe
    is another: one scale for each row that a product sums along, rounded down to a power of two.

    x: float32, bfloat16 or float16, any shape and strides. dtype: float8_e4m3fn (inputs, weights) or float8_e5m2
    (gradients). transpose: a second copy of x [R, C], laid out [C, R], as the other matrix products want it.
    Returns (values: x's shape, contiguous; scale: 0-dim float32, what x was multiplied by; the copy or None). One NaN
    in x makes all NaN; infinities become NaN, and the rest 0. Raises ValueError for other dtypes and shapes.
    """
    check_quantize_fp8(x, dtype, transpose)
    amax = x.abs().max().double() if x.numel() else torch.zeros((), dtype=torch.float64, device=x.device)
    largest = torch.finfo(dtype).max
    scale = (largest / amax.clamp(min=SMALLEST_AMAX)).float()
    values = (x.float() * scale).clamp_(-largest, largest).to(dtype).contiguous()
    return values, scale, values.t().contiguous() if transpose else None


def check_quantize_fp8(x: Tensor, dtype: torch.dtype, transpose: bool) -> None:
    """ValueError unless the arguments fit together."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"quantize_fp8: x is {x.dtype}, expected float32, bfloat16 or float16")
    if dtype not in DTYPES:
        raise ValueError(f"quantize_fp8: dtype={dtype}, expected {' or '.join(map(str, DTYPES))}")
    if transpose and x.dim() != 2:
        raise ValueError(f"quantize_fp8: x is {tuple(x.shape)}, expected [rows, columns] for a transposed copy")
