"""A damaged checkpoint is never loaded: the next older one is, everywhere, and it is said."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from state_ranks import Crew, Job, blank, digests, make_entries, make_job
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.manifest import INDEX, MANIFEST, OFFSETS, read_manifest
from stoker.launcher.run.verification import verify
from stoker.train.state.checkpointer import SaveFailedError
from stoker.train.state.restorer import NoValidCheckpointError

SHARD, SIDECAR = "shard-00000.safetensors", "shard-00000.crc32"
OLD, NEW = CheckpointName(10, 1), CheckpointName(20, 1)


@pytest.fixture
def saved(run: RunDir) -> RunDir:
    """Two checkpoints: step 10 from seed 1, step 20 from seed 2."""
    checkpointer = make_job(run, 1).checkpointer()
    for step, seed in ((10, 1), (20, 2)):
        checkpointer.save(step, make_entries(seed), {})
    return run


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as f:
        f.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 4]))


def empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped byte in the first block": (lambda d: flip(d / SHARD, 5000), f"{SHARD}: block 0"),
    "a flipped byte in the last block": (lambda d: flip(d / SHARD, -1), f"{SHARD}: block 2"),
    "a flipped byte in a shard's header": (lambda d: flip(d / SHARD, 20), f"{SHARD}: block 0"),
    "a flipped byte in a sidecar": (lambda d: flip(d / SIDECAR, 3), f"{SIDECAR}: checksum"),
    "a flipped byte in the index": (lambda d: flip(d / INDEX, 40), f"{INDEX}: checksum"),
    "a flipped byte in the offsets": (lambda d: flip(d / OFFSETS, 9), f"{OFFSETS}: checksum"),
    "a flipped byte in the manifest": (lambda d: flip(d / MANIFEST, 90), MANIFEST),
    "a truncated shard": (lambda d: os.truncate(d / SHARD, 10_000_000), f"{SHARD}: 10000000 bytes"),
    "an empty shard": (lambda d: os.truncate(d / SHARD, 0), f"{SHARD}: 0 bytes"),
    "a missing shard": (lambda d: (d / SHARD).unlink(), f"{SHARD}: No such file"),
    "a missing sidecar": (lambda d: (d / SIDECAR).unlink(), f"{SIDECAR}: No such file"),
    "a missing manifest": (lambda d: (d / MANIFEST).unlink(), "the save was not finished"),
    "an empty directory": (empty, "the save was not finished"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_falls_back_to_the_older_one_and_says_so(saved: RunDir, damage: str, capsys: Any) -> None:
    act, said = DAMAGES[damage]
    act(saved.checkpoint(NEW))
    job, entries = make_job(saved, 1, generation=2), blank(make_entries(0))
    restored = job.checkpointer().restore(entries)
    assert restored is not None
    assert restored.name == OLD
    assert digests(entries) == digests(make_entries(1))
    rejected, event = job.events
    assert (rejected["event"], rejected["name"]) == ("checkpoint_rejected", "step-00000020-a0001")
    assert said in rejected["error"]
    assert f"{NEW} cannot be loaded, the one before it is tried: " in capsys.readouterr().err
    assert str(saved.checkpoint(NEW)) in rejected["error"]
    assert (event["event"], event["step"]) == ("restored", 10)


def test_checkpoints_on_a_file_system_that_is_away_are_not_none(saved: RunDir) -> None:
    elsewhere = saved.checkpoints.rename(saved.path.parent / "elsewhere")
    saved.checkpoints.symlink_to(elsewhere)
    elsewhere.rename(saved.path.parent / "away")
    with pytest.raises(
        NoValidCheckpointError, match=r"cannot say which checkpoints there are: .* leads to .*/elsewhere"
    ):
        make_job(saved, 2).checkpointer().restore(make_entries(0))


def test_a_checkpoint_of_another_run_is_not_taken(saved: RunDir) -> None:
    other = make_job(saved, 1, run_id="run-2")
    other.checkpointer().save(30, make_entries(3), {})
    job = make_job(saved, 1)
    restored = job.checkpointer().restore(make_entries(0))
    assert restored is not None
    assert restored.name == NEW
    assert "step-00000030-a0001: belongs to run run-2" in job.events[0]["error"]


def test_other_things_in_the_folder_are_left_alone_and_not_taken(saved: RunDir) -> None:
    for name in ("step-00000030", "latest", ".tmp-mine", "step-00000030-a0001.bak"):
        (saved.checkpoints / name).mkdir()
    (saved.checkpoints / "notes.txt").write_text("keep")
    before = {p.name for p in saved.checkpoints.iterdir()}
    job = make_job(saved, 1)
    restored = job.checkpointer().restore(make_entries(0))
    assert restored is not None
    assert restored.name == NEW
    assert {p.name for p in saved.checkpoints.iterdir()} == before


@pytest.mark.parametrize("damage", ["a flipped byte in the last block", "an empty directory"])
def test_if_none_is_left_training_does_not_start(saved: RunDir, damage: str) -> None:
    for name in (OLD, NEW):
        DAMAGES[damage][0](saved.checkpoint(name))
    job = make_job(saved, 1)
    with pytest.raises(NoValidCheckpointError) as e:
        job.checkpointer().restore(make_entries(0))
    for name in (OLD, NEW):
        assert str(saved.checkpoint(name)) in str(e.value)
    assert [event["event"] for event in job.events] == ["checkpoint_rejected", "checkpoint_rejected"]


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    saved: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> list[str]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(folder))

    monkeypatch.setattr(os, "listdir", broken)
    with pytest.raises(NoValidCheckpointError, match="Stale file handle"):
        make_job(saved, 1).checkpointer().restore(make_entries(0))


def restore_with_a_bad_disk(job: Job, bad_rank: int) -> Any:
    original = os.preadv

    def preadv(fd: int, buffers: Any, at: int) -> int:
        file = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if job.grid.rank == bad_rank and at and file.parent.name == str(NEW):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, buffers, at)

    os.preadv = preadv
    entries = blank(make_entries(0))
    restored = job.checkpointer().restore(entries)
    return None if restored is None else [str(restored.name), digests(entries)]


def test_a_read_error_on_one_rank_makes_all_fall_back_together(crew: Crew, saved: RunDir) -> None:
    results = crew.run(restore_with_a_bad_disk, saved, 2, bad_rank=1)
    for result in results:
        assert result.value == [str(OLD), digests(make_entries(1))], result.text
    rejected = results[0].events[0]
    assert rejected["error"].startswith("rank 1 on ")
    assert rejected["error"].endswith(f"{saved.checkpoint(NEW) / SHARD}: Input/output error")
    assert results[1].events == []


def restore_and_save(job: Job, step: int, seed: int) -> Any:
    checkpointer = job.checkpointer()
    restored = checkpointer.restore(make_entries(0))
    checkpointer.save(step, job.entries(seed), {})
    return str(restored.name)


def test_a_damaged_one_is_replaced_when_its_step_is_reached_again(crew: Crew, saved: RunDir) -> None:
    flip(saved.checkpoint(NEW) / SHARD, -1)
    results = crew.run(restore_and_save, saved, 2, generation=2, step=20, seed=2)
    assert [r.value for r in results] == [str(OLD)] * 2
    assert verify(saved.checkpoint(NEW)).generation == 2
    assert {p.name for p in saved.checkpoints.iterdir()} == {str(OLD), str(NEW)}


def test_what_this_process_saved_and_then_found_damaged_is_saved_again(run: RunDir) -> None:
    checkpointer = make_job(run, 1).checkpointer()
    for step, seed in ((10, 1), (20, 2)):
        checkpointer.save(step, make_entries(seed), {})
    flip(run.checkpoint(NEW) / SHARD, -1)
    assert checkpointer.restore(make_entries(0)).name == OLD
    checkpointer.save(20, make_entries(2), {})
    verify(run.checkpoint(NEW))


@pytest.mark.parametrize(("is_damaged", "generation"), [(False, 1), (True, 2)])
def test_what_is_found_under_the_name_stays_only_if_it_verifies(
    saved: RunDir, is_damaged: bool, generation: int
) -> None:
    if is_damaged:
        flip(saved.checkpoint(NEW) / SHARD, -1)
    make_job(saved, 1, generation=2).checkpointer().save(20, make_entries(2), {})
    assert verify(saved.checkpoint(NEW)).generation == generation
    assert {p.name for p in saved.checkpoints.iterdir()} == {str(OLD), str(NEW)}


def test_a_whole_one_of_another_run_under_the_name_is_neither_replaced_nor_taken_for_ours(saved: RunDir) -> None:
    directory = saved.checkpoint(NEW)
    replace(read_manifest(directory), run="another").write(directory)
    with pytest.raises(SaveFailedError, match=r"20-a0001: a checkpoint of another run \(another\) has this name"):
        make_job(saved, 1, generation=2).checkpointer().save(20, make_entries(2), {})
    assert verify(directory).run == "another"
    assert [str(name) for name in saved.all_checkpoints()] == [str(NEW), str(OLD)]
