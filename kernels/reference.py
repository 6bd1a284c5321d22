"""All references under their ops' names, to test against: `from stoker.kernels import reference as ref`."""

from .adamw import adamw
from .attention import attention
from .cast_copy import cast_copy
from .cross_entropy import cross_entropy, cross_entropy_grad, cross_entropy_stats
from .dropout import dropout
from .geglu import geglu
from .gelu import gelu
from .l2norm import l2norm
from .layernorm import layernorm
from .linear_cross_entropy import linear_cross_entropy
from .moe_permute import moe_permute, moe_sort, moe_unpermute
from .moe_topk import moe_topk
from .quantize_fp8 import quantize_fp8
from .rmsnorm import rmsnorm
from .rope import rope
from .rounding import stochastic_round
from .scale import scale
from .swiglu import swiglu
from .weight_gradient import weight_gradient

__all__ = [
    "adamw",
    "attention",
    "cast_copy",
    "cross_entropy",
    "cross_entropy_grad",
    "cross_entropy_stats",
    "dropout",
    "geglu",
    "gelu",
    "l2norm",
    "layernorm",
    "linear_cross_entropy",
    "moe_permute",
    "moe_sort",
    "moe_topk",
    "moe_unpermute",
    "quantize_fp8",
    "rmsnorm",
    "rope",
    "scale",
    "stochastic_round",
    "swiglu",
    "weight_gradient",
]
