"""The writer process as an agent has it: forked from a real zygote, with ranks' sockets and memory handed to it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from persist_parts import PATIENCE, RankData, answer, request
from state_ranks import until
from stoker.conf.schema import Config
from stoker.launcher import procfs
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.verification import verify
from stoker.launcher.run.wire import Channel, Closed
from stoker.launcher.stacks_node import targets
from stoker.train.state.persist_local import LocalPersister
from stoker.train.state.persist_remote import LOST, RemotePersister
from stoker.train.state.persist_writer import NICE
from stoker.train.storage.posix import PosixShelf

# By the step of the save, as one zygote serves all tests here.
FAILPOINTS = "checkpoint.write@rank=1@step=66:freeze,checkpoint.sidecar@rank=0@step=77:freeze"


class Zygote:
    def __init__(self, log: Path) -> None:
        ours, theirs = socket.socketpair()
        self.channel, self.log = Channel(ours), os.open(log, os.O_WRONLY | os.O_CREAT)
        own = {"STOKER_ZYGOTE_FD": str(theirs.fileno()), "STOKER_AGENT_PID": str(os.getpid())}
        env = os.environ | own | {"STOKER_FAILPOINTS": FAILPOINTS}
        command = [sys.executable, "-m", "stoker.train.zygote"]
        self.process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
        theirs.close()
        self.heard: list[dict[str, Any]] = []
        assert self._next("ready")

    def _next(self, kind: str) -> dict[str, Any]:
        while not (found := [m for m in self.heard if m["kind"] == kind]):
            assert select.select([self.channel], [], [], PATIENCE)[0]
            self.heard += self.channel.receive()
        self.heard.remove(found[0])
        return found[0]

    def fork(self, spec: dict[str, Any]) -> tuple[int, Channel]:
        ours, theirs = socket.socketpair()
        message = {"kind": "fork", "what": "writer", "id": -2, "spec": spec, "env": {}}
        self.channel.send(message, (self.log, theirs.fileno()))
        theirs.close()
        return int(self._next("forked")["pid"]), Channel(ours)

    def status(self, pid: int) -> int:
        while (ended := self._next("exited"))["pid"] != pid:
            pass
        return int(ended["status"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.channel.close()
        os.close(self.log)


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    z = Zygote(tmp_path_factory.mktemp("zygote") / "log")
    yield z
    z.close()


class Writer:
    """The writer of a run's first attempt, and the agent's hands."""

    def __init__(self, zygote: Zygote, run: RunDir) -> None:
        self.run, self.lost = run, list[str]()
        self._open: list[Callable[[], None]] = []
        spec = {"run": str(run.path), "attempt": 1, "config": json.loads(json.dumps(asdict(Config())))}
        self.pid, self.channel = zygote.fork(spec | {"cpus": [min(os.sched_getaffinity(0))]})

    def client(self, data: RankData) -> RemotePersister:
        ours, theirs = socket.socketpair()
        self.channel.send({"kind": "client", "generation": 1, "rank": data.rank}, (theirs.fileno(), *data.fds))
        theirs.close()
        shelf = PosixShelf(self.run.checkpoints)
        persister = RemotePersister(
            Channel(ours), lambda: LocalPersister(self.run, shelf, data.fds), lambda why: self.lost.append(why)
        )
        self._open.append(persister.close)
        return persister

    def wait_frozen(self) -> None:
        until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def close(self) -> None:
        for close in self._open:
            close()
        self.channel.close()


@pytest.fixture
def writer(zygote: Zygote, run: RunDir) -> Iterator[Writer]:
    w = Writer(zygote, run)
    yield w
    w.close()


Pair = tuple[tuple[RankData, RemotePersister], tuple[RankData, RemotePersister]]


@pytest.fixture
def pair(writer: Writer) -> Pair:
    first, second = (RankData(rank, 2, seed=10) for rank in (0, 1))
    return (first, writer.client(first)), (second, writer.client(second))


def begin(writer: Writer, pair: Pair, job: int, step: int) -> None:
    for data, persister in pair:
        data.save(persister, data.part(writer.run, job, step, 2))


def save(writer: Writer, pair: Pair, job: int, step: int) -> None:
    begin(writer, pair, job, step)
    parts = [answer(persister, "part") for _, persister in pair]
    pair[0][1].publish(job, request(parts, step))
    answer(pair[0][1], "published")
    verify(writer.run.checkpoint(CheckpointName(step, 1)))


def names(run: RunDir) -> list[str]:
    return sorted(p.name for p in run.checkpoints.glob("*"))


def test_one_writer_serves_the_ranks_of_a_node_out_of_the_workers_way(
    zygote: Zygote, writer: Writer, pair: Pair
) -> None:
    save(writer, pair, job=1, step=10)
    save(writer, pair, job=2, step=20)
    assert names(writer.run) == ["step-00000010-a0001", "step-00000020-a0001"]
    assert os.getpriority(os.PRIO_PROCESS, writer.pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICE
    assert os.sched_getscheduler(writer.pid) == os.SCHED_BATCH
    assert os.sched_getaffinity(writer.pid) == {min(os.sched_getaffinity(0))}
    assert [t.offer.role for t in targets(writer.run, 1, None)] == ["writer"]
    writer.channel.close()  # the agent ends
    assert zygote.status(writer.pid) == 0


def test_the_loss_of_the_writer_fails_one_save_and_the_workers_go_on_alone(writer: Writer, pair: Pair) -> None:
    begin(writer, pair, job=1, step=66)
    writer.wait_frozen()
    os.kill(writer.pid, signal.SIGKILL)
    for _, persister in pair:
        found = []
        while not found or found[-1].what == "wave":
            found += persister.wait(PATIENCE)
        # Rank 0's part may have been done.
        assert (found[-1].what, found[-1].error) in (("failed", LOST), ("part", None))
    assert found[-1].error == LOST
    for _, persister in reversed(pair):
        persister.abandon(1)
    save(writer, pair, job=2, step=70)
    assert len(writer.lost) == 2
    assert names(writer.run) == ["step-00000070-a0001"]


def test_the_loss_of_an_idle_writer_costs_nothing(zygote: Zygote, writer: Writer, pair: Pair) -> None:
    save(writer, pair, job=1, step=10)
    os.kill(writer.pid, signal.SIGKILL)
    assert zygote.status(writer.pid) == -signal.SIGKILL
    save(writer, pair, job=2, step=20)
    assert writer.lost == ["end of stream"] * 2


def test_the_loss_of_the_writer_between_two_saves_fails_none(writer: Writer, pair: Pair) -> None:
    save(writer, pair, job=1, step=10)
    os.kill(writer.pid, signal.SIGKILL)
    for _, persister in pair:  # as ranks that wait for others to be done
        until(lambda persister=persister: persister.poll() == [] and persister._local is not None)
    save(writer, pair, job=2, step=20)
    assert len(writer.lost) == 2
    assert names(writer.run) == ["step-00000010-a0001", "step-00000020-a0001"]


def test_a_worker_that_ends_in_a_save_leaves_nothing_and_the_next_is_served(writer: Writer, pair: Pair) -> None:
    begin(writer, pair, job=1, step=10)
    answer(pair[1][1], "part")
    for _, persister in pair:
        persister.close()
    until(lambda: names(writer.run) == [], lambda: str(names(writer.run)))
    again = [RankData(rank, 2, seed=10) for rank in (0, 1)]
    save(writer, ((again[0], writer.client(again[0])), (again[1], writer.client(again[1]))), job=1, step=10)
    assert names(writer.run) == ["step-00000010-a0001"]


def test_a_writer_frozen_until_a_later_attempt_has_begun_publishes_nothing(writer: Writer, pair: Pair) -> None:
    begin(writer, pair, job=1, step=77)
    writer.wait_frozen()
    claim(writer.run)
    PosixShelf(writer.run.checkpoints).sweep(2)
    os.kill(writer.pid, signal.SIGCONT)
    deadline, found = time.monotonic() + PATIENCE, []
    while not any(a.what == "failed" for a in found):
        assert time.monotonic() < deadline
        found += pair[0][1].wait(1.0)
    assert found[-1].superseded
    assert found[-1].error == f"attempt 1 of {writer.run.path} was superseded by a later one"
    assert names(writer.run) == []


def test_a_job_in_hand_and_a_message_to_come_do_not_keep_the_writer_when_its_agent_ends(
    zygote: Zygote, writer: Writer, pair: Pair
) -> None:
    begin(writer, pair, job=1, step=10)
    writer.channel.close()
    assert zygote.status(writer.pid) == 0
    with pytest.raises(Closed):
        writer.channel.send({"kind": "client"})
    assert procfs.status(writer.pid) in (None, {})
