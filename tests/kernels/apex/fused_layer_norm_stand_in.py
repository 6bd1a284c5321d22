"""A stand-in for apex's fused_layer_norm_cuda, on any device: its functions' signatures, checks and arithmetic.

Rebuilt from the public source (github.com/NVIDIA/apex: csrc/layer_norm_cuda.cpp, csrc/layer_norm_cuda_kernel.cu, and
apex/normalization/fused_layer_norm.py, which calls it). NOT apex: it shows that our calls are what that source accepts,
not that apex's kernels do what they should.
"""

from __future__ import annotations

import torch
from torch import Tensor

calls: list[str] = []
"""Names of the functions that were called."""


def _check(shape: list[int], dense: list[Tensor], *params: Tensor) -> None:
    """CHECK_INPUT and check_args, and pybind's of the arguments' types."""
    assert type(shape) is list
    assert all(t.is_contiguous() for t in (*dense, *params)), "must be contiguous"
    assert all(list(p.shape) == shape for p in params)
    assert list(dense[0].shape[-len(shape) :]) == shape
    assert dense[0].numel() > 0, "a launch of no blocks"


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: torch.dtype) -> list[Tensor]:
    """[y, mean, invvar] or, without bias, [y, invvar]. The normed value is rounded to weight's dtype first."""
    assert type(eps) is float
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(wide).reshape(-1, weight.numel())
    mean = rows.mean(1) if bias is not None else torch.zeros(len(rows), dtype=wide)
    centred = rows - mean[:, None]
    invvar = (centred.square().mean(1) + eps).rsqrt()
    y = weight * (centred * invvar[:, None]).to(weight.dtype)
    y = y if bias is None else y + bias
    assert y.dtype == out, "weight in another dtype is for the mixed form"
    return [y.view(x.shape), *([mean] if bias is not None else []), invvar]


def forward_affine(input: Tensor, normalized_shape: list[int], gamma: Tensor, beta: Tensor, eps: float) -> list[Tensor]:
    calls.append("forward_affine")
    _check(normalized_shape, [input], gamma, beta)
    return _forward(input, gamma, beta, eps, input.dtype)


def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: list[int], gamma: Tensor, beta: Tensor, eps: float
) -> list[Tensor]:
    calls.append("forward_affine_mixed_dtypes")
    _check(normalized_shape, [input], gamma, beta)
    assert beta.dtype == gamma.dtype, "read as gamma's"
    return _forward(input, gamma, beta, eps, gamma.dtype)


def rms_forward_affine(input: Tensor, normalized_shape: list[int], gamma: Tensor, eps: float) -> list[Tensor]:
    calls.append("rms_forward_affine")
    _check(normalized_shape, [input], gamma)
    return _forward(input, gamma, None, eps, input.dtype)


def rms_forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: list[int], gamma: Tensor, eps: float
) -> list[Tensor]:
    calls.append("rms_forward_affine_mixed_dtypes")
    _check(normalized_shape, [input], gamma)
    return _forward(input, gamma, None, eps, gamma.dtype)


def _backward(dout: Tensor, mean: Tensor, invvar: Tensor, x: Tensor, gamma: Tensor, is_rms: bool) -> list[Tensor]:
    """[grad of input, of gamma, of beta]; memory_efficient is false."""
    assert dout.dtype == gamma.dtype, "read as gamma's"
    assert dout.shape == x.shape
    assert invvar.dtype == mean.dtype == torch.promote_types(x.dtype, torch.float32)
    wide, width = invvar.dtype, gamma.numel()
    grad, values = dout.to(wide).reshape(-1, width), x.to(wide).reshape(-1, width)
    normed = (values - mean[:, None]) * invvar[:, None]
    weighted = grad * gamma.to(wide)
    level = 0.0 if is_rms else weighted.mean(1, keepdim=True)
    grad_x = invvar[:, None] * (weighted - level - normed * (weighted * normed).mean(1, keepdim=True))
    grad_gamma, grad_beta = (grad * normed).sum(0).to(gamma.dtype), grad.sum(0).to(gamma.dtype)
    return [grad_x.to(x.dtype).view(x.shape), grad_gamma, grad_beta]


def backward_affine(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: list[int],
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    memory_efficient: bool,
) -> list[Tensor]:
    calls.append("backward_affine")
    assert mean is not None
    assert (type(eps), memory_efficient) == (float, False)
    _check(normalized_shape, [input_or_output, dout, mean, invvar], gamma, beta)
    return _backward(dout, mean, invvar, input_or_output, gamma, is_rms=False)


def rms_backward_affine(
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: list[int],
    gamma: Tensor,
    eps: float,
    memory_efficient: bool,
) -> list[Tensor]:
    calls.append("rms_backward_affine")
    assert (type(eps), memory_efficient) == (float, False)
    _check(normalized_shape, [input_or_output, dout, invvar], gamma)
    return _backward(dout, torch.zeros_like(invvar), invvar, input_or_output, gamma, is_rms=True)[:2]
