"""A stand-in for apex's extension fused_weight_gradient_mlp_cuda, on any device: signatures and arithmetic.

Rebuilt from the public source (github.com/NVIDIA/apex, csrc/megatron: fused_weight_gradient_dense.cpp,
fused_weight_gradient_dense_cuda.cu, fused_weight_gradient_dense_16bit_prec_cuda.cu). NOT apex: it shows that our calls
are what that source accepts. What the source takes on trust is asserted here.
"""

from __future__ import annotations

import torch
from torch import Tensor

calls: list[str] = []
"""Names of the functions that were called."""
HALF = (torch.bfloat16, torch.float16)


def _add(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    assert input.is_contiguous()
    assert d_output.is_contiguous()
    assert d_weight.is_contiguous()
    assert input.dim() == d_output.dim() == d_weight.dim() == 2
    assert input.shape[0] == d_output.shape[0]
    assert d_weight.shape == (d_output.shape[1], input.shape[1])
    assert min(*input.shape, *d_output.shape) > 0, "CUBLAS_STATUS_INVALID_VALUE"
    assert input.dtype == d_output.dtype
    d_weight.copy_(d_weight.float() + d_output.float().t() @ input.float())


def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    calls.append("fp32")
    assert d_weight.dtype == torch.float32
    assert input.dtype in (torch.float32, *HALF)
    _add(input, d_output, d_weight)


def wgrad_gemm_accum_fp16(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    calls.append("fp16")
    assert d_weight.dtype == input.dtype
    assert input.dtype in HALF
    _add(input, d_output, d_weight)
