"""Fused operations: one op = one signature, a reference, and faster implementations chosen once.

    ops = select({"default": "auto", "rmsnorm": "reference"}, device="cpu")
    y = ops.rmsnorm(x, weight, eps)

Imports nothing of ours but itself. Each op's file documents its signature; reference.py gathers the references.
"""

from .cross_entropy import losses_from_stats
from .device import Device
from .dispatch import select, table
from .implementations import IMPLEMENTATIONS, Implementation
from .ops import OP_NAMES, Choice, Ops
from .rope import rope_cos_sin
from .rounding import RoundingAddress
from .softcap import softcap, softcap_, softcap_slope

__all__ = [
    "IMPLEMENTATIONS",
    "OP_NAMES",
    "Choice",
    "Device",
    "Implementation",
    "Ops",
    "RoundingAddress",
    "losses_from_stats",
    "rope_cos_sin",
    "select",
    "softcap",
    "softcap_",
    "softcap_slope",
    "table",
]
