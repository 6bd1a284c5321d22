"""Checkpoints go from any layout to any other: the same tensors bit by bit, and the run goes on as on one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
from harness import metrics, train

# name -> (ranks, parallel); every model below fits every layout
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "ddp 2": (2, {}),
    "zero1 4": (4, {"data": "zero1"}),
    "fsdp 2": (2, {"data": "fsdp"}),
    "hsdp 2 x 2": (4, {"data": "hsdp", "data_shard": 2}),
    "tensor 2": (2, {"tensor": 2}),
    "tensor 4 x context 1": (4, {"tensor": 4}),
    "context 2": (2, {"context": 2}),
    "1f1b": (2, {"pipeline": 2, "pipeline_layers": "1,3"}),
    "zbv x zero1": (4, {"pipeline": 2, "pipeline_schedule": "zbv", "data": "zero1"}),
    "tensor 2 x fsdp 2": (4, {"tensor": 2, "data": "fsdp"}),
    "tensor 2 x interleaved": (4, {"tensor": 2, "pipeline": 2, "pipeline_schedule": "interleaved"}),
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tied_embeddings": True, "qk_norm": "head"},
    "gpt2": {"activation": "gelu", "norm": "layernorm", "positions": "learned", "max_positions": 16, "qkv_bias": True},
    "experts": {"num_experts": 4, "dense_layers": 1, "balance": "bias"},
}


def walk(seed: int, legs: int) -> list[str]:
    """A way through the layouts that ends where it began."""
    way = random.Random(seed).sample(list(LAYOUTS), legs)
    return [*way, way[0]]


def layouts_of(model: str, name: str) -> tuple[int, dict[str, Any]]:
    world, layout = LAYOUTS[name]
    if model == "experts" and "pipeline" not in layout and world > 1:
        layout = {**layout, "expert": 2}
    return world, layout


CASES = [
    pytest.param("tied", walk(1, 4), id="tied"),
    pytest.param("experts", walk(2, 3), id="experts"),
    *(
        pytest.param(model, walk(seed, 5), id=f"{model} {seed}", marks=pytest.mark.full)
        for model in MODELS
        for seed in range(3, 10)
    ),
]


@pytest.mark.parametrize(("model", "way"), CASES)
def test_state_goes_from_layout_to_layout_and_the_run_goes_on(
    run_ranks: Any, tiny_data: Path, tmp_path: Path, model: str, way: list[str]
) -> None:
    sections: dict[str, Any] = {
        "model": MODELS[model],
        "train": {"eval_interval": 0, "steps": 2 * len(way), "micro_batch": 1},
        "precision": {"params": "float32"},
        # Small steps, so that float32's rounding does not grow from step to step.
        "optim": {"lr": 1e-3},
    }
    for number, name in enumerate(way, 1):
        world, layout = layouts_of(model, name)
        config = parity.configured(tiny_data, **sections, parallel=layout)
        parity.leg(run_ranks, config, world, tmp_path, number, stop=2 * number)
    for number in range(2, len(way) + 1):
        before, after = parity.state(tmp_path, "end", number - 1), parity.state(tmp_path, "begin", number)
        assert {name: (v == after[name]).all() for name, v in before.items()} == dict.fromkeys(after, True)
    train(tmp_path / "alone", parity.configured(tiny_data, **sections))
    found = [line["loss"] for number in range(1, len(way) + 1) for line in metrics(tmp_path, number)]
    np.testing.assert_allclose(found, [line["loss"] for line in metrics(tmp_path / "alone")], rtol=1e-5)
