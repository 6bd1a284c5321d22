"""The same mathematics on every layout: loss, every gradient, norm and weights against one process, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
from parity import configured

# name -> (ranks, parallel, other sections)
Case = tuple[int, dict[str, Any], dict[str, dict[str, Any]]]

# tiny_config has 4 query and 2 key heads, configured() a vocabulary of 67 and 50 inner features: nothing divides by 4.
EVERYTHING: dict[str, dict[str, Any]] = {
    "model": {"tied_embeddings": True, "qk_norm": "head", "dropout": 0.1, "z_loss": 1e-3},
    "data": {"mask_documents": True, "reset_positions": True},
}

# What the families add to the model, all at once where it goes together.
OLMO2 = {"norm_order": "post", "qk_norm": "full", "norm_offset": 0.5}
GEMMA = {
    "activation": "geglu",
    "norm_order": "both",
    "norm_offset": 1.0,
    "qk_norm": "head",
    "sliding_window": 7,
    "global_every": 2,
    "rope_theta_local": 100.0,
    "rope_scaling": "yarn",
    "rope_factor": 4.0,
    "rope_original_length": 64,
    "attention_scale": 0.3,
    "attention_softcap": 2.0,
    "logit_softcap": 3.0,
    "embedding_scale": 5.0,
    "tied_embeddings": True,
}
GPT2 = {
    "activation": "gelu",
    "norm": "layernorm",
    "positions": "learned",
    "max_positions": 16,
    "qkv_bias": True,
    "linear_bias": True,
    "tied_embeddings": True,
}

CASES: dict[str, Case] = {
    "ddp 2": (2, {}, {}),
    "zero1 4, everything, uneven batch": (
        4,
        {"data": "zero1"},
        {**EVERYTHING, "train": {"global_batch": 6, "micro_batch": 1}},
    ),
    "fsdp 2, everything, reduced in every micro-step": (
        2,
        {"data": "fsdp", "reduce_each": True},
        {**EVERYTHING, "train": {"global_batch": 6, "micro_batch": 1}},
    ),
    "hsdp 2 x 2": (4, {"data": "hsdp", "data_shard": 2}, {"train": {"micro_batch": 1}}),
    "ddp 4, documents masked, uneven batch": (
        4,
        {},
        {"data": {"mask_documents": True, "reset_positions": True}, "train": {"global_batch": 6, "micro_batch": 1}},
    ),
    "context 2 by ring, dropout": (2, {"context": 2}, {"model": {"dropout": 0.1}}),
    "context 4 by ring, documents, window, soft cap": (
        4,
        {"context": 4},
        {
            "data": {"mask_documents": True, "reset_positions": True, "seq_len": 40},
            "model": {"sliding_window": 17, "attention_softcap": 2.0},
        },
    ),
    "context 2 by ulysses x ddp 2, documents": (
        4,
        {"context": 2, "context_method": "ulysses"},
        {"data": {"mask_documents": True}, "train": {"micro_batch": 1}},
    ),
    "tensor 2": (2, {"tensor": 2}, {}),
    "tensor 2 without sequence, everything": (2, {"tensor": 2, "sequence": False}, EVERYTHING),
    "tensor 4, key heads on two ranks each, everything": (4, {"tensor": 4}, EVERYTHING),
    "tensor 2 x data 2, everything": (4, {"tensor": 2}, EVERYTHING),
    "tensor 2 x context 2, everything": (4, {"tensor": 2, "context": 2}, EVERYTHING),
    "tensor 4, key heads on two ranks each, norm of all heads": (4, {"tensor": 4}, {"model": OLMO2}),
    "tensor 2 x context 2, gemma": (4, {"tensor": 2, "context": 2}, {"model": GEMMA}),
    "tensor 2 x context 2, gpt2": (4, {"tensor": 2, "context": 2}, {"model": GPT2}),
    "tensor 2, recomputed": (2, {"tensor": 2}, {"memory": {"recompute": "full"}, "model": {"dropout": 0.1}}),
    "tensor 2 x zero1 2, gpt2": (4, {"tensor": 2, "data": "zero1"}, {"model": GPT2}),
    "tensor 2 x fsdp 2, uneven batch": (
        4,
        {"tensor": 2, "data": "fsdp"},
        {"train": {"global_batch": 6, "micro_batch": 1}},
    ),
    "tensor 2 x interleaved_zb, gpt2": (
        4,
        {"tensor": 2, "pipeline": 2, "pipeline_schedule": "interleaved_zb"},
        {"model": GPT2},
    ),
}

# Run by `make test-all` only.
MORE: dict[str, Case] = {
    "tensor 2 x context 2 by ulysses": (4, {"tensor": 2, "context": 2, "context_method": "ulysses"}, EVERYTHING),
    "context 4 by ulysses, key heads on two ranks each": (4, {"context": 4, "context_method": "ulysses"}, EVERYTHING),
    "fsdp 2 x context 2": (4, {"data": "fsdp", "context": 2}, EVERYTHING),
    "fsdp 2 x 1f1b, reduced in every micro-step": (
        4,
        {"data": "fsdp", "pipeline": 2, "reduce_each": True},
        {**EVERYTHING, "train": {"micro_batch": 1}},
    ),
    "pipeline 2 by interleaved_zb x context 2, gemma": (
        4,
        {"pipeline": 2, "pipeline_schedule": "interleaved_zb", "context": 2},
        {"model": GEMMA, "data": EVERYTHING["data"]},
    ),
    "context 2, recomputed": (2, {"context": 2}, {"memory": {"recompute": "full"}, **EVERYTHING}),
    "context 2 by ulysses x experts 4": (
        4,
        {"context": 2, "context_method": "ulysses", "expert": 4},
        {"model": {"num_experts": 4, "dense_layers": 1}},
    ),
    "zero1 2 x context 2 by ulysses": (4, {"data": "zero1", "context": 2, "context_method": "ulysses"}, EVERYTHING),
    "tensor 4 without sequence, norm of all heads": (4, {"tensor": 4, "sequence": False}, {"model": OLMO2}),
    "tensor 4, gemma, documents": (4, {"tensor": 4}, {"model": GEMMA, "data": EVERYTHING["data"]}),
    "tensor 2, selectively recomputed": (2, {"tensor": 2}, {"memory": {"recompute": "selective"}, "model": GPT2}),
    "tensor 2 x fsdp 2, recomputed": (
        4,
        {"tensor": 2, "data": "fsdp"},
        {"memory": {"recompute": "full"}, **EVERYTHING},
    ),
    "tensor 2 without sequence x 1f1b, gpt2": (
        4,
        {"tensor": 2, "sequence": False, "pipeline": 2, "pipeline_schedule": "1f1b"},
        {"model": GPT2},
    ),
    "tensor 2 x dualpipev x zero1 2, everything": (
        8,
        {"tensor": 2, "pipeline": 2, "pipeline_schedule": "dualpipev", "data": "zero1"},
        {**EVERYTHING, "train": {"micro_batch": 1}},
    ),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_a_layout_computes_what_one_process_computes(run_ranks: Any, tiny_data: Path, alone: Any, name: str) -> None:
    world, layout, other = (CASES | MORE)[name]
    found = parity.run(run_ranks, configured(tiny_data, **other, parallel=layout), world)
    parity.assert_same(found, alone(other))


IN_FLOAT32: dict[str, Case] = {
    "tensor 2 x zbv, everything": (4, {"tensor": 2, "pipeline": 2, "pipeline_schedule": "zbv"}, EVERYTHING),
    "fsdp 2 x context 2, gemma": (4, {"data": "fsdp", "context": 2}, {"model": GEMMA}),
    "zero1 2 x tensor 2, experts over both": (
        4,
        {"data": "zero1", "tensor": 2, "expert": 4},
        {"model": {"num_experts": 4}},
    ),
}


@pytest.mark.parametrize("name", [*IN_FLOAT32, *(pytest.param(name, marks=pytest.mark.full) for name in CASES | MORE)])
def test_in_float32_a_layout_differs_by_rounding_only(run_ranks: Any, tiny_data: Path, alone: Any, name: str) -> None:
    world, layout, other = (CASES | MORE | IN_FLOAT32)[name]
    other = {**other, "precision": {"params": "float32"}, "optim": {"lr": 1e-3}}
    found = parity.run(run_ranks, configured(tiny_data, **other, parallel=layout), world)
    parity.assert_close(found, alone(other), lr=1e-3)
