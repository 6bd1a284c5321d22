"""A stand-in for apex's extension amp_C, on any device: its functions' signatures, checks and arithmetic, no more.

Rebuilt from the public source (github.com/NVIDIA/apex: csrc/amp_C_frontend.cpp, csrc/multi_tensor_apply.cuh,
csrc/multi_tensor_adam.cu, csrc/multi_tensor_l2norm_kernel.cu, csrc/multi_tensor_scale_kernel.cu). NOT apex: it shows
that our calls are what that source accepts, not that apex's kernels do what they should.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Lists = list[list[Tensor]]
calls: list[str] = []
"""Names of the functions that were called."""


def _apply(depth: int, chunk_size: int, noop: Tensor, lists: Lists) -> None:
    """The checks of multi_tensor_apply, and pybind's of the arguments' types."""
    assert type(chunk_size) is int
    assert noop.dtype == torch.int32
    assert noop.numel() == 1
    assert type(lists) is list
    assert len(lists) == depth, "tensor_lists.size() != depth"
    assert len(lists[0]) > 0, "tensor_lists[0].size() is not > 0"
    for tensors in lists:
        assert type(tensors) is list
        assert len(tensors) == len(lists[0]), "Size mismatch among tensor lists"
        for k, tensor in enumerate(tensors):
            assert tensor.is_contiguous(), "A tensor was not contiguous."
            assert tensor.device == lists[0][0].device
            assert tensor.numel() == lists[0][k].numel(), "Size mismatch"
            # Not checked there, but read as the first one's dtype; and a last tensor without a chunk launches nothing.
            assert tensor.dtype == tensors[0].dtype
            assert tensor.numel() > 0


def _numbers(*values: float) -> None:
    assert all(type(v) is float for v in values), values


def _adam(
    lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    decay: float,
    inv_scale: Tensor,
) -> list[Tensor]:
    """The weights that AdamCapturable(Master)Functor ends with; gradients and averages are written."""
    _numbers(beta1, beta2, epsilon, decay)
    assert (type(mode), type(bias_correction)) == (int, int)
    assert mode == 1, "only AdamW is rebuilt here"
    assert (lr.dtype, step.dtype, inv_scale.dtype) == (torch.float32, torch.int32, torch.float32)
    betas = torch.tensor([beta1, beta2])
    corrections = 1 - betas.double() ** step.item() if bias_correction == 1 else torch.ones(2).double()
    correction1, correction2 = corrections.float()
    results = []
    weights = lists[4] if len(lists) == 5 else lists[1]
    for g, p, m, v in zip(lists[0], weights, lists[2], lists[3], strict=True):
        grad = g.float() * inv_scale
        g.copy_(grad)
        m.copy_(betas[0] * m + (1 - betas[0]) * grad)
        v.copy_(betas[1] * v + (1 - betas[1]) * grad * grad)
        update = (m / correction1) / ((v / correction2).sqrt() + epsilon) + decay * p
        results.append(p.float() - lr * update)
    return results


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    calls.append("multi_tensor_adam_capturable")
    _apply(4, chunk_size, noop_flag, tensor_lists)
    # One template argument for gradients and weights; averages are float32.
    assert tensor_lists[0][0].dtype == tensor_lists[1][0].dtype
    assert tensor_lists[2][0].dtype == tensor_lists[3][0].dtype == torch.float32
    if noop_flag.item() == 1:
        return
    rest = (beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale)
    for p, w in zip(tensor_lists[1], _adam(tensor_lists, lr, *rest), strict=True):
        p.copy_(w)


def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    calls.append("multi_tensor_adam_capturable_master")
    _apply(5, chunk_size, noop_flag, tensor_lists)
    assert tensor_lists[0][0].dtype == tensor_lists[1][0].dtype
    assert all(tensors[0].dtype == torch.float32 for tensors in tensor_lists[2:])
    if noop_flag.item() == 1:
        return
    rest = (beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale)
    for p, master, w in zip(tensor_lists[1], tensor_lists[4], _adam(tensor_lists, lr, *rest), strict=True):
        p.copy_(w)
        master.copy_(w)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor_python: bool | None
) -> tuple[Tensor, Tensor]:
    calls.append("multi_tensor_l2norm")
    _apply(1, chunk_size, noop_flag, tensor_lists)
    assert per_tensor_python in (None, False), "only the norm of all is rebuilt here"
    total = torch.stack([t.float().square().sum() for t in tensor_lists[0]]).sum().sqrt()
    if not bool(total.isfinite()):
        noop_flag.fill_(1)
    return total.view(1), total.new_empty(0)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float) -> None:
    calls.append("multi_tensor_scale")
    _apply(2, chunk_size, noop_flag, tensor_lists)
    _numbers(scale)
    for source, target in zip(*tensor_lists, strict=True):
        if not bool(source.isfinite().all()):
            noop_flag.fill_(1)
        target.copy_(source.float() * scale)


FUNCTIONS: dict[str, Callable[..., object]] = {
    f.__name__: f
    for f in (
        multi_tensor_adam_capturable,
        multi_tensor_adam_capturable_master,
        multi_tensor_l2norm,
        multi_tensor_scale,
    )
}
