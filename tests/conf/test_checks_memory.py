"""What optimizer, precision, memory and compiler refuse, and the reason they give."""

from __future__ import annotations

from typing import Any

import pytest
from stoker.conf.checks_memory import ROLES, memory_rules
from stoker.conf.schema import Config, DataParallel, Fp8, OptimizerKind, ParamDtype, Recompute


def problems(**fields: Any) -> dict[str, str]:
    config = Config()
    for name, value in fields.items():
        section, field = name.split("__")
        setattr(getattr(config, section), field, value)
    return {p.field: f"{p.severity}: {p.message}" for p in memory_rules(config)}


FP8: dict[str, Any] = {
    "precision__fp8": Fp8.tensorwise,
    "precision__params": ParamDtype.bfloat16,
    "cluster__gpus_per_node": 1,
}


def test_the_defaults_have_none() -> None:
    assert problems() == {}


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"optim__muon_lr": 0.0}, "optim.muon_lr", "error: expected a positive number"),
        ({"optim__muon_momentum": 1.0}, "optim.muon_momentum", "error: expected at least 0 and less than 1"),
        ({"optim__muon_steps": 0}, "optim.muon_steps", "error: expected 1 to 20"),
        ({"optim__lr_factors": {"embeding": 0.5}}, "optim.lr_factors.embeding", "did you mean embedding?"),
        ({"optim__lr_factors": {"norm": -1.0}}, "optim.lr_factors.norm", "error: expected 0"),
        ({"precision__stochastic_rounding": True}, "precision.stochastic_rounding", "precision.params=float32"),
        (
            {"memory__offload_optimizer": True, "cluster__gpus_per_node": 1, "optim__kind": OptimizerKind.muon},
            "memory.offload_optimizer",
            "error: Muon multiplies whole matrices",
        ),
        ({"memory__offload_optimizer": True}, "memory.offload_optimizer", "warning: has no effect without GPUs"),
        ({"memory__recompute_every": 0}, "memory.recompute_every", "error: expected 1"),
        ({"memory__recompute_every": 2}, "memory.recompute_every", "warning: has no effect"),
        ({"precision__fp8": Fp8.rowwise, "precision__params": ParamDtype.bfloat16}, "precision.fp8", "needs GPUs"),
        ({"precision__fp8": Fp8.rowwise, "cluster__gpus_per_node": 1}, "precision.fp8", "precision.params=float32"),
        ({**FP8, "model__ffn_size": 100}, "precision.fp8", "blocks of 16, and model.ffn_size are 100"),
        ({**FP8, "parallel__tensor": 2}, "precision.fp8", "parallel.tensor > 1"),
        ({**FP8, "parallel__data": DataParallel.hsdp}, "precision.fp8", "parallel.data=hsdp"),
    ],
)
def test_each_rule_says_why(fields: dict[str, Any], field: str, message: str) -> None:
    found = problems(**fields)
    assert list(found) == [field]
    assert message in found[field]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"memory__recompute": Recompute.selective}, "memory.recompute=selective"),
        ({"model__dropout": 0.1}, "model.dropout > 0"),
        ({"model__num_experts": 4}, "a mixture of experts"),
        (FP8, "precision.fp8"),
        ({"parallel__context": 2}, "parallel.context > 1"),
        ({"parallel__data": DataParallel.fsdp}, "parallel.data=fsdp"),
        ({"parallel__pipeline": 2, "parallel__pipeline_schedule": "zbv"}, "parallel.pipeline_schedule=zbv"),
    ],
)
def test_what_the_compiler_does_not_go_with(fields: dict[str, Any], reason: str) -> None:
    assert problems(**fields) == {}
    assert f"error: does not go with {reason}" in problems(kernels__compile=True, **fields)["kernels.compile"]


def test_the_roles_are_the_tables() -> None:
    from stoker.train.params import Role

    assert set(ROLES) == {role.value for role in Role}
