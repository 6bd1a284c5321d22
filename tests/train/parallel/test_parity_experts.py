"""Mixtures of experts on every layout: loss, gradients, norm, weights and biases against one process, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
from harness import metrics
from parity import configured

Sections = dict[str, dict[str, Any]]

MIXTRAL: Sections = {
    "model": {"num_experts": 4, "balance_weight": 0.1, "router_z_loss": 0.01},
    "data": {"mask_documents": True, "reset_positions": True},
}
DEEPSEEK: Sections = {
    "model": {
        "num_experts": 8,
        "experts_per_token": 3,
        "expert_ffn_size": 20,
        "shared_expert_ffn_size": 25,
        "dense_layers": 1,
        "router": "sigmoid",
        "router_scale": 1.5,
        "balance": "bias",
        "balance_rate": 0.05,
        "tied_embeddings": True,
    },
}
# Rows that only fill up: 6 samples over 4 ranks with 2 per micro-batch.
UNEVEN: Sections = MIXTRAL | {"train": {"global_batch": 6, "micro_batch": 2}}
# Fewer experts than ranks that hold the same ones: each is cut.
FEW: Sections = MIXTRAL | {"model": {"num_experts": 2, "expert_ffn_size": 48, "experts_per_token": 1}}

CASES: dict[str, tuple[int, dict[str, Any], Sections]] = {
    "data 2, experts on every rank": (2, {}, MIXTRAL),
    "expert 2 over data": (2, {"expert": 2}, DEEPSEEK),
    "expert 2 over tensor": (2, {"tensor": 2, "expert": 2}, MIXTRAL),
    "expert 2 over context": (2, {"context": 2, "expert": 2}, MIXTRAL),
    "expert 2 over data 4, padding": (4, {"expert": 2}, UNEVEN),
    "data 4, fsdp, experts cut": (4, {"data": "fsdp"}, FEW),
    "data 4, zero1, experts cut, muon": (4, {"data": "zero1"}, {**FEW, "optim": {"kind": "muon"}}),
    "expert 4 over data 2 x tensor 2, bias, shared expert": (4, {"tensor": 2, "expert": 4}, DEEPSEEK),
    "pipeline 2, split backward": (2, {"pipeline": 2, "pipeline_schedule": "zbv"}, DEEPSEEK),
}
# Run by `make test-all` only.
FULL: dict[str, tuple[int, dict[str, Any], Sections]] = {
    "zero1 2, expert 2": (2, {"data": "zero1", "expert": 2}, MIXTRAL),
    "pipeline 2 x expert 2 over tensor": (4, {"pipeline": 2, "tensor": 2, "expert": 2}, MIXTRAL),
    "pipeline 2 x expert 2 over data": (4, {"pipeline": 2, "expert": 2}, DEEPSEEK),
    "fsdp 4, expert 2": (4, {"data": "fsdp", "expert": 2}, DEEPSEEK),
    "expert 2 over data 4, zero1, padding": (4, {"data": "zero1", "expert": 2}, UNEVEN),
    "expert 2 over data 2 x tensor 2, fsdp": (4, {"tensor": 2, "expert": 2, "data": "fsdp"}, DEEPSEEK),
    "data 4, fsdp, experts cut, muon": (4, {"data": "fsdp"}, {**FEW, "optim": {"kind": "muon"}}),
    "hsdp 2 x 2, experts, muon": (4, {"data": "hsdp", "data_shard": 2}, {**FEW, "optim": {"kind": "muon"}}),
    "expert 4 over context 2 x tensor 2": (4, {"context": 2, "tensor": 2, "expert": 4}, DEEPSEEK),
}

Result = tuple[parity.Run, list[dict[str, Any]]]  # with the lines of metrics


@pytest.fixture(scope="module")
def alone(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run of a case on one process; cases that differ in their layout alone share it."""
    known: dict[str, Result] = {}

    def run(other: Sections) -> Result:
        if repr(other) not in known:
            directory = tmp_path_factory.mktemp("alone")
            known[repr(other)] = (
                parity.run(None, configured(tiny_data, **other), directory=directory),
                metrics(directory),
            )
        return known[repr(other)]

    return run


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_a_layout_computes_what_one_process_computes(
    run_ranks: Any, tiny_data: Path, tmp_path: Path, alone: Any, name: str
) -> None:
    world, layout, other = (CASES | FULL)[name]
    found = parity.run(run_ranks, configured(tiny_data, **other, parallel=layout), world, tmp_path)
    expected, lines = alone(other)
    parity.assert_same(found, expected)
    for line, wanted in zip(metrics(tmp_path), lines, strict=True):
        assert line["auxiliary_loss"] == pytest.approx(wanted["auxiliary_loss"], rel=1e-9)
        assert (line["highest_load"], line["lowest_load"]) == (wanted["highest_load"], wanted["lowest_load"])
    biases = [weight for key, weight in found.weights.items() if key.endswith("router_bias")]
    assert len(biases) == (3 if other is DEEPSEEK else 0)
    assert all(bias.any() for bias in biases)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_activations_change_nothing(run_ranks: Any, tiny_data: Path, alone: Any, kind: str) -> None:
    config = configured(tiny_data, **DEEPSEEK, parallel={"expert": 2}, memory={"recompute": kind})
    parity.assert_same(parity.run(run_ranks, config, 2), alone(DEEPSEEK)[0])
