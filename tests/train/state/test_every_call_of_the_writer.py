"""The node's writer process is killed, or refused by storage, or frozen, at each system call that it makes for a save.

As test_every_call.py, but it is not a rank that is struck: the ranks live on, are told, and save again, by themselves
if their writer is gone. Two ranks' work is in hand at a time, so the order of calls differs from save to save; what is
struck is whatever comes at that number.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from persist_parts import PATIENCE, RankData, request
from state_ranks import Crew, Job, Rank, digests, is_frozen, make_job, until
from stoker.conf.schema import CheckpointConfig
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.verification import verify
from stoker.launcher.run.wire import Channel
from stoker.train.state.persist import FAILED, PART, PUBLISHED, Answer, Persister
from stoker.train.state.persist_local import LocalPersister
from stoker.train.state.persist_remote import LOST, RemotePersister
from stoker.train.state.persist_writer import Writer
from stoker.train.storage.choice import shelf_of
from striking import (
    ERRORS,
    EVERY,
    OLD,
    SAVED,
    TAKEN_OVER,
    check_old_or_new,
    check_thawed,
    needs_kernel,
    small,
    take_over,
)
from syscalls import Tap, install

pytestmark = needs_kernel


def attempt(job: Job, tap: str, steps: list[int], is_orphan: bool = False) -> dict[str, Any]:
    """A writer process, watched, and two ranks that save these steps with it. What they were told, and its end.

    is_orphan: to the writer, its agent lives on when this process does not.
    """
    run = job.context.run
    agent, theirs = socket.socketpair()
    writer = os.fork()
    if writer == 0:
        try:
            if not is_orphan:
                agent.close()
            install(tap)
            Writer(run, shelf_of(run, CheckpointConfig()), Channel(theirs)).serve()
        finally:
            os._exit(0)
    theirs.close()
    ranks = [RankData(rank, 2, 0, small) for rank in (0, 1)]
    lost: list[str] = []
    persisters = [_client(run, agent, data, lost) for data in ranks]
    said, found = [], []
    for number, step in enumerate(steps, 1):
        for data in ranks:
            data.pack(2, step, small)
        said.append(_save(run, list(zip(ranks, persisters, strict=True)), number, step))
        restored = make_job(run, 1).checkpointer().restore(entries := small(0))
        found.append([restored and restored.name.step, digests(entries)])
    agent.close()
    status = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
    return {"said": said, "found": found, "lost": len(lost), "status": status}


def _client(run: RunDir, agent: socket.socket, data: RankData, lost: list[str]) -> RemotePersister:
    ours, theirs = socket.socketpair()
    Channel(agent).send({"kind": "client", "generation": 1, "rank": data.rank}, (theirs.fileno(), *data.fds))
    theirs.close()
    shelf = shelf_of(run, CheckpointConfig())
    return RemotePersister(Channel(ours), lambda: LocalPersister(run, shelf, data.fds), lost.append)


def _save(run: RunDir, ranks: list[tuple[RankData, Persister]], job: int, step: int) -> str:
    """As the checkpointer does: publish when all parts are written, else all leave it."""
    for data, persister in ranks:
        data.save(persister, data.part(run, job, step, 2))
    ends = [_end(persister) for _, persister in ranks]
    if not any(e.what == FAILED for e in ends):
        ranks[0][1].publish(job, request(ends, step, keep=2))
        ends = [_end(ranks[0][1])]
    errors = [str(e.error) for e in ends if e.what == FAILED]
    if errors:
        for _, persister in reversed(ranks):
            persister.abandon(job)
    return errors[0] if errors else "published"


def _end(persister: Persister) -> Answer:
    while True:
        for found in persister.wait(PATIENCE):
            if found.what in (PART, PUBLISHED, FAILED):
                return found


class Saves:
    """Makes the same attempt again and again, each time in a fresh copy of the run, and disturbed in another way."""

    def __init__(self, crew: Crew, older: Path, copies: Path) -> None:
        self._crew, self._older, self._copies = crew, older, copies
        self.run = RunDir(copies)

    def start(self, at: int | None, action: str | int, *steps: int, is_orphan: bool = False) -> tuple[Tap, Rank]:
        self.run = RunDir(self._copies / f"{at}-{action}")
        shutil.copytree(self._older, self.run.path)
        tap = Tap(self.run.checkpoints, at, action)
        (rank,) = self._crew.start(attempt, self.run, 1, tap=tap.address, steps=steps, is_orphan=is_orphan)
        return tap, rank

    def result(self, at: int | None, action: str | int) -> tuple[Tap, dict[str, Any]]:
        """Of saving steps 20 and 25."""
        tap, rank = self.start(at, action, 20, 25)
        with tap:
            result = rank.result()
        assert result.raised is None, result.text
        return tap, result.value

    def count(self) -> int:
        """Of the calls that a save of step 20 and the retention after it take."""
        tap, value = self.result(None, "")
        assert (value["said"], value["status"]) == (["published"] * 2, 0)
        return sum("step-00000020" in str(call) or "step-00000010" in str(call) for call in tap.calls)

    def clean_up(self) -> None:
        for name in self.run.all_checkpoints():
            verify(self.run.checkpoint(name))
        shutil.rmtree(self.run.path)


@pytest.fixture
def saves(crew: Crew, older: Path, tmp_path: Path) -> Saves:
    return Saves(crew, older, tmp_path)


def check_found(value: dict[str, Any], at: str) -> None:
    """What one would restore after the first save is the old or the new one; after the second it is that."""
    (step, first), second = value["found"]
    assert step in (15, 20), at
    assert first == digests(small(step)), at
    assert second == [25, digests(small(25))], at


@pytest.mark.parametrize("every", EVERY)
def test_the_writer_is_killed_at_any_call_and_the_ranks_save_without_it(saves: Saves, every: int) -> None:
    for at in range(0, saves.count(), every):
        tap, value = saves.result(at, "torn")
        struck = str(tap.calls[at])
        assert value["status"] == -signal.SIGKILL, struck
        assert value["said"] == [LOST, "published"], struck
        assert value["lost"] == 2, struck
        check_found(value, struck)
        names = [str(n) for n in saves.run.all_checkpoints()]
        assert names in (["step-00000025-a0001", SAVED], ["step-00000025-a0001", OLD]), struck
        saves.clean_up()


@pytest.mark.parametrize(("code", "every"), ERRORS)
def test_an_error_of_any_call_of_the_writer_is_told_and_the_next_save_works(
    saves: Saves, every: int, code: int
) -> None:
    for at in range(0, saves.count(), every):
        tap, value = saves.result(at, code)
        struck = str(tap.calls[at])
        said, later = value["said"]
        assert (later, value["lost"], value["status"]) == ("published", 0, 0), struck
        if said != "published":
            assert said.endswith(f": {os.strerror(code)}"), struck
            assert str(saves.run.checkpoints) in said, struck
        check_found(value, struck)
        saves.clean_up()


@pytest.mark.parametrize(("step", "every"), TAKEN_OVER)
def test_a_writer_frozen_at_any_call_and_thawed_under_a_later_attempt_harms_nothing(
    saves: Saves, every: int, step: int | None
) -> None:
    for at in range(0, saves.count(), every):
        tap, rank = saves.start(at, "freeze", 20)
        with tap:
            until(tap.acted.is_set)
            until(partial(is_frozen, tap.process))
            claim(saves.run)
            theirs = None if step is None else take_over(saves.run, step)
            os.kill(tap.process, signal.SIGCONT)
            result = rank.result()
        assert result.raised is None, result.text
        superseded = f"attempt 1 of {saves.run.path} was superseded by a later one"
        assert result.value["said"] in ([superseded], ["published"]), str(tap.calls[at])
        check_thawed(saves.run, theirs)
        saves.clean_up()


@pytest.mark.parametrize("every", EVERY)
def test_ranks_killed_while_their_writer_is_at_any_call_leave_the_old_or_the_new_checkpoint(
    saves: Saves, every: int
) -> None:
    """The writer outlives them, as on a node where one generation of workers follows another."""
    for at in range(0, saves.count(), every):
        tap, rank = saves.start(at, "freeze", 20, is_orphan=True)
        with tap:
            until(tap.acted.is_set)
            until(partial(is_frozen, tap.process))
            os.kill(rank.pid, signal.SIGKILL)
            assert rank.code() == -signal.SIGKILL
            os.kill(tap.process, signal.SIGCONT)
            until(partial(has_one_thread, tap.process))
            # Whichever of its threads ends last takes it away.
            until(lambda: not list(saves.run.checkpoints.glob(".tmp-step*")), partial(str, tap.calls[at]))
            os.kill(tap.process, signal.SIGKILL)
        check_old_or_new(saves.run)
        saves.clean_up()


def has_one_thread(pid: int) -> bool:
    """It has no work any more: threads of runners are gone."""
    return "\nThreads:\t1\n" in Path(f"/proc/{pid}/status").read_text()
