"""Who is measured: our implementations of an op, the reference under torch.compile, and what others offer for it.

Others are called as their users would; what is not importable is left out.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..device import Device
from ..implementations import IMPLEMENTATIONS
from ..measured import COMPILED
from .case import Function

TORCH, LIGER = OTHERS = ("torch eager", "Liger")
# Dropout: a generator of integers in which the compiler finds little, for longer than for all others together.
_NOT_COMPILED = (
    *("adamw", "l2norm", "scale", "cast_copy", "stochastic_round"),
    *("linear_cross_entropy", "weight_gradient", "attention", "dropout"),
)


def ours(op: str, device: Device) -> dict[str, Function]:
    """Implementation -> function, of those that run on the device; the reference first."""
    return {row.name: row.load() for row in IMPLEMENTATIONS if row.op == op and row.lacks(device) is None}


def compiled(op: str) -> dict[str, Function]:
    """The reference as the compiler makes it, for ops that a model's graph can hold and that it has a hand in."""
    if op in _NOT_COMPILED:
        return {}
    return {COMPILED: torch.compile(getattr(reference, op), fullgraph=True, dynamic=False)}


def others(op: str) -> dict[str, Function]:
    """torch's own eager functions and Liger's kernels, with our ops' signatures as far as the cases use them."""
    found: dict[str, Function] = {TORCH: _EAGER[op]} if op in _EAGER else {}
    function = _liger(op)
    return found if function is None else {**found, LIGER: function}


def _rmsnorm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    if residual is None:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    total = x + residual
    return F.rms_norm(total, x.shape[-1:], weight, eps), total


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float) -> Tensor:
    # Without the z-loss, which torch has not: less work than ours does.
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction="none")


def _linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, token_grad: float) -> Tensor:
    losses: Tensor = F.cross_entropy(F.linear(x, weight).float(), targets, reduction="none")
    return losses


def _dropout(x: Tensor, p: float, seed: int, step: int, site: int, rows: Tensor) -> Tensor:
    # By torch's own generator, whose mask is kept for the backward pass.
    return F.dropout(x, p)


def _l2norm(tensors: list[Tensor]) -> Any:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


_EAGER: dict[str, Function] = {
    "rmsnorm": _rmsnorm,
    "layernorm": _layernorm,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "dropout": _dropout,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "l2norm": _l2norm,
}


def _liger(op: str) -> Function | None:
    """Liger-Kernel's function for an op, None where it has none or is not installed. Signatures as of 0.8.5, read in
    its source (github.com/linkedin/Liger-Kernel, liger_kernel.ops); another version's that differ end in an error that
    the table shows."""
    if op not in _LIGER or importlib.util.find_spec("liger_kernel") is None:
        return None
    call = _LIGER[op]
    return lambda *args, **kwargs: call(importlib.import_module("liger_kernel.ops"), *args, **kwargs)


def _liger_rmsnorm(liger: Any, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    if residual is None:
        return liger.LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
    return liger.LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps)


def _liger_rope(
    liger: Any, q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor, interleaved: bool, cos_sin: Any
) -> Any:
    if interleaved:
        raise NotImplementedError("Liger rotates halves only")
    # Heads before sequence, and cosines of half the width.
    found = liger.LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), *cos_sin, None, 1, q.shape[-1])
    return tuple(t.transpose(1, 2) for t in found)


def _liger_cross_entropy(liger: Any, logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float) -> Any:
    return liger.LigerCrossEntropyFunction.apply(logits, targets, None, ignore_index, z_loss, 0.0, "none")[0]


def _liger_linear_cross_entropy(liger: Any, x: Tensor, weight: Tensor, targets: Tensor, token_grad: float) -> Any:
    function = liger.LigerFusedLinearCrossEntropyFunction
    return function.apply(x, weight, targets, None, None, -100, 0.0, 0.0, "sum")[0]


_LIGER: dict[str, Function] = {
    "rmsnorm": _liger_rmsnorm,
    "layernorm": lambda liger, x, weight, bias, eps: liger.LigerLayerNormFunction.apply(x, weight, bias, eps),
    "rope": _liger_rope,
    "swiglu": lambda liger, gate, up: liger.LigerSiLUMulFunction.apply(gate, up),
    "geglu": lambda liger, gate, up: liger.LigerGELUMulFunction.apply(gate, up),
    "cross_entropy": _liger_cross_entropy,
    "linear_cross_entropy": _liger_linear_cross_entropy,
}
