"""What a plan says of live tensors, against what ranks hold that train."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from harness import make_context, tiny_config
from stoker.conf.layout import Layout
from stoker.conf.load import from_plain, to_plain
from stoker.conf.schema import Config

# name -> (ranks, parallel, other sections). Sizes at which tensors outweigh their bookkeeping.
Case = tuple[int, dict[str, Any], dict[str, dict[str, Any]]]

MODEL = {"vocab_size": 509, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 160}
MOE = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 96}

CASES: dict[str, Case] = {
    "tensor 2 x data 2, zero1": (4, {"tensor": 2, "data": "zero1"}, {}),
    "pipeline 2, 1f1b": (2, {"pipeline": 2}, {}),
    "one rank, bfloat16": (1, {}, {"precision": {"params": "bfloat16"}}),
}
MORE: dict[str, Case] = {
    "fsdp 2, bfloat16": (2, {"data": "fsdp"}, {"precision": {"params": "bfloat16"}}),
    "ddp 2": (2, {}, {}),
    "zero1 4": (4, {"data": "zero1"}, {}),
    "pipeline 2, interleaved_zb": (2, {"pipeline": 2, "pipeline_schedule": "interleaved_zb"}, {}),
    "context 2 by ring": (2, {"context": 2}, {}),
    "one rank, recompute": (1, {}, {"memory": {"recompute": "full"}}),
    "experts 2 x data 2": (2, {"expert": 2}, {"model": MODEL | MOE}),
}


def configured(prefix: Path, case: Case) -> Config:
    _, parallel, other = case
    sections: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "data": {"seq_len": 64},
        "train": {"global_batch": 16, "micro_batch": 2},
        "precision": {},
        "memory": {},
        "parallel": parallel | {"bucket_mb": 0.1},
    }
    plain = to_plain(tiny_config(prefix, steps=3))
    for name, fields in (sections | other).items():
        plain[name] |= fields
    return from_plain(plain)


def choose_evenly(moe: Any, scores_TE: Any) -> Any:
    """In place of a router's choice: experts in turn, as a plan assumes."""
    import torch

    tokens, experts = scores_TE.shape
    each = moe.config.experts_per_token
    choice_TK = torch.arange(tokens * each).view(tokens, each) % experts
    weights_TK = scores_TE.gather(-1, choice_TK)
    return choice_TK, weights_TK / weights_TK.sum(-1, keepdim=True)


def measured(member: Any, plain: dict[str, Any], run: str) -> int:
    """Live bytes of one rank at the highest during its second step."""
    import torch
    from stoker.train.grid import form, single
    from stoker.train.loop import Trainer
    from stoker.train.model.moe import MixtureOfExperts
    from stoker.train.plan.live import LiveBytes

    MixtureOfExperts._choose = choose_evenly  # type: ignore[method-assign]
    config = from_plain(plain)
    grid = single() if member is None else form(member, Layout.of(config, member.world_size), timeout=120)
    is_sharded = config.parallel.data.value in ("fsdp", "hsdp")
    # Built before anything is watched: under a dispatch mode FSDP2 does not let go of the whole weights.
    trainer = Trainer.build(config, grid, make_context(run))
    next_batch = trainer._next_batch
    with LiveBytes(resizes=is_sharded) as live:
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
        live.watch(t for t in tensors if t.is_floating_point())
        del tensors

        # As to another device; here batches are views of what was read ahead.
        trainer._next_batch = lambda: next_batch()._each(torch.clone)  # type: ignore[method-assign]
        try:
            trainer.step()
            gc.collect()
            live.reset_peak()
            trainer.step()
            return live.peak
        finally:
            trainer.close()
            grid.close()


def planned(config: Config, world: int) -> list[int]:
    from stoker.train.plan.dry_run import dry_run

    layout = Layout.of(config, world)
    return [dry_run(config, layout, rank, "cpu", most=1 << 30).memory.total for rank in range(world)]


def both(run_ranks: Any, config: Config, world: int, run: Path) -> list[tuple[int, int]]:
    """(planned, measured) bytes by rank."""
    plain = to_plain(config)
    found = run_ranks(world, measured, timeout=240, plain=plain, run=str(run))
    return list(zip(planned(config, world), found, strict=True))


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_planned_bytes_are_those_of_a_run(run_ranks: Any, tiny_data: Path, tmp_path: Path, name: str) -> None:
    case = (CASES | MORE)[name]
    for rank, (plan, run) in enumerate(both(run_ranks, configured(tiny_data, case), case[0], tmp_path)):
        assert plan == pytest.approx(run, rel=0.05), f"rank {rank}: planned {plan:,}, measured {run:,}"


def test_a_compiled_model_is_planned_as_an_eager_one(tmp_path: Path) -> None:
    from stoker.train.plan.dry_run import dry_run

    plans = []
    for is_compiled in (False, True):
        config = configured(tmp_path / "data", (1, {}, {"kernels": {"compile": is_compiled}}))
        plans.append(dry_run(config, Layout.of(config, 1), 0).memory)
    assert plans[0] == plans[1]
