"""Who is measured: our implementations of an op, the reference under torch.compile, and what others offer for it.

Others are called as their users would; what is not importable is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..device import Device
from ..implementations import IMPLEMENTATIONS
from ..measured import COMPILED
from .case import Function

TORCH, LIGER = "torch eager", "Liger"


def ours(op: str, device: Device) -> dict[str, Function]:
    """Implementation -> function, of those that run on the device; the reference first."""
    return {row.name: row.load() for row in IMPLEMENTATIONS if row.op == op and row.lacks(device) is None}


def compiled(op: str) -> dict[str, Function]:
    """The reference as the compiler makes it, for ops that a model's graph can hold."""
    if op in ("adamw", "l2norm", "scale", "cast_copy", "stochastic_round", "linear_cross_entropy", "weight_gradient"):
        return {}
    return {COMPILED: torch.compile(getattr(reference, op), fullgraph=True, dynamic=False)}


def others(op: str) -> dict[str, Function]:
    """torch's own eager functions and Liger's kernels, with our ops' signatures as far as the cases use them."""
    found: dict[str, Function] = {TORCH: _EAGER[op]} if op in _EAGER else {}
    for name, load in ((LIGER, _liger),):
        function = load(op)
        if function is not None:
            found[name] = function
    return found


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


def _l2norm(tensors: list[Tensor]) -> Any:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


_EAGER: dict[str, Function] = {
    "rmsnorm": _rmsnorm,
    "layernorm": _layernorm,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "l2norm": _l2norm,
}


@functools.cache
def _liger(op: str) -> Function | None:
    """Liger-Kernel's functions (github.com/linkedin/Liger-Kernel, liger_kernel.ops), None where it is not installed."""
    try:
        from liger_kernel import ops as liger  # type: ignore[import-not-found]
    except ImportError:
        return None

    def call(name: str, arguments: Callable[..., tuple[Any, ...]]) -> Function | None:
        function = getattr(liger, name, None)
        return None if function is None else lambda *args, **kwargs: function.apply(*arguments(*args, **kwargs))

    table: dict[str, Callable[[], Function | None]] = {
        "rmsnorm": lambda: call("LigerRMSNormFunction", lambda x, weight, eps: (x, weight, eps, 0.0, "llama", False)),
        "swiglu": lambda: call("LigerSiLUMulFunction", lambda gate, up: (gate, up)),
        "geglu": lambda: call("LigerGELUMulFunction", lambda gate, up: (gate, up)),
        "layernorm": lambda: call("LigerLayerNormFunction", lambda x, weight, bias, eps: (x, weight, bias, eps)),
    }
    return table[op]() if op in table else None
