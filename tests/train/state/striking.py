"""What the tests have in common that strike a save at each of its system calls: before, and what must hold after."""

from __future__ import annotations

import errno

import pytest
import torch
from state_ranks import Job, digests, make_job, shared
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.verification import verify
from stoker.train.state.entry import Entry
from syscalls import is_possible

needs_kernel = pytest.mark.skipif(not is_possible(), reason="this kernel does not let a test answer system calls")
OLD, SAVED = "step-00000015-a0001", "step-00000020-a0001"
EVERY = [pytest.param(5, id="sample"), pytest.param(1, id="all", marks=pytest.mark.full)]
ERRORS = [
    pytest.param(errno.EIO, 5, id="EIO-sample"),
    pytest.param(errno.EIO, 1, id="EIO-all", marks=pytest.mark.full),
    pytest.param(errno.ENOSPC, 1, id="ENOSPC-all", marks=pytest.mark.full),
]
# The step that a later attempt saves while a writer is frozen; None: it has only begun.
TAKEN_OVER = [
    pytest.param(20, 11, id="same-step-sample"),
    pytest.param(20, 1, id="same-step-all", marks=pytest.mark.full),
    pytest.param(30, 1, id="another-step-all", marks=pytest.mark.full),
    pytest.param(None, 1, id="begun-all", marks=pytest.mark.full),
]


def small(seed: int) -> list[Entry]:
    g = torch.Generator().manual_seed(seed)
    tensors = {"model/w": torch.randn(640, 500, generator=g), "optim/v": torch.randn(300_000, generator=g)}
    return [Entry.whole(name, tensor) for name, tensor in tensors.items()]


def held(job: Job, seed: int) -> list[Entry]:
    return shared(small(seed), job.grid.rank, job.grid.world_size)


def make_older(job: Job) -> None:
    checkpointer = job.checkpointer(keep=3)
    for step in (10, 15):
        checkpointer.save(step, held(job, step), {})


def check_old_or_new(run: RunDir) -> str:
    """What the next attempt finds, as bytes; that it sweeps, saves and prunes. Returns what it has restored."""
    for name in run.all_checkpoints():
        verify(run.checkpoint(name))
    claim(run)
    job = make_job(run, 2)
    checkpointer, entries = job.checkpointer(keep=2), small(0)
    restored = checkpointer.restore(entries)
    assert restored is not None
    assert restored.name.step in (15, 20)
    assert digests(entries) == digests(small(restored.name.step))
    assert [e["event"] for e in job.events] == ["restored"], "nothing had to be passed over"
    assert [p.name for p in run.checkpoints.iterdir() if p.name.startswith(".")] == []
    checkpointer.save(30, small(30), {})
    assert [str(n) for n in run.all_checkpoints()] == ["step-00000030-a0002", str(restored.name)]
    assert verify(run.checkpoint(CheckpointName(30, 2))).step == 30
    return str(restored.name)


def take_over(run: RunDir, step: int) -> dict[str, int]:
    """Attempt 2 restores and saves `step`; its files and when they were last changed."""
    job = make_job(run, 2)
    checkpointer = job.checkpointer(keep=2)
    restored = checkpointer.restore(small(0))
    assert restored is not None
    assert restored.name.step in (15, 20)
    checkpointer.save(step, small(step), {})
    return times(run, CheckpointName(step, 2))


def times(run: RunDir, name: CheckpointName) -> dict[str, int]:
    verify(run.checkpoint(name))
    return {p.name: p.stat().st_mtime_ns for p in run.checkpoint(name).iterdir()}


def check_thawed(run: RunDir, theirs: dict[str, int] | None) -> None:
    """After a writer of attempt 1 woke up under attempt 2, which may have saved: what attempt 3 finds."""
    names = run.all_checkpoints()
    for name in names:
        verify(run.checkpoint(name))
    if theirs is None:
        assert names[0].step in (15, 20)
    else:
        assert names[0].attempt == 2
        assert times(run, names[0]) == theirs
    claim(run)
    restored = make_job(run, 3).checkpointer().restore(entries := small(0))
    assert restored is not None
    assert restored.name == names[0]
    assert digests(entries) == digests(small(restored.name.step))
    assert [p.name for p in run.checkpoints.iterdir() if p.name.startswith(".")] == []
