"""Storage that refuses: all ranks learn the same, nothing half-made stays, and the next save may succeed."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from state_ranks import Crew, Job, Result, make_entries, make_job
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.verification import verify
from stoker.train.state import persist_job
from stoker.train.state.checkpointer import SaveFailedError
from stoker.train.state.segment import Memory
from stoker.train.storage import posix


def save(job: Job, step: int) -> str:
    return str(job.checkpointer().save(step, job.entries(step), {}))


def fail_then_save(job: Job) -> list[str]:
    """What a loop does: go on with the older checkpoint, save again later."""
    checkpointer, limits = job.checkpointer(), resource.getrlimit(resource.RLIMIT_FSIZE)
    # Memory behind a descriptor counts as a file: it is there already.
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpointer.prepare(job.entries(20))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    try:
        checkpointer.save(20, job.entries(20), {})
        text = "saved"
    except SaveFailedError as e:
        text = str(e)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return [text, str(checkpointer.save(30, job.entries(30), {}))]


def names(run: RunDir) -> list[str]:
    return sorted(p.name for p in run.checkpoints.iterdir())


def check_all_failed(results: list[Result], rank: int, *said: str) -> None:
    texts = {r.text for r in results}
    assert {r.raised for r in results} == {"SaveFailedError"}
    assert len(texts) == 1
    text = texts.pop()
    assert text.startswith(f"checkpoint step-00000020-a0001 not saved: rank {rank} on ")
    for part in said:
        assert part in text
    assert [e["event"] for e in results[0].events] == ["checkpoint_failed"]
    assert results[0].events[0]["step"] == 20
    assert results[0].events[0]["error"] == text
    assert results[1].events == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_limit_on_one_rank_fails_all_alike_and_the_next_save_succeeds(crew: Crew, run: RunDir, rank: int) -> None:
    crew.run(save, run, 2, step=10)
    results = crew.run(fail_then_save, run, 2, file_limit=2**20, limited_rank=rank)
    for result in results:
        failed, saved = result.value
        assert f"rank {rank} on " in failed
        assert failed.endswith(f"/shard-0000{rank}.safetensors: File too large")
        assert saved == "step-00000030-a0001"
    assert results[0].value == results[1].value
    assert names(run) == ["step-00000010-a0001", "step-00000030-a0001"]
    for step in (10, 30):
        verify(run.checkpoint(CheckpointName(step, 1)))


@pytest.fixture
def small_disk(run: RunDir) -> Iterator[Path]:
    """A file system of 16 MiB under the checkpoints: one fits, two do not."""
    run.checkpoints.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(run.checkpoints)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount")
    yield run.checkpoints
    subprocess.run(["umount", "-l", str(run.checkpoints)], check=True)


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_fails_all_alike_and_leaves_the_older_checkpoint(crew: Crew, run: RunDir) -> None:
    crew.run(save, run, 2, step=10)
    results = crew.run(save, run, 2, step=20)
    assert {r.raised for r in results} == {"SaveFailedError"}
    assert results[0].text == results[1].text
    assert "No space left on device" in results[0].text
    assert names(run) == ["step-00000010-a0001"]
    verify(run.checkpoint(CheckpointName(10, 1)))


def test_a_disk_that_became_read_only_fails_all_alike(crew: Crew, run: RunDir, small_disk: Path) -> None:
    crew.run(save, run, 2, step=10)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    results = crew.run(save, run, 2, step=20)
    check_all_failed(results, 0, f"{small_disk}/.tmp-step-00000020-a0001-g0001-", ": Read-only file system")
    assert names(run) == ["step-00000010-a0001"]


def save_with_a_fault(job: Job, step: int, fault: str, rank: int) -> str:
    def fail(code: int, path: Any = None) -> None:
        raise OSError(code, os.strerror(code), *([] if path is None else [str(path)]))

    if job.grid.rank == rank:
        if fault == "fsync":
            os.fsync = lambda fd: fail(errno.EIO)
        elif fault == "memory":
            Memory.reserve = lambda self, size: fail_memory()
        elif fault == "index":
            persist_job.merge_index = lambda target, *rest: fail(errno.EDQUOT, "index.jsonl")
        elif fault == "rename":
            posix.give_name = lambda source, target, **_: fail(errno.EIO, target)
    return save(job, step)


def fail_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("fault", "rank", "said"),
    [
        ("fsync", 1, "shard-00001.safetensors: Input/output error"),
        ("memory", 1, "out of memory"),
        ("index", 0, "index.jsonl: Disk quota exceeded"),
        ("rename", 0, "checkpoints/step-00000020-a0001: Input/output error"),
    ],
)
def test_a_fault_at_any_stage_fails_all_alike_and_leaves_nothing(
    crew: Crew, run: RunDir, fault: str, rank: int, said: str
) -> None:
    crew.run(save, run, 2, step=10)
    results = crew.run(save_with_a_fault, run, 2, step=20, fault=fault, rank=rank)
    check_all_failed(results, rank, said)
    assert names(run) == ["step-00000010-a0001"]


def save_what_the_other_wrote_wrongly(job: Job) -> str:
    if job.grid.rank == 1:
        original = persist_job.write_small
        persist_job.write_small = lambda target, name, data: original(
            target, name, data[:-2] + b"x\n" if name.endswith(".part") else data
        )
    return save(job, 20)


def test_what_rank_0_reads_of_another_rank_is_checked(crew: Crew, run: RunDir) -> None:
    results = crew.run(save_what_the_other_wrote_wrongly, run, 2)
    check_all_failed(results, 0, "index-00001.part: not what its rank wrote")


def test_a_shard_that_shrank_before_it_was_published_is_not_published(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = persist_job.merge_index

    def shrink(target: Any, *rest: Any) -> Any:
        os.truncate(target._directory / "shard-00000.safetensors", 1000)
        return original(target, *rest)

    monkeypatch.setattr(persist_job, "merge_index", shrink)
    job = make_job(run, 1)
    with pytest.raises(SaveFailedError, match=r"shard-00000\.safetensors: 1000 bytes, expected"):
        job.checkpointer().save(20, make_entries(0), {})
    job.close()
    assert names(run) == []


def test_what_cannot_be_removed_is_reported_and_does_not_stop_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(run, 1)
    checkpointer = job.checkpointer(keep=1)
    checkpointer.save(10, make_entries(0), {})

    def broken(directory: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory))

    monkeypatch.setattr(posix, "remove_directory", broken)
    checkpointer.save(20, make_entries(0), {})
    assert [e["event"] for e in job.events] == ["checkpoint_saved", "prune_failed", "checkpoint_saved"]
    assert job.events[1]["error"] == f"{run.checkpoint(CheckpointName(10, 1))}: Input/output error"
