"""The table of implementations: what exists for which op, where it runs and what it needs.

Data only; `dispatch.select` reads it. A new implementation is a line here and a function with the op's signature.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import apex, reference
from .device import Device
from .ops import OP_NAMES

Function = Callable[..., Any]

# op -> module below native/ that has a function of that name; it is imported after the library has been loaded.
NATIVE = {
    "moe_topk": "moe_topk",
    "moe_sort": "moe_permute",
    "moe_permute": "moe_permute",
    "moe_unpermute": "moe_permute",
    "quantize_fp8": "quantize_fp8",
    "rmsnorm": "rmsnorm",
    "layernorm": "layernorm",
    "rope": "rope",
    "swiglu": "glu",
    "geglu": "glu",
    "gelu": "glu",
    "adamw": "adamw",
    "l2norm": "l2norm",
    "scale": "multi_copy",
    "cast_copy": "multi_copy",
    "stochastic_round": "rounding",
    "cross_entropy": "cross_entropy",
    "cross_entropy_stats": "cross_entropy",
    "cross_entropy_grad": "cross_entropy",
    "linear_cross_entropy": "linear_cross_entropy",
}
# op -> (module below apex/, called as the extension that it calls; variable that has apex's build make the extension)
APEX: dict[str, tuple[str, str]] = {
    "rmsnorm": ("fused_layer_norm_cuda", "APEX_CUDA_EXT"),
    "layernorm": ("fused_layer_norm_cuda", "APEX_CUDA_EXT"),
    "rope": ("fused_rotary_positional_embedding", "APEX_CUDA_EXT"),
    "adamw": ("amp_C", "APEX_CUDA_EXT"),
    "l2norm": ("amp_C", "APEX_CUDA_EXT"),
    "scale": ("amp_C", "APEX_CUDA_EXT"),
    "cast_copy": ("amp_C", "APEX_CUDA_EXT"),
    "cross_entropy": ("xentropy_cuda", "APEX_XENTROPY"),
    "weight_gradient": ("fused_weight_gradient_mlp_cuda", "APEX_CUDA_EXT"),
}


def _nothing(_: Device) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One row. `load` imports and returns the function.

    devices: types it runs on (Device.type), empty for any. capability: least compute capability, times ten. lacking:
    what is not installed, as a clause for people; asked only where it could run. note: what of the op it leaves to
    others, for the log. no_gain: device types where `auto` takes the reference instead. is_expected: `auto` without it,
    where it could run, is an error under kernels.strict. takes_float64: or leaves it to others by itself.
    """

    op: str
    name: str
    load: Callable[[], Function]
    devices: tuple[str, ...] = ()
    capability: int = 0
    lacking: Callable[[Device], str | None] = _nothing
    note: str = ""
    no_gain: tuple[str, ...] = ()
    is_expected: bool = False
    takes_float64: bool = True

    def cannot(self, device: Device) -> str | None:
        """Why it can never run on a device, whatever is installed."""
        if self.devices and device.type not in self.devices:
            return f"runs on {' or '.join(self.devices)}, this run is on {device.type}"
        if device.capability is not None and device.capability < self.capability:
            return f"needs compute capability {self.capability / 10:.1f}, {device} has {device.capability / 10:.1f}"
        return None

    def lacks(self, device: Device) -> str | None:
        """What stands in the way of using it on a device, as a clause for people."""
        return self.cannot(device) or self.lacking(device)


def _reference(op: str) -> Implementation:
    function: Function = getattr(reference, op)
    return Implementation(op, "reference", load=lambda: function)


def _native(op: str, module: str) -> Implementation:
    def lacking(device: Device) -> str | None:
        from .native import ready

        return ready.lacks(device.capability)

    def load() -> Function:
        function: Function = getattr(importlib.import_module(f"{__package__}.native.{module}"), op)
        return function

    return Implementation(op, "native", load, ("cuda",), 80, lacking, is_expected=True, takes_float64=False)


def _apex(op: str, module: str, switch: str) -> Implementation:
    def load() -> Function:
        function: Function = getattr(importlib.import_module(f"{__package__}.apex.{module}"), op)
        return function

    note = "never run on hardware by stoker's authors"
    return Implementation(
        op, "apex", load, ("cuda",), 80, lambda _: apex.lacks(module, switch), note, takes_float64=False
    )


def _needs(module: str, source: str) -> Callable[[Device], str | None]:
    return lambda _: None if importlib.util.find_spec(module) is not None else f"needs {module} from {source}"


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
    has_flash = _needs("flash_attn", "PyPI's flash-attn, 2.6 or newer")
    has_varlen = _needs("torch.nn.attention.varlen", "a newer torch")
    yield Implementation("attention", "flash", flash, ("cuda",), lacking=has_flash, note=note)
    yield Implementation("attention", "varlen", varlen, ("cuda",), lacking=has_varlen, note=note)
    # On the CPU the reference asks the same kernels, and bfloat16 is slower there than float32.
    yield Implementation("attention", "sdpa", sdpa, no_gain=("cpu",))


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *(_reference(op) for op in OP_NAMES),
    *(_native(op, module) for op, module in NATIVE.items()),
    *_attention(),
    *(_apex(op, module, switch) for op, (module, switch) in APEX.items()),
)
