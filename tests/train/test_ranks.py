"""The trainer over several ranks: the same run on any number of them, and a lost peer that harms nothing."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import pytest
from harness import Ranks, digest, make_context, metrics, tiny_config, train
from stoker.launcher.run.heartbeat import Control, Save, Segment
from stoker.train.comm import PeerLostError
from stoker.train.grid import Membership, form
from stoker.train.loop import Trainer
from stoker.train.pulse import Pulse

STEPS = 20


def options(steps: int = STEPS, global_batch: int = 8, dropout: float = 0.0) -> dict[str, Any]:
    train_options = {"micro_batch": 2, "global_batch": global_batch, "eval_interval": 10, "eval_batches": 2}
    return {"steps": steps, "train": train_options, "model": {"dropout": dropout}}


def _run(
    member: Membership, prefix: str, run: str, attempt: int = 1, stop: int | None = None, **fields: Any
) -> dict[str, Any]:
    segment = Segment.create("test")
    if stop is not None:
        segment.write_control(Control(1, stop, True, Save.BOTH))
    pulse = Pulse(segment, 1)
    grid = form(member, on_collective=pulse.collective)
    try:
        trainer, ended = train(run, tiny_config(prefix, **options(**fields)), grid, attempt, pulse=pulse)
        return {"digest": digest(trainer), "step": ended.step, "saved": ended.saved_step}
    finally:
        grid.close()


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, tiny_data: Any) -> list[dict[str, Any]]:
    """Metrics of the run on one rank."""
    run = tmp_path_factory.mktemp("baseline")
    train(run, tiny_config(tiny_data, **options()))
    return metrics(run)


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same steps and counts, losses within 1e-5 and validation within 1e-6 of it."""
    for name in ("step", "tokens", "consumed_samples", "lr"):
        assert [line[name] for line in found] == [line[name] for line in expected]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=1e-5)
    assert [line["grad_norm"] for line in found] == pytest.approx([m["grad_norm"] for m in expected], rel=1e-3)
    evals = [[line["eval_loss"] for line in lines if "eval_loss" in line] for lines in (found, expected)]
    assert len(evals[0]) == len(evals[1])
    assert evals[0] == pytest.approx(evals[1], abs=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_losses_are_those_of_one_rank(
    run_ranks: Any, tmp_path: Any, tiny_data: Any, baseline: list[dict[str, Any]], size: int
) -> None:
    results = run_ranks(size, _run, prefix=str(tiny_data), run=str(tmp_path))
    assert len({r["digest"] for r in results}) == 1
    assert all(r["step"] == r["saved"] == STEPS for r in results)
    assert_close(metrics(tmp_path), baseline)


@pytest.mark.parametrize("fields", [{"global_batch": 5}, {"dropout": 0.2}], ids=["uneven batch", "dropout"])
def test_neither_uneven_batches_nor_dropout_depend_on_the_ranks(
    run_ranks: Any, tmp_path: Any, tiny_data: Any, fields: dict[str, Any]
) -> None:
    fields |= {"steps": 5}
    train(tmp_path / "one", tiny_config(tiny_data, **options(**fields)))
    run_ranks(3, _run, prefix=str(tiny_data), run=str(tmp_path / "three"), **fields)
    assert metrics(tmp_path / "three")[0]["tokens"] == fields.get("global_batch", 8) * 32
    assert_close(metrics(tmp_path / "three"), metrics(tmp_path / "one"))


def test_stopped_and_resumed_on_as_many_ranks_it_has_the_same_bits(
    run_ranks: Any, tmp_path: Any, tiny_data: Any
) -> None:
    whole, stopped = str(tmp_path / "whole"), str(tmp_path / "stopped")
    expected = run_ranks(2, _run, prefix=str(tiny_data), run=whole, steps=12)
    ended = run_ranks(2, _run, prefix=str(tiny_data), run=stopped, steps=12, stop=5)
    assert {(r["step"], r["saved"]) for r in ended} == {(5, 5)}
    resumed = run_ranks(2, _run, prefix=str(tiny_data), run=stopped, steps=12, attempt=2)
    assert resumed == expected
    lines = metrics(stopped) + metrics(stopped, attempt=2)
    assert [line["loss"] for line in lines] == [line["loss"] for line in metrics(whole)]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4)])
def test_a_run_resumed_on_another_number_of_ranks_goes_on_alike(
    run_ranks: Any, tmp_path: Any, tiny_data: Any, baseline: list[dict[str, Any]], before: int, after: int
) -> None:
    run_ranks(before, _run, prefix=str(tiny_data), run=str(tmp_path), stop=9)
    run_ranks(after, _run, prefix=str(tiny_data), run=str(tmp_path), attempt=2)
    assert_close(metrics(tmp_path) + metrics(tmp_path, attempt=2), baseline)


def _compiler_modules(member: Membership, prefix: str, run: str) -> list[str]:
    train(run, tiny_config(prefix, steps=2))
    return sorted(name for name in sys.modules if name in ("torch._dynamo", "torch._inductor", "sympy"))


def test_a_worker_does_not_import_the_compiler(tmp_path: Any, tiny_data: Any) -> None:
    """It costs two seconds in every worker, at every restart; torch imports it in surprising places."""
    ranks = Ranks(lean=True)
    try:
        assert ranks.run(1, _compiler_modules, prefix=str(tiny_data), run=str(tmp_path)) == [[]]
    finally:
        ranks.close()


def _lose_a_peer(member: Membership, prefix: str, run: str) -> dict[str, Any]:
    """Rank 1 dies in the backward pass of step 7; rank 0 goes on alone, in the same process."""
    config = tiny_config(prefix, steps=12, checkpoint={"interval": 4}, train={"micro_batch": 2})
    grid = form(member)
    trainer = Trainer.build(config, grid, make_context(run))
    if member.rank == 1:
        block = trainer.model.blocks["0"].ffn
        block.register_full_backward_hook(lambda *_: os._exit(1) if trainer.progress.step == 6 else None)
    digests = {}
    try:
        while True:
            digests[trainer.progress.step] = digest(trainer)
            trainer.step()
    except PeerLostError:
        lost = {"step": trainer.progress.step, "state_is_whole": digest(trainer) == digests[trainer.progress.step]}
        lost["consumed"] = trainer.progress.consumed_samples
    finally:
        trainer.close()
        grid.close()
    alone = form(replace(member, rank=0, world_size=1, generation=2))
    again, ended = train(run, config, alone, generation=2)
    return lost | {"finished": ended.finished, "digest": digest(again)}


def test_a_lost_peer_leaves_the_state_whole_and_the_rest_can_go_on(
    run_ranks: Any, tmp_path: Any, tiny_data: Any
) -> None:
    first, second = run_ranks(2, _lose_a_peer, may_die=(1,), prefix=str(tiny_data), run=str(tmp_path))
    assert second is None
    assert (first["step"], first["consumed"], first["state_is_whole"], first["finished"]) == (6, 48, True, True)
    assert [line["step"] for line in metrics(tmp_path, generation=2)] == list(range(5, 13))


def _again_in_the_same_processes(member: Membership, prefix: str, run: str) -> list[str]:
    """Two passes over new grids of the same ranks, as after a communicator was lost."""
    digests = []
    for generation, stop in ((1, 4), (2, None)):
        segment = Segment.create("test")
        if stop is not None:
            segment.write_control(Control(generation, stop, True, Save.BOTH))
        grid = form(replace(member, generation=generation))
        trainer, _ = train(
            run, tiny_config(prefix, **options(8)), grid, generation=generation, pulse=Pulse(segment, generation)
        )
        grid.close()
        digests.append(digest(trainer))
    return digests


def test_a_second_pass_in_the_same_processes_has_the_same_bits(run_ranks: Any, tmp_path: Any, tiny_data: Any) -> None:
    whole = run_ranks(2, _run, prefix=str(tiny_data), run=str(tmp_path / "whole"), steps=8)
    passes = run_ranks(2, _again_in_the_same_processes, prefix=str(tiny_data), run=str(tmp_path / "twice"))
    assert [p[1] for p in passes] == [r["digest"] for r in whole]


def _collectives(member: Membership, prefix: str, run: str, micro_batch: int) -> list[int]:
    """How many collectives each step began."""
    count = 0

    def begun() -> None:
        nonlocal count
        count += 1

    grid = form(member, on_collective=begun)
    trainer = Trainer.build(tiny_config(prefix, steps=4, train={"micro_batch": micro_batch}), grid, make_context(run))
    try:
        counts = []
        for _ in range(3):
            before = count
            trainer.step()
            counts.append(count - before)
        return counts
    finally:
        trainer.close()
        grid.close()


def test_accumulation_adds_no_communication(run_ranks: Any, tmp_path: Any, tiny_data: Any) -> None:
    once, four_times = (
        run_ranks(2, _collectives, prefix=str(tiny_data), run=str(tmp_path / str(n)), micro_batch=n) for n in (4, 1)
    )
    assert once == four_times
    assert len(set(once[0])) == 1
    assert once[0][0] > 2
