"""The families of Hugging Face's models that can be read and written: one entry each.

Owns: which architecture has which aspects (fields.py, rope.py, layers.py), which settings of ours it always has, and by
which names its weights go (maps.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...conf.schema import Activation, ModelConfig, Norm, NormOrder, Positions, QkNorm
from .fields import Aspect, Biases, Cap, Field, Fields, GemmaScales, Heads, Only, Settings, cannot
from .layers import GemmaWindow, MixtralExperts, QwenExperts, QwenWindow, SameWindow
from .maps import GPT2, LLAMA, MIXTRAL, POST_NORMS, QWEN3_MOE, Rules
from .rope import Rope, RopePair


@dataclass(frozen=True)
class Family:
    """ours: settings that it always has, where they differ from our defaults."""

    name: str
    model_type: str
    architecture: str
    aspects: Sequence[Aspect]
    rules: Rules
    ours: Mapping[str, Any]

    @property
    def settings(self) -> set[str]:
        """Those that its config.json says something of."""
        return {setting for aspect in self.aspects for setting in aspect.settings}

    def read(self, fields: Fields) -> Settings:
        """Raises ValueError: a value that no setting of ours stands for."""
        found: Settings = dict(self.ours)
        for aspect in self.aspects:
            found |= aspect.read(fields)
        return found

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Raises ValueError: a setting that the family has no field for; all of them."""
        problems: list[str] = []
        written: dict[str, Any] = {}
        for aspect in self.aspects:
            try:
                written |= aspect.write(model)
            except ValueError as e:
                problems.append(str(e))
        plain = ModelConfig(**self.ours)
        for setting in sorted(FUNCTION - self.settings):
            found, expected = getattr(model, setting), getattr(plain, setting)
            if found != expected:
                text = f"expected {getattr(expected, 'value', expected)}"
                problems.append(str(cannot(setting, found, text)))
        if problems:
            raise ValueError("; ".join(problems))
        return written


# What training alone reads: neither the weights nor what they compute depend on it.
TRAINING = {
    "init_from",
    "init_std",
    "dropout",
    "z_loss",
    "balance",
    "balance_weight",
    "balance_rate",
    "router_z_loss",
}
FUNCTION = set(ModelConfig.__dataclass_fields__) - TRAINING


def _base(tied: bool = False, norm_eps: float = 1e-6) -> list[Aspect]:
    return [
        Field("vocab_size", "vocab_size"),
        Field("num_layers", "num_hidden_layers"),
        Field("norm_eps", "rms_norm_eps", float, norm_eps),
        Field("tied_embeddings", "tie_word_embeddings", bool, tied),
    ]


_WIDTH = Field("ffn_size", "intermediate_size")
_SILU = Only("hidden_act", ("silu", "swish"))
_NO_BIAS = Only("attention_bias", (False,))
_GEMMA: list[Aspect] = [
    Only("hidden_activation", ("gelu_pytorch_tanh", "gelu_new"), "gelu_pytorch_tanh"),
    Only("use_bidirectional_attention", (False, None)),
    _WIDTH,
    _NO_BIAS,
    GemmaScales(),
]
_GEMMA_OURS = {"activation": Activation.geglu, "norm_order": NormOrder.both, "norm_offset": 1.0}


@dataclass(frozen=True)
class Gpt2Heads:
    """As many of keys and values as of queries; the width of the feed-forward layer has a default."""

    settings: tuple[str, ...] = ("num_heads", "num_kv_heads", "head_dim", "hidden_size", "ffn_size", "max_positions")

    def read(self, fields: Fields) -> Settings:
        heads, hidden = fields.value("n_head", int), fields.value("n_embd", int)
        positions = fields.value("n_positions", int, 1024)
        width = fields.value("n_inner", int, 4 * hidden)
        sizes = {"num_heads": heads, "num_kv_heads": heads, "hidden_size": hidden}
        return {**sizes, "ffn_size": width, "max_positions": positions}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.num_kv_heads != model.num_heads:
            raise cannot("num_kv_heads", model.num_kv_heads, f"expected model.num_heads={model.num_heads}")
        if model.head_dim is not None and model.head_dim * model.num_heads != model.hidden_size:
            raise cannot("head_dim", model.head_dim, "expected hidden_size / num_heads")
        return {
            "n_head": model.num_heads,
            "n_embd": model.hidden_size,
            "n_inner": model.ffn_size,
            "n_positions": model.max_positions,
        }


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family(
            "Llama 2 and 3",
            "llama",
            "LlamaForCausalLM",
            [*_base(), _WIDTH, _SILU, Heads(must_divide=True), Biases(), Rope()],
            LLAMA,
            {},
        ),
        Family(
            "Mistral",
            "mistral",
            "MistralForCausalLM",
            [*_base(), _WIDTH, _SILU, Heads(default_kv=8), Rope(), SameWindow(4096)],
            LLAMA,
            {},
        ),
        Family(
            "Qwen2",
            "qwen2",
            "Qwen2ForCausalLM",
            [*_base(), _WIDTH, _SILU, Heads(), Rope(), QwenWindow()],
            LLAMA,
            {"qkv_bias": True},
        ),
        Family(
            "Qwen3",
            "qwen3",
            "Qwen3ForCausalLM",
            [*_base(), _WIDTH, _SILU, _NO_BIAS, Heads(128), Rope(), QwenWindow()],
            LLAMA,
            {"qk_norm": QkNorm.head},
        ),
        Family(
            "OLMo 2",
            "olmo2",
            "Olmo2ForCausalLM",
            [*_base(norm_eps=1e-5), _WIDTH, _SILU, _NO_BIAS, Heads(), Rope()],
            POST_NORMS,
            {"qk_norm": QkNorm.full, "norm_order": NormOrder.post},
        ),
        Family(
            "Gemma 2",
            "gemma2",
            "Gemma2ForCausalLM",
            [
                *_base(tied=True),
                *_GEMMA,
                Heads(256, 4, must_divide=True),
                Rope(),
                GemmaWindow(2),
                Cap("attention_softcap", "attn_logit_softcapping", 50.0),
                Cap("logit_softcap", "final_logit_softcapping", 30.0),
            ],
            POST_NORMS,
            _GEMMA_OURS,
        ),
        Family(
            "Gemma 3",
            "gemma3_text",
            "Gemma3ForCausalLM",
            [
                *_base(tied=True),
                *_GEMMA,
                Heads(256, 4, must_divide=True),
                RopePair(),
                GemmaWindow(6),
                Only("attn_logit_softcapping", (None,)),
                Cap("logit_softcap", "final_logit_softcapping"),
            ],
            POST_NORMS,
            {**_GEMMA_OURS, "qk_norm": QkNorm.head},
        ),
        Family(
            "Mixtral",
            "mixtral",
            "MixtralForCausalLM",
            [*_base(norm_eps=1e-5), _SILU, Heads(default_kv=8), Rope(1e6), SameWindow(), MixtralExperts()],
            MIXTRAL,
            {},
        ),
        Family(
            "Qwen3-MoE",
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            [
                *_base(),
                _SILU,
                _NO_BIAS,
                Heads(default_kv=4),
                Rope(),
                SameWindow(4096, "use_sliding_window"),
                QwenExperts(),
            ],
            QWEN3_MOE,
            {"qk_norm": QkNorm.head},
        ),
        Family(
            "GPT-2",
            "gpt2",
            "GPT2LMHeadModel",
            [
                Field("vocab_size", "vocab_size"),
                Field("num_layers", "n_layer"),
                Field("norm_eps", "layer_norm_epsilon", float, 1e-5),
                Field("tied_embeddings", "tie_word_embeddings", bool, True),
                Gpt2Heads(),
                Only("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
                Only("scale_attn_weights", (True,)),
                Only("scale_attn_by_inverse_layer_idx", (False,)),
                Only("add_cross_attention", (False,)),
            ],
            GPT2,
            {
                "activation": Activation.gelu,
                "norm": Norm.layernorm,
                "positions": Positions.learned,
                "qkv_bias": True,
                "linear_bias": True,
            },
        ),
    )
}
