"""Workers as an agent has them: forked from a real zygote, spoken to over its sockets."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stoker.conf.load import to_plain
from stoker.launcher.run import views
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.heartbeat import Control, Phase, Save, Segment
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.verification import verify
from stoker.launcher.run.wire import Channel, Closed

STEPS = 12


class Zygote:
    """What an agent does with a zygote, by hand."""

    def __init__(self, run: RunDir, env: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.channels = [self.channel]
        self.pending: dict[Channel, deque[dict[str, Any]]] = {}
        self.run = run
        self.log = os.open(run.path / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        own = {"STOKER_ZYGOTE_FD": str(theirs.fileno()), "STOKER_AGENT_PID": str(os.getpid())}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stoker.train.zygote"], env=os.environ | own | env, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        assert self.receive(self.channel, "ready")

    def fork(self, what: str, ident: int, spec: dict[str, Any], *fds: int) -> tuple[int, Channel]:
        ours, theirs = socket.socketpair()
        message = {"kind": "fork", "what": what, "id": ident, "spec": spec, "env": {}}
        self.channel.send(message, (self.log, theirs.fileno(), *fds))
        theirs.close()
        self.channels.append(Channel(ours))
        return int(self.receive(self.channel, "forked")["pid"]), self.channels[-1]

    def receive(self, channel: Channel, word: str, patience: float = 60.0) -> dict[str, Any]:
        """Read until a message of this kind, or a report of this event, comes."""
        deadline = time.monotonic() + patience
        pending = self.pending.setdefault(channel, deque())
        while time.monotonic() < deadline:
            while pending:
                message = pending.popleft()
                if word in (message["kind"], message.get("event")):
                    return message
            if select.select([channel], [], [], 0.5)[0]:
                pending.extend(channel.receive())
        raise TimeoutError(f"no {word!r} within {patience} s; log:\n{(self.run.path / 'log').read_text()}")

    def exit_status(self, pid: int) -> int:
        while (message := self.receive(self.channel, "exited"))["pid"] != pid:
            pass
        return int(message["status"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.log)
        for channel in self.channels:
            channel.close()


class Team:
    """A run, its zygote, store and writer, and workers of two ranks."""

    def __init__(self, path: Path, prefix: Path, failpoints: str) -> None:
        config = _config(prefix)
        self.run = RunDir(path)
        path.mkdir()
        self.run.checkpoints.mkdir()
        self.run.run.write_text(json.dumps({"id": "x"}))
        self.attempt = claim(self.run)
        self.zygote = Zygote(self.run, {"STOKER_FAILPOINTS": failpoints})
        self.plain = to_plain(config)
        _, self.store_channel = self.zygote.fork("store", -1, {"host": "127.0.0.1"})
        self.port = self.zygote.receive(self.store_channel, "store")["port"]
        self.segments: dict[int, Segment] = {}
        self.state = [[os.memfd_create(f"state-{rank}-{k}") for k in (0, 1)] for rank in (0, 1)]
        writer = {"run": str(path), "attempt": 1, "config": self.plain, "cpus": None}
        self.writer, self.writer_channel = self.zygote.fork("writer", -2, writer)

    def form(self, generation: int, rank: int) -> dict[str, Any]:
        place = {"generation": generation, "rank": rank, "world_size": 2, "local_rank": rank}
        return place | {"store_host": "127.0.0.1", "store_port": self.port}

    def start(self, generation: int, rank: int) -> tuple[int, Channel]:
        self.segments[rank] = Segment.create("test")
        spec = self.form(generation, rank) | {"run": str(self.run.path), "config": self.plain, "attempt": 1}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            client = {"kind": "client", "generation": generation, "rank": rank}
            self.writer_channel.send(client, (theirs.fileno(), *self.state[rank]))
            return self.zygote.fork("worker", rank, spec, self.segments[rank].fd, *self.state[rank], ours.fileno())

    def losses(self) -> dict[int, float]:
        return {m["step"]: m["loss"] for m in views.metrics(self.run)}


def _config(prefix: Path) -> Any:
    # The harness is loaded by path: tests are not a package.
    import importlib.util

    spec = importlib.util.spec_from_file_location("harness_for_workers", Path(__file__).with_name("harness.py"))
    assert spec is not None
    assert spec.loader is not None
    harness = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = harness
    spec.loader.exec_module(harness)
    harness.make_data(prefix)
    return harness.tiny_config(prefix, steps=STEPS, checkpoint={"interval": 4})


@pytest.fixture
def team(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Team]:
    made = Team(tmp_path / "run", tmp_path / "data", getattr(request, "param", ""))
    yield made
    made.zygote.close()
    for fd in (*made.state[0], *made.state[1]):
        os.close(fd)


@pytest.mark.parametrize("team", ["step@step=6@rank=1@generation=1:kill"], indirect=True)
def test_a_survivor_makes_a_second_pass_in_the_same_process(team: Team, tmp_path: Path) -> None:
    survivor, channel = team.start(1, 0)
    team.start(1, 1)
    team.zygote.receive(channel, "peer_lost")
    team.start(2, 1)
    channel.send({"kind": "form", **team.form(2, 0)})
    assert team.zygote.receive(channel, "ended")["fields"]["step"] == STEPS
    assert team.zygote.exit_status(survivor) == 0
    assert views.metrics(team.run)[-1]["generation"] == 2

    calm = Team(tmp_path / "calm", tmp_path / "data", "")
    try:
        _, channel = calm.start(1, 0)
        calm.start(1, 1)
        calm.zygote.receive(channel, "ended")
    finally:
        calm.zygote.close()
    assert sorted(calm.losses()) == list(range(1, STEPS + 1))
    assert team.losses() == calm.losses()


@pytest.mark.parametrize("team", ["checkpoint.write@rank=1@step=4:kill"], indirect=True)
def test_the_loss_of_the_writer_costs_the_save_in_hand_and_training_goes_on(team: Team) -> None:
    """The failpoint is in the writer: its process ends when it is half through with rank 1's first shard."""
    channels = [team.start(1, rank)[1] for rank in (0, 1)]
    failed = team.zygote.receive(channels[0], "checkpoint_failed")["fields"]
    assert failed["step"] == 4
    assert "the node's writer process was lost" in failed["error"]
    ended = [team.zygote.receive(c, "ended")["fields"] for c in channels]
    assert [(e["finished"], e["step"], e["saved_step"]) for e in ended] == [(True, STEPS, STEPS)] * 2
    saved = team.run.all_checkpoints()
    assert sorted(map(str, saved)) == sorted(p.name for p in team.run.checkpoints.iterdir())
    assert saved[0] == CheckpointName(STEPS, 1)
    for name in saved:
        verify(team.run.checkpoint(name))


def test_workers_store_and_writer_die_with_the_zygote(team: Team) -> None:
    pids = [team.writer, team.start(1, 0)[0]]  # waits for its peer for ever
    os.kill(team.zygote.process.pid, signal.SIGKILL)
    team.zygote.process.wait()
    with pytest.raises(Closed):
        team.zygote.receive(team.store_channel, "nothing", patience=10.0)
    deadline = time.monotonic() + 10
    while any(_lives(p) for p in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("team", ["step:pause-20"], indirect=True)
def test_ranks_hold_at_a_proposed_step_until_it_is_committed(team: Team) -> None:
    channels = [team.start(1, rank)[1] for rank in (0, 1)]
    for segment in team.segments.values():
        segment.write_control(Control(1, 7, False, Save.BOTH))

    def phases() -> list[tuple[int, Phase]]:
        beats = [s.read_heartbeat() for s in team.segments.values()]
        return [(b.step, b.phase) for b in beats if b is not None]

    deadline = time.monotonic() + 60
    while phases() != [(7, Phase.HOLD), (7, Phase.HOLD)]:
        assert time.monotonic() < deadline, phases()
        time.sleep(0.02)
    # A later proposal lets them go on; the commit ends them there.
    for committed in (False, True):
        for segment in team.segments.values():
            segment.write_control(Control(1, 9, committed, Save.BOTH))
    ended = [team.zygote.receive(c, "ended")["fields"] for c in channels]
    assert [(e["finished"], e["step"], e["saved_step"]) for e in ended] == [(False, 9, 9), (False, 9, 9)]


def test_a_mistake_in_the_settings_is_told_in_a_sentence_and_left_to_the_agent_to_write(
    tmp_path: Path, team: Team
) -> None:
    team.plain["data"]["sources"][0]["prefix"] = str(tmp_path / "nowhere")
    channels = [team.start(1, rank)[1] for rank in (0, 1)]
    fields = team.zygote.receive(channels[0], "failed")["fields"]
    assert fields["cause"] == "bad_config"
    assert fields["error"].startswith(f"{tmp_path}/nowhere.idx: no such file")
    assert fields["traceback"] is None
    assert "nowhere" not in (team.run.path / "log").read_text()


def test_a_layout_that_does_not_fit_is_a_wrong_setting(team: Team) -> None:
    team.plain["parallel"]["tensor"] = 3
    channels = [team.start(1, rank)[1] for rank in (0, 1)]
    fields = team.zygote.receive(channels[0], "failed")["fields"]
    assert fields["cause"] == "bad_config"
    assert fields["error"].startswith("parallel.tensor=3: pipeline x context x tensor = 1 x 1 x 3 = 3 does not divide")
    assert fields["traceback"] is None


@pytest.mark.parametrize("team", ["step@step=2@rank=0:raise"], indirect=True)
def test_any_other_exception_is_told_with_its_traceback(team: Team) -> None:
    team.start(1, 1)
    _, channel = team.start(1, 0)
    fields = team.zygote.receive(channel, "failed")["fields"]
    assert fields["cause"] == "crash"
    assert fields["traceback"].startswith("Traceback")
    assert "[0] Traceback" in (team.run.path / "log").read_text()


def test_a_worker_stays_on_its_cpus(tmp_path: Path) -> None:
    """And so do the threads that it starts later."""
    from stoker.train.worker import bind

    first = min(os.sched_getaffinity(0))
    pid = os.fork()
    if pid == 0:
        bind([first])
        (tmp_path / "bound").write_text(str(os.sched_getaffinity(0)))
        bind(None)
        bind([999_999])  # gone: told, and no reason to end
        (tmp_path / "after").write_text(str(os.sched_getaffinity(0)))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "bound").read_text() == (tmp_path / "after").read_text() == str({first})
