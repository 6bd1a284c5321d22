"""A stand-in for apex's extension fused_rotary_positional_embedding, on any device: signatures, checks and roundings.

Rebuilt from the public source (github.com/NVIDIA/apex, csrc/megatron/fused_rotary_positional_embedding.cpp, .h and
_cuda.cu). NOT apex: it shows that our calls are what that source accepts, not that apex's kernels do what they should.
"""

from __future__ import annotations

import torch
from torch import Tensor

calls: list[tuple[str, tuple[int, ...], int]] = []
"""(function, shape of the tensor that is turned, its address) of every call."""


def forward_cached(input: Tensor, cos: Tensor, sin: Tensor, transpose_output: bool, /) -> Tensor:
    return _turned("forward_cached", input, cos, sin, transpose_output, 1)


def backward_cached(output_grads: Tensor, cos: Tensor, sin: Tensor, transpose_output: bool, /) -> Tensor:
    return _turned("backward_cached", output_grads, cos, sin, transpose_output, -1)


def _turned(name: str, x: Tensor, cos: Tensor, sin: Tensor, transpose_output: bool, sign: int) -> Tensor:
    """x: [s, b, h, d]; cos, sin: [s, 1, 1, d2]."""
    calls.append((name, tuple(x.shape), x.data_ptr()))
    assert type(transpose_output) is bool
    assert x.dim() == cos.dim() == sin.dim() == 4, "expected 4D tensor"
    assert x.size(0) == cos.size(0) == sin.size(0), "expected input and cos tensor have the same sequence length"
    assert cos.shape[1:3] == sin.shape[1:3] == (1, 1), "expected the second and third dims equal 1"
    assert cos.size(3) == sin.size(3) <= x.size(3), "expected the last dim equals or is greater"
    assert cos.dtype == sin.dtype
    assert (x.dtype, cos.dtype) in [(d, torch.float32) for d in (torch.float32, torch.float16, torch.bfloat16)]
    # Not checked there, but read as if it were so; a grid without blocks is CUDA's error.
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert x.numel() > 0
    width = cos.size(3)
    half = width // 2
    # Cosines and sines become the input's dtype, in which products and sums are rounded too.
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    other = torch.cat((x[..., half:width], x[..., :half]), -1)
    if sign > 0:
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
    else:
        signed = torch.cat((sin[..., half:], -sin[..., :half]), -1)
    out = torch.cat((x[..., :width] * cos + other * signed, x[..., width:]), -1)
    return out.transpose(0, 1).contiguous().transpose(0, 1) if transpose_output else out.contiguous()
