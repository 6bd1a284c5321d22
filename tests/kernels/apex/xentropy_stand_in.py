"""A stand-in for apex's extension xentropy_cuda, on any device: its functions' signatures, checks and arithmetic.

Rebuilt from the public source (github.com/NVIDIA/apex, apex/contrib/csrc/xentropy: interface.cpp, xentropy_kernel.cu).
NOT apex: it shows that our calls are what that source accepts, not that apex's kernels do what they should.
"""

from __future__ import annotations

import torch
from torch import Tensor

calls: list[str] = []
"""Names of the functions that were called."""


def _check(logits: Tensor, labels: Tensor, smoothing: float) -> None:
    assert type(smoothing) is float
    assert labels.is_contiguous(), "labels must be contiguous"
    assert labels.dtype == torch.int64, "Label type should be CUDA Long"
    assert logits.dim() == 2, "Currently only 2 dim input supported"
    assert labels.dim() == 1, "Labels should be 1 dimensional"
    assert logits.size(0) == labels.size(0), "Input and label should have same number of examples"
    assert logits.numel() > 0, "Number of classes in input should not be 0"
    # Not checked there: the forward pass would read outside of the row.
    assert bool(((labels >= 0) & (labels < logits.size(1))).all())


def forward(input: Tensor, labels: Tensor, smoothing: float, half_to_float: bool) -> list[Tensor]:
    """Losses in float32, log-sum-exps in float32 or, without half_to_float, in the input's dtype."""
    calls.append("forward")
    _check(input, labels, smoothing)
    assert type(half_to_float) is bool
    assert not half_to_float or input.dtype in (torch.float16, torch.bfloat16), "conversion is for halves only"
    wide = input.float()
    lse = wide.logsumexp(1)
    log_prob = wide.gather(1, labels.unsqueeze(1)).squeeze(1) - lse
    losses = (lse - wide.mean(1)) * smoothing - log_prob * (1 - smoothing)
    return [losses, lse if half_to_float else lse.to(input.dtype)]


def backward(grad_loss: Tensor, logits: Tensor, max_log_sum_exp: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """grad_loss * (softmax - smoothed one-hot), in the logits' dtype."""
    calls.append("backward")
    _check(logits, labels, smoothing)
    assert max_log_sum_exp.is_contiguous(), "max_log_sum_exp must be contiguous"
    assert grad_loss.dtype in (logits.dtype, torch.float32), "expected input and grad types to match, or grad float"
    assert max_log_sum_exp.dtype == grad_loss.dtype  # read as such there
    grad = torch.exp(logits.float() - max_log_sum_exp.float().unsqueeze(1)) - smoothing / logits.size(1)
    grad.scatter_add_(1, labels.unsqueeze(1), torch.full((len(labels), 1), smoothing - 1.0))
    return (grad * grad_loss.float().unsqueeze(1)).to(logits.dtype)
