"""A save is killed, or refused by storage, at each of the system calls that it makes on the checkpoints folder.

The calls are not listed here: they are counted in an undisturbed save, and each is then struck once. Afterwards the
newest valid checkpoint is the old or the new one, whole; older ones are untouched; leftovers are swept; the next save
works.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from state_ranks import Crew, Job, Rank, digests, make_job, shared
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.manifest import verify
from stoker.train.state.checkpointer import SaveFailedError
from stoker.train.state.entry import Entry
from syscalls import Call, Tap, install, is_possible

pytestmark = pytest.mark.skipif(not is_possible(), reason="this kernel does not let a test answer system calls")
OLD, SAVED = "step-00000015-a0001", "step-00000020-a0001"
PUBLISH = Call("rename", ".tmp-step-00000020-a0001-g0001-*")


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


def attempt(job: Job, tap: str, rank: int) -> Any:
    """Restore, save step 20, prune (step 10 goes), save step 25, prune; one rank is watched from the first save on."""
    checkpointer, said = job.checkpointer(keep=2), []
    checkpointer.restore(held(job, 0))
    if job.grid.rank == rank:
        install(tap)
    for step in (20, 25):
        try:
            said.append(str(checkpointer.save(step, held(job, step), {})))
            checkpointer.prune()
        except SaveFailedError as e:
            said.append(str(e))
    return said


@pytest.fixture(scope="module")
def older(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 10 and 15."""
    run = RunDir(tmp_path_factory.mktemp("older") / "run")
    run.path.mkdir()
    claim(run)
    for result in crew.run(make_older, run, 2):
        assert result.raised is None, result.text
    return run.path


class Saves:
    """Makes the same attempt again and again, each time in a fresh copy of the run, and disturbed in another way."""

    def __init__(self, crew: Crew, older: Path, copies: Path, rank: int) -> None:
        self._crew, self._older, self._copies, self.rank = crew, older, copies, rank
        self.run = RunDir(copies)

    def start(self, at: int | None, action: str | int, lasting: bool = False) -> tuple[Tap, list[Rank]]:
        self.run = RunDir(self._copies / f"{at}-{action}")
        shutil.copytree(self._older, self.run.path)
        tap = Tap(self.run.checkpoints, at, action, lasting)
        return tap, self._crew.start(attempt, self.run, 2, tap=tap.address, rank=self.rank)

    def calls(self) -> list[Call]:
        """Those of an undisturbed save of step 20 and of the retention after it."""
        tap, ranks = self.start(None, "")
        with tap:
            for rank in ranks:
                assert rank.result().value == [SAVED, "step-00000025-a0001"]
        return list(takewhile(lambda call: "step-00000025" not in call.path, tap.calls))

    def clean_up(self) -> None:
        shutil.rmtree(self.run.path)


@pytest.fixture
def saves(request: pytest.FixtureRequest, crew: Crew, older: Path, tmp_path: Path) -> Saves:
    return Saves(crew, older, tmp_path, request.param)


EVERY = [pytest.param(5, id="sample"), pytest.param(1, id="all", marks=pytest.mark.full)]
both_ranks = pytest.mark.parametrize("saves", [0, 1], ids=["rank0", "rank1"], indirect=True)


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
    checkpointer.prune()
    assert [str(n) for n in run.all_checkpoints()] == ["step-00000030-a0002", str(restored.name)]
    assert verify(run.checkpoint(CheckpointName(30, 2))).step == 30
    return str(restored.name)


@both_ranks
@pytest.mark.parametrize("every", EVERY)
def test_a_kill_at_any_call_leaves_the_old_or_the_new_checkpoint_whole(saves: Saves, every: int) -> None:
    calls = saves.calls()
    found = []
    for at in range(0, len(calls), every):
        tap, ranks = saves.start(at, "torn" if calls[at].is_write else "kill")
        with tap:
            assert ranks[saves.rank].code() == -signal.SIGKILL, calls[at]
            # Retention is rank 0's alone: the other has ended well by then, or waits in the next save.
            assert ranks[1 - saves.rank].result().raised == "PeerLostError", calls[at]
        assert tap.calls[at] == calls[at]
        found.append(check_old_or_new(saves.run))
        saves.clean_up()
    switch = next((at for at, call in enumerate(calls) if call == PUBLISH), len(calls))
    assert found == [SAVED if at > switch else OLD for at in range(0, len(calls), every)]


@both_ranks
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_an_error_of_any_call_is_told_on_all_ranks_and_the_next_save_works(saves: Saves, every: int, code: int) -> None:
    calls = saves.calls()
    for at in range(0, len(calls), every):
        tap, ranks = saves.start(at, code)
        with tap:
            first, second = (rank.result() for rank in ranks)
        assert first.value == second.value, calls[at]
        said, later = first.value
        assert later == "step-00000025-a0001", calls[at]
        if said != SAVED:
            assert said.startswith(f"checkpoint {SAVED} not saved: rank {saves.rank} on "), calls[at]
            assert said.endswith(f": {os.strerror(code)}"), calls[at]
            assert str(saves.run.checkpoints) in said, calls[at]
            assert [e["event"] for e in first.events if e["event"] == "checkpoint_failed"], calls[at]
        left = saves.run.all_checkpoints()
        assert [n.step for n in left[1:]] in ([20], [15], [20, 15], [15, 10]), calls[at]
        for name in left:
            verify(saves.run.checkpoint(name))
        saves.clean_up()


def test_short_writes_are_gone_on_with(crew: Crew, older: Path, tmp_path: Path) -> None:
    saves = Saves(crew, older, tmp_path, 1)
    tap, ranks = saves.start(None, "short")
    with tap:
        for rank in ranks:
            assert rank.result().value == [SAVED, "step-00000025-a0001"]
    assert len([c for c in tap.calls if c.is_write]) > 30
    for name in saves.run.all_checkpoints():
        verify(saves.run.checkpoint(name))


def take_over(run: RunDir, step: int) -> dict[str, int]:
    """Attempt 2 restores and saves `step`; its files and when they were last changed."""
    job = make_job(run, 2)
    checkpointer = job.checkpointer(keep=2)
    restored = checkpointer.restore(small(0))
    assert restored is not None
    assert restored.name.step in (15, 20)
    checkpointer.save(step, small(step), {})
    checkpointer.prune()
    return times(run, CheckpointName(step, 2))


def times(run: RunDir, name: CheckpointName) -> dict[str, int]:
    verify(run.checkpoint(name))
    return {p.name: p.stat().st_mtime_ns for p in run.checkpoint(name).iterdir()}


@both_ranks
@pytest.mark.parametrize("every", [pytest.param(11, id="sample"), EVERY[1]])
@pytest.mark.parametrize("step", [20, 30, None], ids=["the-same-step", "another-step", "begun"])
def test_a_writer_frozen_at_any_call_and_thawed_under_a_later_attempt_harms_nothing(
    saves: Saves, every: int, step: int | None
) -> None:
    """`step`: what attempt 2 saves meanwhile; None: it has only begun."""
    calls = saves.calls()
    for at in range(0, len(calls), every):
        tap, ranks = saves.start(at, "freeze")
        with tap:
            ranks[saves.rank].wait_frozen()
            claim(saves.run)
            theirs = None if step is None else take_over(saves.run, step)
            ranks[saves.rank].thaw()
            assert [rank.result().raised for rank in ranks] == ["SupersededError"] * 2, calls[at]
        names = saves.run.all_checkpoints()
        for name in names:
            verify(saves.run.checkpoint(name))
        if step is not None:
            assert names[0] == CheckpointName(step, 2), calls[at]
            assert times(saves.run, names[0]) == theirs, calls[at]
        else:
            assert names[0].step in (15, 20), calls[at]
        claim(saves.run)
        restored = make_job(saves.run, 3).checkpointer().restore(entries := small(0))
        assert restored is not None
        assert digests(entries) == digests(small(restored.name.step))
        assert restored.name == names[0]
        assert [p.name for p in saves.run.checkpoints.iterdir() if p.name.startswith(".")] == []
        saves.clean_up()
