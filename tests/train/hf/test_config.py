"""config.json to settings and back; what has no setting here is refused by its name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stoker.conf.compose import compose
from stoker.conf.schema import Activation, ModelConfig, Norm, NormOrder, QkNorm, RopeScaling, Router
from stoker.train.hf.config import differences, parse_config, read_config, write_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}


def named(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **SMALL, **fields}


QWEN2 = named("qwen2", "Qwen2ForCausalLM")
QWEN3_MOE = named("qwen3_moe", "Qwen3MoeForCausalLM", num_experts=8)
GEMMA3 = named("gemma3_text", "Gemma3ForCausalLM", head_dim=16, query_pre_attn_scalar=16)


@pytest.mark.parametrize(
    "preset",
    [
        "gemma2-9b",
        "gemma3-4b",
        "gpt2",
        "llama-3.1-8b",
        "mistral-7b",
        "mixtral-8x7b",
        "olmo2-7b",
        "qwen2-7b",
        "qwen3-30b-a3b",
        "qwen3-8b",
    ],
)
def test_presets_go_there_and_back(preset: str) -> None:
    model = compose([f"model={preset}", "data.sources=[{prefix: /x}]"]).config.model
    family, written = write_config(model)
    again = parse_config(json.loads(json.dumps(written)))
    assert again.family == family
    assert differences(model, again.model) == {}
    assert again.unread == ()


def test_a_published_config_is_the_preset() -> None:
    preset = compose(["model=llama-3.1-8b", "data.sources=[{prefix: /x}]"]).config.model
    assert differences(preset, parse_config(LLAMA).model) == {}
    other = parse_config({**LLAMA, "rope_theta": 1e4, "tie_word_embeddings": True}).model
    assert differences(preset, other) == {"rope_theta": (5e5, 1e4), "tied_embeddings": (False, True)}


def test_gpt2_and_olmo2_as_they_are_published() -> None:
    """Fields of openai-community/gpt2, and of allenai/OLMo-2-0425-1B."""
    gpt2 = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }
    preset = compose(["model=gpt2", "data.sources=[{prefix: /x}]"]).config.model
    read = parse_config(gpt2)
    assert (differences(preset, read.model), read.unread) == ({}, ())
    olmo2 = {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    }
    model = parse_config(olmo2).model
    assert (model.rope_theta, model.norm_order, model.qk_norm) == (5e5, NormOrder.post, QkNorm.full)


def test_newer_names_of_the_rotary_fields_say_the_same() -> None:
    newer = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}
    assert differences(parse_config(newer).model, parse_config(LLAMA).model) == {}


def test_every_number_of_a_scaling_goes_both_ways() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 999}
    yarn |= {"beta_fast": 20.0, "beta_slow": 2.0}
    for scaling in (yarn, LLAMA["rope_scaling"], {"rope_type": "linear", "factor": 3.0}):
        model = parse_config({**LLAMA, "rope_scaling": scaling}).model
        assert write_config(model)[1]["rope_scaling"] == scaling
    model = parse_config({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0}}).model
    assert (model.rope_original_length, model.rope_beta_fast, model.rope_beta_slow) == (131072, 32.0, 1.0)


def test_what_a_config_leaves_out_is_its_family_s_default() -> None:
    gemma = parse_config(GEMMA3).model
    assert (gemma.tied_embeddings, gemma.sliding_window, gemma.global_every) == (True, 4096, 0)  # of 4 layers none
    assert (gemma.rope_theta, gemma.rope_theta_local, gemma.num_kv_heads) == (1e6, 1e4, 4)
    mistral = parse_config(named("mistral", "MistralForCausalLM", num_key_value_heads=2)).model
    assert (mistral.sliding_window, mistral.tied_embeddings, mistral.norm_eps) == (4096, False, 1e-6)
    assert (
        parse_config(
            named("mistral", "MistralForCausalLM", num_key_value_heads=2, sliding_window=None)
        ).model.sliding_window
        == 0
    )
    assert parse_config(QWEN2).model.num_kv_heads == 4
    assert parse_config(named("qwen3", "Qwen3ForCausalLM")).model.head_dim == 128


def test_layers_with_windows_in_a_regular_pattern() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    used = {"use_sliding_window": True, "sliding_window": 9}
    model = parse_config({**QWEN2, **used, "layer_types": types}).model
    assert (model.sliding_window, model.global_every) == (9, 2)
    model = parse_config({**QWEN2, **used, "max_window_layers": 0}).model
    assert (model.sliding_window, model.global_every) == (9, 0)
    assert parse_config({**QWEN2, **used, "max_window_layers": 4}).model.sliding_window == 0
    assert parse_config({**QWEN2, "sliding_window": 9}).model.sliding_window == 0


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        LLAMA,
        {"architectures": ["LlamaForSequenceClassification"]},
        "architectures = ['LlamaForSequenceClassification']",
    ),
    (LLAMA, {"architectures": ["PhiForCausalLM"], "model_type": "phi"}, "architectures = ['PhiForCausalLM']"),
    (LLAMA, {"architectures": None, "model_type": "phi"}, "model_type = 'phi'"),
    (LLAMA, {"model_type": "mistral"}, "model_type = 'mistral': expected llama"),
    (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantised weights (gptq)"),
    (LLAMA, {"vision_config": {}}, "vision_config: the model has a part for vision"),
    (LLAMA, {"auto_map": {"AutoModel": "modeling.Mine"}}, "auto_map: a model with code of its own"),
    (LLAMA, {"hidden_act": "relu"}, "hidden_act = 'relu': there is no such model here; expected 'silu' or 'swish'"),
    (LLAMA, {"attention_bias": True}, "attention_bias = True: with mlp_bias = False: here"),
    (LLAMA, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type = 'longrope'"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "turns": 3}}, "rope_scaling: turns = 3"),
    (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.5}}, "attention_factor = 1.5"),
    (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate = False"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA, {"vocab_size": None}, "vocab_size is missing"),
    (LLAMA, {"num_hidden_layers": "32"}, "num_hidden_layers = '32': expected an integer"),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": 2}, "max_window_layers = 2: layers [0, 1] see all"),
    (QWEN2, {"layer_types": ["chunked_attention"] * 4}, "layer_types = ['chunked_attention'"),
    (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    (
        GEMMA3,
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "sliding_attention is stretched",
    ),
    (QWEN3_MOE, {"mlp_only_layers": [2]}, "mlp_only_layers = [2]: layers [2] have no experts"),
    (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2: layers [0, 2] have no experts"),
    (QWEN3_MOE, {"attention_bias": True}, "attention_bias = True"),
]


@pytest.mark.parametrize(
    ("base", "change", "said"), REFUSED, ids=lambda v: next(iter(v)) if isinstance(v, dict) else ""
)
def test_what_has_no_setting_here_is_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert parse_config(base).unread == ()
    (tmp_path / "config.json").write_text(json.dumps({**base, **change}))
    with pytest.raises(ValueError, match=re.escape(said)) as e:
        read_config(tmp_path)
    assert str(e.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_fields_that_nobody_knows_are_told() -> None:
    assert parse_config({**LLAMA, "residual_multiplier": 0.2, "use_cache": True}).unread == ("residual_multiplier",)


@pytest.mark.parametrize(
    ("settings", "nearest", "said"),
    [
        ({"activation": Activation.geglu}, "Llama 2 and 3", "model.activation = 'geglu': expected swiglu"),
        ({"norm": Norm.layernorm}, "Llama 2 and 3", "model.norm = 'layernorm': expected rmsnorm"),
        ({"qkv_bias": True, "qk_norm": QkNorm.head}, "Qwen2", "model.qk_norm = 'head': expected none"),
        (
            {"num_experts": 4, "qk_norm": QkNorm.head, "router": Router.sigmoid, "shared_expert_ffn_size": 8},
            "Qwen3-MoE",
            "model.router = 'sigmoid': expected softmax; model.shared_expert_ffn_size = 8: expected 0",
        ),
    ],
)
def test_a_model_of_no_family_is_refused_with_what_keeps_it_from_the_nearest(
    settings: dict[str, Any], nearest: str, said: str
) -> None:
    with pytest.raises(ValueError, match="none of Hugging Face's families has this model") as e:
        write_config(replace(ModelConfig(), **settings))
    assert str(e.value).endswith(f"nearest is {nearest}: {said}")


def test_settings_that_nothing_reads_do_not_keep_a_model_from_its_family() -> None:
    idle = replace(ModelConfig(), router=Router.sigmoid, rope_factor=3.0, global_every=2, expert_ffn_size=9)
    family, written = write_config(idle)
    assert family.model_type == "llama"
    assert written["rope_scaling"] is None
    linear = replace(ModelConfig(), rope_scaling=RopeScaling.linear, rope_factor=3.0)
    assert write_config(linear)[1]["rope_scaling"] == {"rope_type": "linear", "factor": 3.0}


def test_what_has_no_setting_is_kept_from_the_config_that_it_is_like() -> None:
    like = parse_config({**LLAMA, "eos_token_id": 128001, "rope_parameters": {"rope_type": "default"}})
    _, written = write_config(replace(like.model, num_layers=2), like)
    assert (written["eos_token_id"], written["max_position_embeddings"]) == (128001, 131072)
    assert written["num_hidden_layers"] == 2
    assert "rope_parameters" not in written


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 0}, "model.num_layers=0: expected a positive number"),
        ({"rms_norm_eps": -1}, "model.norm_eps=-1.0: expected a positive number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 1000"),
        ({"rope_theta": float("nan")}, "rope_theta = nan"),
        ({"num_hidden_layers": 2**63}, "num_hidden_layers = 9223372036854775808"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures = "),
        ({"architectures": None, "model_type": ["llama"]}, "model_type = "),
    ],
)
def test_values_that_no_model_has_are_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: ") as refused:
        parse_config({**LLAMA, **change})
    assert said in str(refused.value)


def test_a_config_nested_without_end_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        read_config(tmp_path)
