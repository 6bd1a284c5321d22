"""Muon on every layout: weights after three steps against one process, in float64, with what saves memory beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
from parity import configured

MUON: dict[str, dict[str, Any]] = {
    "optim": {"kind": "muon", "muon_lr": 0.02, "decay_embeddings": False, "lr_factors": {"norm": 0.5, "head": 2.0}},
    "model": {"qk_norm": "head"},
}
EXPERTS: dict[str, dict[str, Any]] = MUON | {
    "model": {"num_experts": 4, "dense_layers": 1, "shared_expert_ffn_size": 25, "dropout": 0.1},
    "memory": {"recompute": "selective"},
}

# name -> (ranks, parallel, other sections)
Case = tuple[int, dict[str, Any], dict[str, dict[str, Any]]]

CASES: dict[str, Case] = {
    "tensor 2 x zero1 2": (4, {"tensor": 2, "data": "zero1"}, MUON),
    "experts 2 over data 2 x tensor 2": (4, {"tensor": 2, "expert": 2}, EXPERTS),
}
# Run by `make test-all` only.
MORE: dict[str, Case] = {
    "tensor 4, key heads on two ranks each": (4, {"tensor": 4}, MUON),
    "fsdp 3": (3, {"data": "fsdp"}, MUON | {"train": {"global_batch": 6, "micro_batch": 1}}),
    "hsdp 2 x 2": (4, {"data": "hsdp", "data_shard": 2}, MUON),
    "pipeline 2 by zbv x zero1 2": (
        4,
        {"pipeline": 2, "pipeline_schedule": "zbv", "data": "zero1"},
        MUON | {"train": {"global_batch": 8, "micro_batch": 1}},
    ),
    "experts 4 over zero1 4": (4, {"data": "zero1", "expert": 4}, EXPERTS),
    "experts 2 over fsdp 4": (4, {"data": "fsdp", "expert": 2}, EXPERTS),
    "pipeline 2 by interleaved_zb, every second layer recomputed": (
        2,
        {"pipeline": 2, "pipeline_schedule": "interleaved_zb"},
        MUON | {"memory": {"recompute": "full", "recompute_every": 2}, "model": {"dropout": 0.1}},
    ),
    "fsdp 2, selectively recomputed": (2, {"data": "fsdp"}, MUON | {"memory": {"recompute": "selective"}}),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_a_layout_computes_what_one_process_computes(run_ranks: Any, tiny_data: Path, name: str) -> None:
    world, layout, other = (CASES | MORE)[name]
    expected = parity.run(None, configured(tiny_data, **other))
    found = parity.run(run_ranks, configured(tiny_data, **other, parallel=layout), world)
    parity.assert_same(found, expected)


@pytest.mark.full
def test_compiled_blocks_fill_the_buckets_of_zero1(run_ranks: Any, tiny_data: Path) -> None:
    """Gradients that autograd accumulates reach the sink by its hook, over several micro-steps."""
    other: dict[str, dict[str, Any]] = {
        "train": {"micro_batch": 2, "eval_interval": 0},
        "data": {"validation_tokens": 0},
    }
    expected = parity.run(None, configured(tiny_data, **other))
    compiled = configured(tiny_data, **other, parallel={"data": "zero1"}, kernels={"compile": True})
    parity.assert_same(parity.run(run_ranks, compiled, 2), expected)
