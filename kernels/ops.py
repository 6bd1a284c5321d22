"""The set of operations a model gets: one callable per op, chosen by `dispatch.select`, immutable.

Owns the list of ops; conf/schema.py has a field for each. Signatures and their documentation are in each op's own file.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from .adamw import AdamW
from .attention import Attention
from .cast_copy import CastCopy
from .cross_entropy import CrossEntropy, CrossEntropyGrad, CrossEntropyStats
from .dropout import Dropout
from .geglu import GeGlu
from .gelu import Gelu
from .l2norm import L2Norm
from .layernorm import LayerNorm
from .linear_cross_entropy import LinearCrossEntropy
from .moe_permute import MoePermute, MoeSort, MoeUnpermute
from .moe_topk import MoeTopk
from .quantize_fp8 import QuantizeFp8
from .rmsnorm import RmsNorm
from .rope import Rope
from .rounding import StochasticRound
from .scale import Scale
from .swiglu import SwiGlu
from .weight_gradient import WeightGradient


@dataclass(frozen=True)
class Choice:
    """Which implementation an op got, and why."""

    op: str
    implementation: str
    why: str


@dataclass(frozen=True)
class Ops:
    """Callables with the signatures of their files; `choices` says what they are, one entry per op."""

    rmsnorm: RmsNorm
    layernorm: LayerNorm
    rope: Rope
    swiglu: SwiGlu
    geglu: GeGlu
    gelu: Gelu
    attention: Attention
    cross_entropy: CrossEntropy
    cross_entropy_stats: CrossEntropyStats
    cross_entropy_grad: CrossEntropyGrad
    linear_cross_entropy: LinearCrossEntropy
    weight_gradient: WeightGradient
    dropout: Dropout
    adamw: AdamW
    l2norm: L2Norm
    scale: Scale
    cast_copy: CastCopy
    stochastic_round: StochasticRound
    moe_topk: MoeTopk
    moe_sort: MoeSort
    moe_permute: MoePermute
    moe_unpermute: MoeUnpermute
    quantize_fp8: QuantizeFp8
    choices: tuple[Choice, ...]

    def is_reference(self, op: str) -> bool:
        """Whether `op` is the reference, whose speed and memory on a device are another's."""
        return any(c.op == op and c.implementation == "reference" for c in self.choices)


OP_NAMES: tuple[str, ...] = tuple(f.name for f in fields(Ops) if f.name != "choices")
