"""What goes, what stays."""

from __future__ import annotations

import errno
import os

import pytest
from state_ranks import make_entries, make_job
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.verification import verify_directory


def steps(run: RunDir) -> list[int]:
    return [name.step for name in run.all_checkpoints()]


def test_a_save_leaves_the_newest_valid_ones_and_no_trace_of_the_others(run: RunDir) -> None:
    checkpointer = make_job(run, 1).checkpointer(keep=2)
    for step in (10, 20, 30):
        checkpointer.save(step, make_entries(0), {})
    assert steps(run) == [30, 20]
    (run.checkpoint(CheckpointName(30, 1)) / "manifest.json").unlink()
    checkpointer.save(40, make_entries(0), {})
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
    checkpointer = job.checkpointer(keep=2)
    assert checkpointer.restore(make_entries(0)).name.step == 10
    checkpointer.save(30, make_entries(0), {})
    assert steps(run) == [30, 20, 10]


def test_a_save_in_haste_removes_nothing(run: RunDir) -> None:
    checkpointer = make_job(run, 1).checkpointer(keep=1)
    checkpointer.save(10, make_entries(0), {})
    checkpointer.begin(20, make_entries(0), {}, prune=False)
    checkpointer.finish()
    assert steps(run) == [20, 10]
    checkpointer.save(30, make_entries(0), {})
    assert steps(run) == [30]


def test_a_checkpoint_goes_in_one_rename(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    make_job(run, 1).checkpointer().save(10, make_entries(0), {})
    renamed = []
    original = os.rename

    def rename(source: object, target: object) -> None:
        original(source, target)
        renamed.append((os.path.basename(source), os.path.basename(target)))
        if "deleting" in str(target):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))  # as if the machine went down right after it

    monkeypatch.setattr(os, "rename", rename)
    make_job(run, 1).checkpointer(keep=1).save(20, make_entries(0), {})
    monkeypatch.undo()
    assert [source for source, _ in renamed][1:] == ["step-00000010-a0001"]
    assert renamed[1][1].startswith(".tmp-deleting-step-00000010-a0001-")
    assert steps(run) == [20]
    make_job(run, 1).checkpointer().save(30, make_entries(0), {})
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-00000020-a0001", "step-00000030-a0001"]


def test_the_best_and_those_at_regular_steps_stay(run: RunDir) -> None:
    checkpointer = make_job(run, 1).checkpointer(keep=1, keep_every=30, keep_best=1)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5), (50, 2.5)):
        checkpointer.save(step, make_entries(0), {"validation": {"step": step, "loss": loss}})
    assert steps(run) == [50, 30, 20]


def test_nothing_goes_while_storage_does_not_say_what_is_good(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(run, 1)
    checkpointer = job.checkpointer(keep=1, keep_every=10)
    for step in (10, 15):
        checkpointer.save(step, make_entries(0), {})
    original = os.stat

    def stat(path: object, *rest: object, **more: object) -> os.stat_result:
        if "step-00000010-a0001/shard" in str(path):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return original(path, *rest, **more)

    monkeypatch.setattr(os, "stat", stat)
    checkpointer.save(20, make_entries(0), {})
    assert steps(run) == [20, 15, 10]
    (failed,) = [e for e in job.events if e["event"] == "prune_failed"]
    assert "Input/output error" in failed["error"]
    monkeypatch.undo()
    checkpointer.save(25, make_entries(0), {})
    assert steps(run) == [25, 20, 10]


def test_one_that_verify_found_bad_does_not_count(run: RunDir) -> None:
    checkpointer = make_job(run, 1).checkpointer(keep=2)
    for step in (10, 20):
        checkpointer.save(step, make_entries(0), {})
    directory = run.checkpoint(CheckpointName(20, 1))
    with open(directory / "shard-00000.safetensors", "r+b") as f:
        f.write(b"\0" * 8)
    assert not verify_directory(directory).is_good
    checkpointer.save(30, make_entries(0), {})
    assert steps(run) == [30, 20, 10]
    checkpointer.save(40, make_entries(0), {})
    assert steps(run) == [40, 30]
