"""A gradient that is not finite on one rank alone: all ranks skip the same step, and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import digest, make_context
from parity import configured
from stoker.conf.fields import build
from stoker.conf.layout import Layout
from stoker.conf.load import to_plain
from stoker.conf.schema import Config
from stoker.train.grid import Membership, form
from stoker.train.loop import Trainer
from torch import Tensor

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "the last stage": ({"pipeline": 2, "data": "zero1"}, {}, 3),
    "a tensor rank of sharded weights": ({"tensor": 2, "data": "fsdp"}, {}, 1),
    "experts of one rank": ({"tensor": 2, "expert": 4, "data": "zero1"}, {"num_experts": 4}, 2),
}


def _poisoned(member: Membership, plain: dict[str, Any], run: str, victim: int) -> list[Any]:
    """A good step, one in which a single gradient of rank `victim` is not a number, and a good one."""
    config = build(Config, plain, (), [])
    grid = form(member, Layout.of(config, member.world_size), timeout=60)
    trainer = Trainer.build(config, grid, make_context(run))
    push, poisoned = trainer.queue.push, []

    def push_poison(weight: Tensor, add: Any) -> None:
        def spoil(buffer: Tensor, holds_sum: bool) -> None:
            add(buffer, holds_sum)
            buffer.view(-1)[-1] = float("nan")

        push(weight, add if poisoned or member.rank != victim else spoil)
        poisoned.append(True)

    try:
        trainer.step()
        before = digest(trainer)
        trainer.queue.push = push_poison  # type: ignore[method-assign]
        trainer.step()
        trainer.queue.push = push  # type: ignore[method-assign]
        progress = trainer.progress
        skipped = [progress.step, progress.updates, progress.bad_steps, digest(trainer) == before]
        trainer.step()
        return [*skipped, progress.updates, progress.bad_steps]
    finally:
        trainer.close()
        grid.close()


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_skip_a_step_that_is_bad_on_one(run_ranks: Any, tiny_data: Path, tmp_path: Path, name: str) -> None:
    parallel, model, victim = CASES[name]
    config = configured(tiny_data, train={"micro_batch": 1, "eval_interval": 0}, parallel=parallel, model=model)
    values = {"plain": to_plain(config), "run": str(tmp_path), "victim": victim}
    assert run_ranks(4, _poisoned, timeout=120, **values) == [[2, 1, 1, True, 2, 0]] * 4
