"""A rank that dies in the middle of an exchange: the others learn that a peer is lost, and their state is whole."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import digest, make_context
from parity import configured
from stoker.conf.fields import build
from stoker.conf.layout import Layout
from stoker.conf.load import to_plain
from stoker.conf.schema import Config
from stoker.train.comm import PeerLostError, lost_peers
from stoker.train.grid import Membership, form
from stoker.train.loop import Trainer

# name -> (ranks, parallel, model, who dies, in which method of which class, steps that count as done then)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], int, str, int]] = {
    "the last rank of a pipeline, in a backward pass": (
        3,
        {"pipeline": 3, "pipeline_schedule": "1f1b"},
        {},
        2,
        "linear.WeightGradients.push",
        1,
    ),
    "the first rank of a pipeline, while others wait for its weights": (
        2,
        {"pipeline": 2, "pipeline_schedule": "zbv"},
        {"tied_embeddings": True},
        0,
        "parallel.pipeline._Stage.backward_weight_one_chunk",
        1,
    ),
    "where ZeRO-1 gathers what was updated": (3, {"data": "zero1"}, {}, 1, "parallel.zero1.Zero1.publish", 2),
    "where FSDP gathers weights": (2, {"data": "fsdp"}, {}, 0, "parallel.fsdp._Gather.__call__", 1),
    "where tokens go to experts": (
        2,
        {"expert": 2},
        {"num_experts": 4},
        1,
        "comm.Communicator.all_to_all_async",
        1,
    ),
    "in a ring": (2, {"context": 2}, {}, 1, "comm.Communicator.shift", 1),
}


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lose(member: Membership, plain: dict[str, Any], run: str, victim: int, method: str) -> dict[str, Any]:
    """One step, and another in which `victim` dies in `method`."""
    config = build(Config, plain, (), [])
    grid = form(member, Layout.of(config, member.world_size), timeout=60)
    trainer = Trainer.build(config, grid, make_context(run))
    try:
        trainer.step()
        before = digest(trainer)
        if member.rank == victim:
            module, owner, name = method.rsplit(".", 2)
            setattr(getattr(importlib.import_module(f"stoker.train.{module}"), owner), name, _die)
        with pytest.raises(PeerLostError):
            trainer.run()
        return {"step": trainer.progress.step, "is_as_before": digest(trainer) == before}
    finally:
        trainer.close()
        grid.close()


@pytest.mark.parametrize("name", CASES)
def test_others_learn_of_it_and_keep_their_state(run_ranks: Any, tiny_data: Path, tmp_path: Path, name: str) -> None:
    world, parallel, model, victim, method, steps = CASES[name]
    fields = {"micro_batch": 1, "global_batch": 6, "eval_interval": 0}
    config = configured(tiny_data, train=fields, parallel=parallel, model=model)
    values = {"plain": to_plain(config), "run": str(tmp_path), "victim": victim, "method": method}
    results = run_ranks(world, _lose, may_die=(victim,), timeout=120, **values)
    assert results.pop(victim) is None
    assert [r["step"] for r in results] == [steps] * (world - 1)
    assert all(r["is_as_before"] for r in results) == (steps == 1)


@pytest.mark.parametrize(
    "message",
    [
        "Application timeout caused pair closure",
        "Connection reset by peer",
        "Timed out waiting 20000ms for send operation to complete",
    ],
)
def test_gloos_words_are_known(message: str) -> None:
    with pytest.raises(PeerLostError), lost_peers():
        raise RuntimeError(message)
