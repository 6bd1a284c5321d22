"""Fully sharded weights: what a rank holds between passes, and between micro-steps."""

from __future__ import annotations

from typing import Any

from harness import make_context, tiny_config
from stoker.conf.schema import DataParallel
from stoker.train.grid import Membership, form
from stoker.train.loop import Trainer
from stoker.train.parallel.fsdp import FullySharded


def _held(member: Membership, prefix: str, run: str) -> dict[str, Any]:
    """What is there after a step, and unsharded gradients after each of its backward passes."""
    parallel = {"data": DataParallel.fsdp, "reduce_each": True}
    config = tiny_config(prefix, steps=1, train={"micro_batch": 2, "global_batch": 8}, parallel=parallel)
    grid = form(member)
    trainer = Trainer.build(config, grid, make_context(run))
    share = trainer.data_parallel
    assert isinstance(share, FullySharded)
    between: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda *_: between.append(sum(b.unsharded is not None for b in share._buckets))
    )
    try:
        trainer.step()
        return {
            "unsharded bytes": sum(weight.untyped_storage().nbytes() for weight in share._slots),
            "shards": sum(shard.numel() for shard in share.shards.values()),
            "whole": trainer.table.numel,
            "between": between,
        }
    finally:
        trainer.close()
        grid.close()


def test_weights_are_freed_after_a_step_and_gradients_after_each_micro_step(
    run_ranks: Any, tmp_path: Any, tiny_data: Any
) -> None:
    ranks = run_ranks(2, _held, prefix=str(tiny_data), run=str(tmp_path))
    assert [rank["unsharded bytes"] for rank in ranks] == [0, 0]
    assert [rank["shards"] for rank in ranks] == [ranks[0]["whole"] // 2] * 2
    assert [rank["between"] for rank in ranks] == [[0, 0]] * 2  # at the begin of both micro-steps
