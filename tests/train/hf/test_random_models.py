"""Random small models of every family: what transformers computes is what we compute, in both directions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import batch_of, build, exported, filled, from_pretrained, relative, same_tensors, save, whole_weights
from stoker.conf.schema import Activation, Balance, ModelConfig, Norm, NormOrder, Positions, QkNorm, RopeScaling
from stoker.train.hf.config import differences, read_config
from stoker.train.hf.exporting import Options, export_hf
from stoker.train.hf.importing import import_hf

Settings = dict[str, Any]
LENGTH = 20


def sizes(r: random.Random) -> Settings:
    """Odd ones, and heads in groups."""
    kv, group, width = r.choice([1, 2, 3]), r.choice([1, 2, 3]), r.choice([6, 8, 10])
    heads = kv * group
    return {
        "vocab_size": r.randrange(37, 90),
        "hidden_size": heads * r.choice([5, 7, 8]),
        "num_layers": r.choice([1, 2, 3, 5]),
        "num_heads": heads,
        "num_kv_heads": kv,
        "head_dim": width,
        "ffn_size": r.randrange(17, 50),
        "norm_eps": r.choice([1e-5, 1e-6]),
        "tied_embeddings": r.random() < 0.5,
        "init_std": 0.15,
        "balance": Balance.none,
    }


def rope(r: random.Random) -> Settings:
    theta = {"rope_theta": r.choice([100.0, 10000.0, 5e5])}
    kind = r.choice(list(RopeScaling))
    if kind is RopeScaling.none:
        return theta
    scaling: Settings = {"rope_scaling": kind, "rope_factor": r.choice([2.0, 4.0, 7.5])}
    if kind is RopeScaling.llama3:
        scaling |= {
            "rope_original_length": 64,
            "rope_low_freq_factor": 1.0,
            "rope_high_freq_factor": r.choice([3.0, 4.0]),
        }
    if kind is RopeScaling.yarn:
        scaling |= {"rope_original_length": r.choice([64, 2048]), "rope_beta_fast": r.choice([16.0, 32.0])}
    return theta | scaling


def window(r: random.Random) -> Settings:
    return {"sliding_window": r.choice([0, 3, 7])}


def pattern(r: random.Random, layers: int) -> Settings:
    every = r.choice([0, 2, 3])
    return {**window(r), "global_every": every if every <= layers else 0}


def llama(r: random.Random) -> Settings:
    biases = r.random() < 0.5
    return {**sizes(r), **rope(r), "qkv_bias": biases, "linear_bias": biases}


def mistral(r: random.Random) -> Settings:
    return {**sizes(r), **rope(r), "sliding_window": r.choice([3, 7])}


def qwen2(r: random.Random) -> Settings:
    found = sizes(r)
    return {**found, **rope(r), **pattern(r, found["num_layers"]), "qkv_bias": True}


def qwen3(r: random.Random) -> Settings:
    found = sizes(r)
    return {**found, **rope(r), **pattern(r, found["num_layers"]), "qk_norm": QkNorm.head}


def olmo2(r: random.Random) -> Settings:
    return {**sizes(r), **rope(r), "qk_norm": QkNorm.full, "norm_order": NormOrder.post}


def gemma(r: random.Random) -> Settings:
    found = sizes(r)
    found["embedding_scale"] = found["hidden_size"] ** 0.5
    return {
        **found,
        **pattern(r, found["num_layers"]),
        "activation": Activation.geglu,
        "norm_order": NormOrder.both,
        "norm_offset": 1.0,
        "attention_scale": r.choice([7, 25, found["head_dim"]]) ** -0.5,
        "logit_softcap": r.choice([0.0, 2.0]),
    }


def gemma2(r: random.Random) -> Settings:
    return {**gemma(r), **rope(r), "attention_softcap": r.choice([0.0, 3.0])}


def gemma3(r: random.Random) -> Settings:
    found = gemma(r)
    local = {"rope_theta_local": 50.0} if found["sliding_window"] else {}
    return {**found, **rope(r), **local, "qk_norm": QkNorm.head}


def mixtral(r: random.Random) -> Settings:
    return {**sizes(r), **rope(r), **window(r), "num_experts": r.choice([4, 7]), "experts_per_token": r.choice([1, 3])}


def qwen3_moe(r: random.Random) -> Settings:
    found = sizes(r)
    return {
        **found,
        **rope(r),
        **window(r),
        "qk_norm": QkNorm.head,
        "num_experts": r.choice([4, 7]),
        "experts_per_token": r.choice([1, 3]),
        "expert_ffn_size": r.randrange(9, 20),
        "dense_layers": r.choice([0, 1]) if found["num_layers"] > 1 else 0,
        "router_normalize": r.random() < 0.5,
    }


def gpt2(r: random.Random) -> Settings:
    found = sizes(r)
    width = r.choice([3, 4, 9])
    return {
        **found,
        "num_kv_heads": found["num_heads"],
        "head_dim": None,
        "hidden_size": found["num_heads"] * width,
        "activation": Activation.gelu,
        "norm": Norm.layernorm,
        "positions": Positions.learned,
        "max_positions": r.choice([LENGTH, 33]),
        "qkv_bias": True,
        "linear_bias": True,
    }


FAMILIES: dict[str, Callable[[random.Random], Settings]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Olmo2ForCausalLM": olmo2,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "MixtralForCausalLM": mixtral,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "GPT2LMHeadModel": gpt2,
}


def model_of(family: str, seed: int) -> ModelConfig:
    return replace(ModelConfig(), **FAMILIES[family](random.Random(f"{family} {seed}")))


def tokens_of(config: ModelConfig) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def check_both_ways(family: str, seed: int, directory: Path) -> None:
    config = model_of(family, seed)
    tokens = tokens_of(config)
    ours = build(config)
    theirs = exported(ours, config, directory)
    assert type(theirs).__name__ == family
    with torch.no_grad():
        expected = ours.logits(batch_of(tokens))
        assert relative(theirs(tokens).logits, expected) < 1e-5
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
        changed = theirs(tokens).logits
        theirs.save_pretrained(directory / "changed")
        read = read_config(directory / "changed")
        assert differences(config, read.model) == {}
        assert read.unread == ()
        back = filled(read.model, whole_weights(directory / "changed"))
        found = back.logits(batch_of(tokens))
    assert relative(found, changed) < 1e-5
    assert relative(expected, changed) > 1e-3


def check_bf16(family: str, seed: int, directory: Path) -> None:
    config = model_of(family, seed)
    save(build(config), config, directory / "fp32")
    export_hf(directory / "fp32", directory / "one", Options(dtype=torch.bfloat16))
    import_hf(directory / "one", directory / "ours")
    export_hf(directory / "ours", directory / "two", Options())
    assert same_tensors(directory / "one", directory / "two") == []
    # And by way of transformers' own files.
    theirs = from_pretrained(directory / "two", dtype=torch.bfloat16)
    theirs.save_pretrained(directory / "three")
    import_hf(directory / "three", directory / "ours3")
    export_hf(directory / "ours3", directory / "four", Options())
    assert same_tensors(directory / "three", directory / "four") == []
    assert same_tensors(directory / "one", directory / "four") == []


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_both_ways(family: str, tmp_path: Path) -> None:
    check_both_ways(family, 0, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_goes_round_without_a_bit_changed(family: str, tmp_path: Path) -> None:
    check_bf16(family, 1, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_many_models_are_the_same_both_ways(family: str, seed: int, tmp_path: Path) -> None:
    check_both_ways(family, seed, tmp_path)
    check_bf16(family, seed, tmp_path / "bf16")
