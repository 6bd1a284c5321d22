"""Pipelines of the whole trainer against one process, in float64: loss, every gradient, norm, weights, validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
from harness import metrics
from parity import configured

# name -> (ranks, parallel, other sections)
Case = tuple[int, dict[str, Any], dict[str, dict[str, Any]]]
TIED = {"model": {"tied_embeddings": True}}
EXPERTS = {"num_experts": 4, "dense_layers": 1}


def pipeline(schedule: str, size: int = 2, **fields: Any) -> dict[str, Any]:
    return {"pipeline": size, "pipeline_schedule": schedule, **fields}


CASES: dict[str, Case] = {
    "1f1b, tied, layers as written": (2, pipeline("1f1b", pipeline_layers="1,3"), TIED),
    "zbv, tied, documents masked, uneven batch": (
        2,
        pipeline("zbv"),
        {**TIED, "data": {"mask_documents": True, "reset_positions": True}, "train": {"global_batch": 5}},
    ),
    "interleaved_zb, fsdp over 2, tied": (
        4,
        pipeline("interleaved_zb", data="fsdp"),
        {**TIED, "train": {"micro_batch": 1}},
    ),
    "dualpipev, zero1 and experts over 2": (
        4,
        pipeline("dualpipev", data="zero1", expert=2),
        {"model": EXPERTS, "train": {"micro_batch": 1}},
    ),
}

# Run by `make test-all` only.
MORE: dict[str, Case] = {
    "gpipe, other micro-batches than stages": (2, pipeline("gpipe"), {"train": {"global_batch": 6}}),
    "1f1b on 4": (4, pipeline("1f1b", 4), {}),
    "interleaved on 4": (4, pipeline("interleaved", 4), {"model": {"num_layers": 9}, "train": {"micro_batch": 1}}),
    "interleaved, experts": (2, pipeline("interleaved"), {"model": {**EXPERTS, "balance": "bias"}}),
    "interleaved_zb, tied, ddp over 2": (4, pipeline("interleaved_zb"), {**TIED, "train": {"micro_batch": 1}}),
    "zbv on 4, tied": (4, pipeline("zbv", 4), {"model": {"tied_embeddings": True, "num_layers": 8}}),
    "zbv, tensor 2": (4, pipeline("zbv", tensor=2), {}),
    "zbv, everything recomputed, dropout": (
        2,
        pipeline("zbv"),
        {"memory": {"recompute": "full"}, "model": {"dropout": 0.1}},
    ),
    "zbv, hsdp over 2 x 2": (8, pipeline("zbv", data="hsdp", data_shard=2), {"train": {"micro_batch": 1}}),
    "dualpipev on 4": (4, pipeline("dualpipev", 4), {"model": {"num_layers": 8}, "train": {"micro_batch": 1}}),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_a_pipeline_computes_what_one_process_computes(run_ranks: Any, tiny_data: Path, alone: Any, name: str) -> None:
    world, layout, other = (CASES | MORE)[name]
    found = parity.run(run_ranks, configured(tiny_data, **other, parallel=layout), world)
    parity.assert_same(found, alone(other))


def test_two_runs_have_the_same_bits_and_say_how_long_ranks_waited(
    run_ranks: Any, tiny_data: Path, tmp_path: Path
) -> None:
    config = configured(tiny_data, precision={"params": "float32"}, parallel=pipeline("interleaved_zb"))
    runs = [parity.run(run_ranks, config, 2, tmp_path / name) for name in ("one", "two")]
    assert runs[0].losses == runs[1].losses
    assert {n: (w == runs[1].weights[n]).all() for n, w in runs[0].weights.items()} == dict.fromkeys(
        runs[0].weights, True
    )
    assert all(0.0 < line["bubble"] < 1.0 for line in metrics(tmp_path / "one"))
