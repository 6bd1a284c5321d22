"""Gradients of weights by apex's extension fused_weight_gradient_mlp_cuda, called as apex.transformer's
LinearWithGradAccumulationAndAsyncCommunication does.

Owns: all that the extension takes on trust: contiguous tensors, sizes that an int holds, some element. It always adds.
Signatures: github.com/NVIDIA/apex, csrc/megatron: fused_weight_gradient_dense.cpp, fused_weight_gradient_dense_cuda.cu,
fused_weight_gradient_dense_16bit_prec_cuda.cu. Never run on hardware.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ..weight_gradient import check_weight_gradient

_wgrad: Any = importlib.import_module("fused_weight_gradient_mlp_cuda")

_HALF = (torch.bfloat16, torch.float16)


def weight_gradient(total: Tensor, grad_output: Tensor, x: Tensor, holds_sum: bool) -> None:
    """See stoker.kernels.weight_gradient. The products of half-precision factors reach a float32 sum unrounded.
    ValueError for other dtypes than float32 sums and sums of the factors' own half precision, and for 2^31 rows or
    columns or more, which apex counts in 32 bits."""
    check_weight_gradient(total, grad_output, x)
    is_wide = total.dtype == torch.float32 and x.dtype in (torch.float32, *_HALF)
    if not is_wide and not (total.dtype == x.dtype and x.dtype in _HALF):
        raise ValueError(
            f"weight_gradient: {x.dtype} added to {total.dtype}; apex adds float32, bfloat16 and float16 to float32, "
            "and each of the last two to its own; choose kernels.weight_gradient=reference"
        )
    if max(*total.shape, x.shape[0]) >= 2**31:
        raise ValueError(
            f"weight_gradient: {tuple(total.shape)} of {x.shape[0]} tokens; apex counts each in 32 bits; "
            "choose kernels.weight_gradient=reference"
        )
    if not holds_sum:
        total.zero_()
    if total.numel() == 0 or x.shape[0] == 0:  # cuBLAS refuses rows of no length
        return
    add = _wgrad.wgrad_gemm_accum_fp32 if is_wide else _wgrad.wgrad_gemm_accum_fp16
    target = total.contiguous()
    with torch.cuda.device_of(total):  # the extension takes whichever is current
        add(x.contiguous(), grad_output.contiguous(), target)
    if target is not total:
        total.copy_(target)
