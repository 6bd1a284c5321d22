"""AdamW, norm, scaling and copying of lists of tensors by apex's extension amp_C, called as apex's own optimizers do.

Owns: what amp_C asks for beyond our ops (one dtype per call, contiguous tensors, no empty ones, numbers on the device)
and what of our ops it has not. Signatures: github.com/NVIDIA/apex, csrc/amp_C_frontend.cpp, csrc/multi_tensor_adam.cu,
multi_tensor_l2norm_kernel.cu, multi_tensor_scale_kernel.cu. Never run on hardware.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..adamw import check_adamw
from ..cast_copy import check_cast_copy
from ..rounding import RoundingAddress
from ..scale import check_scale

_amp: Any = importlib.import_module("amp_C")

CHUNK = 2048 * 32  # elements per block, as apex.multi_tensor_apply.multi_tensor_applier has it
DECOUPLED, CORRECTED = 1, 1  # AdamW rather than Adam with L2; divide by 1 - beta^step
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor] | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float | Tensor = 1.0,
    rounding: Sequence[RoundingAddress] | None = None,
) -> None:
    """See stoker.kernels.adamw. In one pass where gradients have the params' dtype; else gradients are widened
    before it and masters copied to params after it. Has no stochastic rounding, and betas are rounded to float32 first.
    """
    check_adamw(params, grads, exp_avgs, exp_avg_sqs, masters, step, rounding)
    if rounding is not None:
        raise ValueError("adamw: apex rounds to the nearest only; choose kernels.adamw=native or reference")
    updated = params if masters is None else masters
    _check("adamw", "in place", [*params, *exp_avgs, *exp_avg_sqs, *updated])
    _check("adamw", "", grads)
    kept = [i for i, param in enumerate(params) if param.numel() > 0]
    if not kept:
        return
    device = params[kept[0]].device
    # The capturable variants: theirs are the only ones with masters and with a factor for gradients.
    numbers = (
        torch.full((1,), lr, dtype=torch.float32, device=device),
        beta1,
        beta2,
        eps,
        torch.full((1,), step, dtype=torch.int32, device=device),
        DECOUPLED,
        CORRECTED,
        weight_decay,
        _on_device(grad_scale, device),
    )
    for group in _groups(kept, [(p.dtype, g.dtype) for p, g in zip(params, grads, strict=True)]):
        rows = [[params[i], grads[i].contiguous(), exp_avgs[i], exp_avg_sqs[i], updated[i]] for i in group]
        p, g, m, v, w = (list(column) for column in zip(*rows, strict=True))
        if masters is not None and p[0].dtype == g[0].dtype:
            _amp.multi_tensor_adam_capturable_master(CHUNK, _noop(device), [g, p, m, v, w], *numbers)
            continue
        if g[0].dtype != torch.float32:
            g, narrow = [torch.empty_like(t, dtype=torch.float32) for t in g], g
            _amp.multi_tensor_scale(CHUNK, _noop(device), [narrow, g], 1.0)
        _amp.multi_tensor_adam_capturable(CHUNK, _noop(device), [g, w, m, v], *numbers)
        if masters is not None:
            _amp.multi_tensor_scale(CHUNK, _noop(device), [w, p], 1.0)


def l2norm(tensors: Sequence[Tensor], squared: bool = False) -> Tensor:
    """See stoker.kernels.l2norm. Sums are float32 throughout: about 1e-6 off, infinite where the sum of squares is."""
    _check("l2norm", "", tensors)
    if not tensors:
        return torch.zeros(())
    kept = [i for i, tensor in enumerate(tensors) if tensor.numel() > 0]
    device = tensors[0].device
    norms = [
        _amp.multi_tensor_l2norm(CHUNK, _noop(device), [[tensors[i].detach().contiguous() for i in group]], False)[0]
        for group in _groups(kept, [t.dtype for t in tensors])
    ]
    squares = torch.cat([torch.zeros(1, dtype=torch.float64, device=device), *norms]).square().sum()
    return (squares if squared else squares.sqrt()).float()


def scale(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """See stoker.kernels.scale. A factor on the device cannot be had without waiting for it."""
    check_scale(tensors, factor)
    if isinstance(factor, Tensor):
        raise ValueError("scale: apex takes a number only; choose kernels.scale=native or reference")
    _check("scale", "in place", tensors)
    kept = [i for i, tensor in enumerate(tensors) if tensor.numel() > 0]
    for group in _groups(kept, [t.dtype for t in tensors]):
        own = [tensors[i] for i in group]
        _amp.multi_tensor_scale(CHUNK, _noop(own[0].device), [own, own], float(factor))


def cast_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """See stoker.kernels.cast_copy."""
    check_cast_copy(targets, sources)
    _check("cast_copy", "in place", targets)
    _check("cast_copy", "", sources)
    kept = [i for i, target in enumerate(targets) if target.numel() > 0]
    for group in _groups(kept, [(t.dtype, s.dtype) for t, s in zip(targets, sources, strict=True)]):
        lists = [[sources[i].contiguous() for i in group], [targets[i] for i in group]]
        _amp.multi_tensor_scale(CHUNK, _noop(lists[0][0].device), lists, 1.0)


def _check(op: str, how: str, tensors: Sequence[Tensor]) -> None:
    """Dtypes; contiguous where the tensor itself is written to."""
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{op}: apex has no {tensor.dtype}; choose kernels.{op}=reference")
        if how and not tensor.is_contiguous():
            text = f"{op}: apex updates contiguous tensors only, not {tuple(tensor.shape)} by {tensor.stride()}"
            raise ValueError(f"{text}; choose kernels.{op}=native or reference")


def _groups(indices: Sequence[int], keys: Sequence[object]) -> list[list[int]]:
    """Those of one key: amp_C takes the first tensor's dtype for that of the whole list."""
    groups: dict[object, list[int]] = {}
    for i in indices:
        groups.setdefault(keys[i], []).append(i)
    return list(groups.values())


def _noop(device: torch.device) -> Tensor:
    """A flag that kernels set where they meet infinity or NaN, and at which Adam does nothing: a new one each time."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _on_device(number: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device, torch.float32).view(1)
    return torch.full((1,), number, dtype=torch.float32, device=device)
