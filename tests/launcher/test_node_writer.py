"""The agent's side of checkpoints: memory that outlives workers, and a writer that is replaced when it is gone."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from stoker.conf.schema import Config
from stoker.launcher.node import Node
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.events import EventLog
from stoker.launcher.run.files import read_lines
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.wire import Channel


@dataclass
class Fork:
    """What the zygote was asked for; `segments` are told apart by their numbers in memory."""

    what: str
    rank: int
    fds: list[int]
    channel: Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = Channel(socket.socket(fileno=self.fds[1]))

    @property
    def segments(self) -> list[int]:
        return [os.fstat(fd).st_ino for fd in self.fds[3:5]]


class Desk:
    """A node whose zygote is the test."""

    def __init__(self, path: Path, cmd: list[str]) -> None:
        run = RunDir(path)
        path.mkdir()
        attempt = claim(run)
        self.events = attempt.events("n1")
        config = asdict(Config())
        config["task"]["cmd"] = cmd
        config["fabric"] |= {"detect": False, "bind": False}
        self.node = Node(run, attempt, config, lambda _: None, EventLog(self.events, "n1", attempt.number))
        ours, theirs = socket.socketpair()
        self.node._to_zygote, self.zygote = Channel(ours), Channel(theirs)
        self.forks: list[Fork] = []

    def form(self, generation: int, forks: int) -> list[Fork]:
        place = {"generation": generation, "first_rank": 4, "procs_per_node": 2, "world_size": 6}
        self.node.form(place | {"store_host": "h", "store_port": 1, "address": "127.0.0.1"})
        found = []
        for _ in range(forks):
            message = self.zygote.next()
            fds, self.zygote.fds = self.zygote.fds, []
            found.append(Fork(message["what"], message["id"], fds))
        self.forks += found
        return found

    def close(self) -> None:
        self.node.close()
        self.zygote.close()
        for fork in self.forks:
            fork.channel.close()
            for fd in (fork.fds[0], *fork.fds[2:]):
                os.close(fd)


@pytest.fixture
def desk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Desk]:
    made = Desk(tmp_path / "run", getattr(request, "param", []))
    yield made
    made.close()


def clients(writer: Fork, count: int) -> list[tuple[dict[str, Any], list[int]]]:
    """Messages to the writer, with the numbers of the segments that came along; the sockets say hello."""
    found = []
    for _ in range(count):
        message = writer.channel.next()
        (sock, *segments), writer.channel.fds = writer.channel.fds, []
        with socket.socket(fileno=sock) as s:
            s.sendall(b"rank %d" % message["rank"])
        found.append((message, [os.fstat(fd).st_ino for fd in segments]))
        for fd in segments:
            os.close(fd)
    return found


def heard(worker: Fork) -> bytes:
    with socket.socket(fileno=os.dup(worker.fds[5])) as s:
        assert select.select([s], [], [], 60)[0]
        return s.recv(100)


def test_memory_is_kept_over_generations_and_each_worker_has_its_own_way_to_the_writer(desk: Desk) -> None:
    writer, *workers = desk.form(1, forks=3)
    assert (writer.what, [w.what for w in workers], [w.rank for w in workers]) == ("writer", ["worker"] * 2, [4, 5])
    for (message, segments), worker in zip(clients(writer, 2), workers, strict=True):
        assert message == {"kind": "client", "generation": 1, "rank": worker.rank}
        assert segments == worker.segments
        assert heard(worker) == b"rank %d" % worker.rank
    numbers = [n for w in workers for n in w.segments]
    assert len(set(numbers)) == 4
    again = desk.form(2, forks=2)
    assert [n for w in again for n in w.segments] == numbers
    assert [message["generation"] for message, _ in clients(writer, 2)] == [2, 2]


def test_a_writer_that_ended_is_told_once_and_replaced_with_the_next_generation(desk: Desk) -> None:
    writer, *_ = desk.form(1, forks=3)
    clients(writer, 2)
    writer.channel.sock.shutdown(socket.SHUT_RDWR)
    (lost,) = (c for c in desk.node.channels() if select.select([c], [], [], 0)[0])
    desk.node.read(lost)
    assert lost not in desk.node.channels()
    events = [e["event"] for e in read_lines(desk.events)]
    assert events.count("writer_ended") == 1
    second, *_ = desk.form(2, forks=3)
    assert second.what == "writer"
    assert len(clients(second, 2)) == 2


def test_a_writer_goes_with_workers_that_hang_and_stays_when_they_are_killed_for_other_reasons(desk: Desk) -> None:
    desk.form(1, forks=3)
    with subprocess.Popen(["sleep", "600"]) as process:  # stands for the writer, frozen or not
        desk.zygote.send({"kind": "forked", "id": -2, "pid": process.pid})
        assert desk.node._to_zygote is not None
        desk.node.read(desk.node._to_zygote)
        desk.node.kill_workers()
        assert process.poll() is None
        desk.node.kill_hung()
        assert process.wait(timeout=60) == -signal.SIGKILL
    assert desk.form(2, forks=3)[0].what == "writer"


@pytest.mark.parametrize("desk", [["python", "mine.py"]], indirect=True)
def test_a_script_of_the_user_s_own_has_no_writer(desk: Desk) -> None:
    forks = desk.form(1, forks=2)
    assert [(f.what, len(f.fds)) for f in forks] == [("worker", 3), ("worker", 3)]
