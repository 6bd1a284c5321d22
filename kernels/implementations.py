"""The table of implementations: what exists for which op, where it runs and what it needs.

Data only; `dispatch.select` reads it. A new implementation is a row here and a module with the op's signature.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import reference
from .ops import OP_NAMES

Function = Callable[..., Any]


@dataclass(frozen=True)
class Implementation:
    """One row. `load` imports and returns the function; None: the name is reserved and not written yet.

    devices: torch device types it runs on, empty for any. module: importable name it needs beside this package, with
    `source` saying how to get it. note: what of the op it leaves to others, for the log. no_gain: device types where
    `auto` takes the reference instead.
    """

    op: str
    name: str
    load: Callable[[], Function] | None
    devices: tuple[str, ...] = ()
    module: str | None = None
    source: str = ""
    note: str = ""
    no_gain: tuple[str, ...] = ()

    def runs_on(self, device: str) -> bool:
        """Whether the device type (cpu, cuda) is one of its own; says nothing about what is installed."""
        return not self.devices or device in self.devices

    def lacks(self, device: str) -> tuple[str, ...]:
        """What stands in the way of using it on a device type, as clauses for people; empty when nothing does."""
        reasons = []
        if self.module is not None and importlib.util.find_spec(self.module) is None:
            reasons.append(f"needs {self.module} from {self.source}")
        if not self.runs_on(device):
            reasons.append(f"runs on {' or '.join(self.devices)}, this run is on {device}")
        if self.load is None:
            reasons.append("this version of stoker does not have it yet")
        return tuple(reasons)


def _reference(op: str) -> Implementation:
    function: Function = getattr(reference, op)
    return Implementation(op, "reference", load=lambda: function)


def _native(op: str) -> Implementation:
    return Implementation(op, "native", load=None, devices=("cuda",))


def _attention() -> Iterator[Implementation]:
    """All but the reference."""

    def sdpa() -> Function:
        from .attention_sdpa import attention_sdpa

        return attention_sdpa

    def varlen() -> Function:
        from .attention_varlen import VarlenAttention, torch_kernel

        return VarlenAttention(torch_kernel, has_softcap=False)

    def flash() -> Function:
        from .attention_varlen import VarlenAttention, package_kernel

        return VarlenAttention(package_kernel, has_softcap=True)

    note = "half precision, documents outside of the compiler; the rest by sdpa"
    cuda = ("cuda",)
    yield Implementation("attention", "flash", flash, cuda, "flash_attn", "PyPI's flash-attn, 2.6 or newer", note)
    yield Implementation("attention", "varlen", varlen, cuda, "torch.nn.attention.varlen", "a newer torch", note)
    # On the CPU the reference asks the same kernels, and bfloat16 is slower there than float32.
    yield Implementation("attention", "sdpa", sdpa, no_gain=("cpu",))


def _apex(op: str, module: str, switch: str) -> Implementation:
    source = f"NVIDIA apex, built from source with {switch}=1 (PyPI's apex is another project)"
    return Implementation(op, "apex", load=None, devices=("cuda",), module=module, source=source)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *(_reference(op) for op in OP_NAMES),
    *(_native(op) for op in OP_NAMES),
    *_attention(),
    _apex("rmsnorm", "fused_layer_norm_cuda", "APEX_CUDA_EXT"),
    _apex("layernorm", "fused_layer_norm_cuda", "APEX_CUDA_EXT"),
    _apex("rope", "fused_rotary_positional_embedding", "APEX_CUDA_EXT"),
    _apex("cross_entropy", "xentropy_cuda", "APEX_XENTROPY"),
    _apex("adamw", "amp_C", "APEX_CUDA_EXT"),
    _apex("l2norm", "amp_C", "APEX_CUDA_EXT"),
)
