"""What goes, what stays."""

from __future__ import annotations

import os

import pytest
from state_ranks import make_entries, make_job
from stoker.launcher.run.layout import CheckpointName, RunDir


def steps(run: RunDir) -> list[int]:
    return [name.step for name in run.all_checkpoints()]


def test_prune_leaves_the_newest_valid_ones_and_no_trace_of_the_others(run: RunDir) -> None:
    checkpointer = make_job(run, 1).checkpointer(keep=2)
    for step in (10, 20, 30, 40):
        checkpointer.save(step, make_entries(0), {})
    (run.checkpoint(CheckpointName(30, 1)) / "manifest.json").unlink()
    checkpointer.prune()
    assert steps(run) == [40, 30, 20]
    assert len(list(run.checkpoints.iterdir())) == 3


def test_one_that_turned_out_bad_does_not_count(run: RunDir) -> None:
    job = make_job(run, 1)
    for step in (10, 20):
        job.checkpointer().save(step, make_entries(0), {})
    shard = run.checkpoint(CheckpointName(20, 1)) / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    checkpointer = job.checkpointer(keep=1)
    assert checkpointer.restore(make_entries(0)).name.step == 10
    checkpointer.prune()
    assert steps(run) == [20, 10]


def test_nothing_is_removed_before_one_is_proven_good(run: RunDir) -> None:
    for step in (10, 20):
        make_job(run, 1).checkpointer().save(step, make_entries(0), {})
    make_job(run, 1).checkpointer(keep=1).prune()
    assert steps(run) == [20, 10]


def test_a_checkpoint_goes_in_one_rename(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = make_job(run, 1).checkpointer(keep=1)
    for step in (10, 20):
        checkpointer.save(step, make_entries(0), {})
    renamed = []
    original = os.rename

    def rename(source: object, target: object) -> None:
        original(source, target)
        renamed.append((os.path.basename(source), os.path.basename(target)))
        raise KeyboardInterrupt  # killed right after it

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.prune()
    monkeypatch.undo()
    assert [source for source, _ in renamed] == ["step-00000010-a0001"]
    assert renamed[0][1].startswith(".tmp-deleting-step-00000010-a0001-")
    assert steps(run) == [20]
    checkpointer.prune()
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-00000020-a0001"]
