"""Rules for a mixture of experts: a golden line for every rule, and silence for what fits."""

from __future__ import annotations

from typing import Any

import pytest
from stoker.conf.checks import check
from stoker.conf.fields import build, lookup
from stoker.conf.problems import Problem
from stoker.conf.schema import Config, DataSource


def lines(fields: dict[str, Any]) -> list[str]:
    """Problems of a model with eight experts on eight processes, where nothing else is wrong."""
    config = Config()
    config.data.sources = [DataSource("/data/a")]
    config.model.num_experts, config.cluster.procs_per_node, config.cluster.cpus_per_task = 8, 8, 8
    for field, value in fields.items():
        *path, name = field.split(".")
        owner: Any = config
        for part in path:
            owner = getattr(owner, part)
        found: list[Problem] = []
        setattr(owner, name, build(lookup(field.split(".")), value, (field,), found, complete=False))
        assert found == []
    return [f"{p.severity[0]} {p}" for p in check(config, files=False)]


RULES: list[tuple[dict[str, Any], list[str]]] = [
    ({"train.global_batch": 32}, []),
    ({"parallel.expert": 8}, []),
    ({"parallel.expert": 4, "parallel.tensor": 4, "model.balance": "bias", "model.balance_rate": 0.1}, []),
    ({"model.num_experts": -1}, ["e model.num_experts=-1: expected 0 or a positive number"]),
    ({"model.experts_per_token": 0}, ["e model.experts_per_token=0: expected a positive number"]),
    ({"model.experts_per_token": 9}, ["e model.experts_per_token=9: there are only model.num_experts=8"]),
    ({"model.dense_layers": 4}, [
        "e model.dense_layers=4: leaves none of model.num_layers=4 to the experts; set model.num_experts=0 for that",
    ]),
    ({"model.linear_bias": True}, [
        "e model.linear_bias=true: experts have no biases; set it to false with model.num_experts",
    ]),
    ({"model.num_experts": 6, "parallel.expert": 4}, [
        "e parallel.expert=4: does not divide model.num_experts=6; nearest that work: 2 or 3",
    ]),
    ({"parallel.tensor": 2, "parallel.sequence": False}, [
        "e parallel.sequence=false: with experts and parallel.tensor > 1 each rank routes tokens of its own, so they "
        "must be cut: set true",
    ]),
    ({"model.num_experts": 0, "parallel.expert": 2}, [
        "e parallel.expert=2: there are no experts to share: set model.num_experts, or 1 here",
    ]),
    ({"model.num_experts": 0, "model.router": "sigmoid"}, [
        "w model.router=sigmoid: has no effect: the model has no experts (model.num_experts=0)",
    ]),
    ({"model.balance": "bias", "model.balance_weight": 0.5}, [
        "w model.balance_weight=0.5: has no effect: model.balance=bias does not read it, loss does",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), RULES, ids=lambda value: str(value)[:60])
def test_a_rule_for_experts(fields: dict[str, Any], expected: list[str]) -> None:
    fields = {"train.global_batch": 32, **fields}
    assert lines(fields) == expected
