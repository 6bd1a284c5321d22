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
from state_ranks import Crew, Job, Rank
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.verification import verify
from stoker.train.state.checkpointer import SaveFailedError
from striking import (
    ERRORS,
    EVERY,
    OLD,
    SAVED,
    TAKEN_OVER,
    check_old_or_new,
    check_thawed,
    held,
    needs_kernel,
    take_over,
)
from syscalls import Call, Tap, install

pytestmark = needs_kernel
PUBLISH = Call("rename", ".tmp-step-00000020-a0001-g0001-*")


def attempt(job: Job, tap: str, rank: int) -> Any:
    """Restore, save step 20, prune (step 10 goes), save step 25, prune; one rank is watched from the first save on."""
    checkpointer, said = job.checkpointer(keep=2), []
    checkpointer.restore(held(job, 0))
    if job.grid.rank == rank:
        install(tap)
    for step in (20, 25):
        try:
            said.append(str(checkpointer.save(step, held(job, step), {})))
        except SaveFailedError as e:
            said.append(str(e))
    return said


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


both_ranks = pytest.mark.parametrize("saves", [0, 1], ids=["rank0", "rank1"], indirect=True)


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
@pytest.mark.parametrize(("code", "every"), ERRORS)
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


@both_ranks
@pytest.mark.parametrize("every", [pytest.param(13, id="sample"), EVERY[1]])
def test_storage_that_refuses_everything_from_any_call_on_costs_only_what_is_new(saves: Saves, every: int) -> None:
    """What could not be taken away then is swept by the next attempt."""
    calls = saves.calls()
    for at in range(0, len(calls), every):
        tap, ranks = saves.start(at, errno.EIO, lasting=True)
        with tap:
            first, second = (rank.result() for rank in ranks)
        assert first.value == second.value, calls[at]
        said, later = first.value
        assert said == SAVED or said.endswith(": Input/output error"), calls[at]
        assert later.startswith("checkpoint step-00000025-a0001 not saved: "), calls[at]
        assert later.endswith(": Input/output error"), calls[at]
        check_old_or_new(saves.run)
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


@both_ranks
@pytest.mark.parametrize(("step", "every"), TAKEN_OVER)
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
        check_thawed(saves.run, theirs)
        saves.clean_up()
