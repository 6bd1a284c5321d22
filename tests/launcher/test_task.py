"""A user's own processes under the stand-in for the zygote: each promise of docs/own-scripts.md, the test as agent."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stoker.launcher.run.heartbeat import NO_STOP, Control, Heartbeat, Phase, Save, Segment
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.wire import Channel, Closed
from stoker.launcher.task_rank import Rank

PATIENCE = 20.0  # seconds; a bound, not an expectation


class Agent:
    """Speaks to the stand-in as an agent does; `python(...)` and `sh(...)` start one process."""

    def __init__(self, directory: Path, cwd: Path, **settings: Any) -> None:
        self.run, self.settings = RunDir(directory), {"stop_signal": "SIGTERM"} | settings
        (self.run.attempts / "0001").mkdir(parents=True)
        self.run.checkpoints.mkdir()
        self.run.run.write_text(json.dumps({"id": "x", "code": {"cwd": None}}))
        self.run.env.write_text(json.dumps({"cwd": str(cwd)}))
        ours, theirs = socket.socketpair()
        env = os.environ | {"STOKER_ZYGOTE_FD": str(theirs.fileno()), "STOKER_LOCAL_DIR": str(directory)}
        command = [sys.executable, "-m", "stoker.launcher.task", str(directory)]
        self.process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
        theirs.close()
        self.channel = Channel(ours)
        self.log_path = directory / "log"
        self.words: dict[int, list[dict[str, Any]]] = {}  # by rank: what was reported of it
        self.channels: dict[int, Channel] = {}
        self.segments: dict[int, Segment] = {}
        self.pids: dict[int, int] = {}
        self.status: dict[int, int] = {}
        self.receive(lambda: self.is_ready)

    is_ready = False

    def start(self, cmd: list[str], rank: int = 0, world: int = 1, generation: int = 1, **env: str) -> Segment:
        config = {"task": {"cmd": cmd} | self.settings, "resilience": {"max_restarts": 3}}
        spec = {"run": str(self.run.path), "config": config, "attempt": 1, "generation": generation, "rank": rank}
        spec |= {"local_rank": rank, "world_size": world, "store_host": "10.0.0.7", "store_port": 20000}
        segment = Segment.create(f"r{rank}")
        segment.beat(Heartbeat(generation, Phase.START, 0, 0, 0, time.monotonic(), 0.0))
        self._fork("worker", rank, spec, {"LOCAL_WORLD_SIZE": str(world)} | env, segment.fd)
        self.segments[rank] = segment
        self.status.pop(rank, None)
        self.receive(lambda: rank in self.pids)
        return segment

    def _fork(self, what: str, ident: int, spec: dict[str, Any], env: dict[str, str], *fds: int) -> None:
        ours, theirs = socket.socketpair()
        log = os.open(self.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        message = {"kind": "fork", "what": what, "id": ident, "spec": spec, "env": env}
        self.channel.send(message, (log, theirs.fileno(), *fds))
        theirs.close()
        os.close(log)
        self.channels[ident] = Channel(ours)
        self.words[ident] = []

    def python(self, program: str, rank: int = 0, **options: Any) -> Segment:
        return self.start(["python", "-c", program], rank, **options)

    def sh(self, program: str, rank: int = 0, **options: Any) -> Segment:
        return self.start(["sh", "-c", program], rank, **options)

    def receive(self, is_enough: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_enough():
            assert time.monotonic() < deadline, f"{self.words} {self.status} {self.log()}"
            readable, _, _ = select.select([self.channel, *self.channels.values()], [], [], 0.05)
            for ident, channel in list(self.channels.items()):
                if channel in readable:
                    try:
                        self.words[ident] += channel.receive()
                    except Closed:
                        self.channels.pop(ident).close()
            if self.channel in readable:
                for message in self.channel.receive():
                    self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] == "ready":
            self.is_ready = True
        elif message["kind"] == "forked":
            self.pids[message["id"]] = message["pid"]
        else:
            (rank,) = [r for r, pid in self.pids.items() if pid == message["pid"]]
            self.status[rank] = message["status"]

    def stop(self, rank: int = 0, step: int = 2, committed: bool = True) -> None:
        self.segments[rank].write_control(Control(1, step, committed, Save.BOTH))

    def end(self, rank: int = 0) -> int:
        """Wait for a process's end; its status."""
        self.receive(lambda: rank in self.status and rank not in self.channels)
        return self.status[rank]

    def reports(self, rank: int = 0) -> list[tuple[str, dict[str, Any]]]:
        return [(word["event"], word["fields"]) for word in self.words[rank]]

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def says(self, text: str) -> None:
        self.receive(lambda: text in self.log())

    def close(self) -> None:
        self.channel.close()
        try:
            self.process.wait(timeout=PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            for channel in self.channels.values():
                channel.close()
            for segment in self.segments.values():
                segment.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(**settings: Any) -> Agent:
        made.append(Agent(tmp_path / "run", tmp_path, **settings))
        return made[-1]

    yield make
    for a in made:
        a.close()


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("code", "reports"),
    [
        (0, [("ended", {"finished": True, "error": ""})]),
        (
            75,
            [("ended", {"finished": False, "error": "asked to be started again (exit code 75)", "cause": "requested"})],
        ),
        (1, []),
        (143, []),
    ],
)
def test_what_an_exit_code_says(agent: Any, code: int, reports: list[Any]) -> None:
    a = agent()
    a.sh(f"exit {code}")
    assert a.end() == code
    assert a.reports() == reports


def test_the_stop_signal_comes_once_and_whatever_follows_is_a_stop(agent: Any) -> None:
    a = agent(stop_signal="USR1")
    a.sh("trap 'echo asked' USR1; echo ready; while ! [ -e go ]; do sleep 0.02; done; exit 3")
    a.says("ready")
    a.stop(committed=False)
    a.stop()
    a.says("asked")
    a.stop(step=4)  # said again, as every look at the segment does
    time.sleep(0.3)
    (a.run.path.parent / "go").touch()
    assert a.end() == 3
    assert a.log().count("asked") == 1
    assert a.reports() == [
        ("stop_signal", {"name": "SIGUSR1"}),
        ("ended", {"finished": False, "error": "stopped when asked to"}),
    ]


def test_a_stop_that_is_only_proposed_is_not_told(agent: Any) -> None:
    a = agent()
    a.sh("trap 'echo asked' TERM; echo ready; while ! [ -e go ]; do sleep 0.02; done; exit 0")
    a.says("ready")
    a.stop(committed=False)
    time.sleep(0.3)
    (a.run.path.parent / "go").touch()
    assert a.end() == 0
    assert "asked" not in a.log()


def test_a_signal_to_everything_in_the_step_is_not_sent_again(agent: Any) -> None:
    """As Slurm's linuxproc does: the stand-in gets it too."""
    a = agent()
    a.sh("trap 'echo asked' TERM; echo ready; while ! [ -e go ]; do sleep 0.02; done; exit 0")
    a.says("ready")
    for pid in (a.process.pid, a.pids[0]):
        os.kill(pid, signal.SIGTERM)
    a.says("asked")
    a.stop()
    a.receive(lambda: a.segments[0].read_heartbeat().phase is Phase.HOLD)
    (a.run.path.parent / "go").touch()
    a.end()
    assert a.log().count("asked") == 1
    assert a.reports() == [("ended", {"finished": False, "error": "stopped when asked to"})]


@pytest.mark.parametrize("how", ["exit 0", "exit 143", "trap - TERM; kill -TERM $$"])
def test_an_end_after_a_signal_from_outside_is_not_the_end_of_the_run(agent: Any, how: str) -> None:
    a = agent()
    a.sh(f"trap 'echo asked; {how}' TERM; echo ready; while :; do sleep 0.02; done")
    a.says("ready")
    for pid in (a.process.pid, a.pids[0]):
        os.kill(pid, signal.SIGTERM)
    a.end()
    assert a.reports() == [("ended", {"finished": False, "error": "ended after SIGTERM from outside"})]


def test_a_command_that_cannot_be_started_is_a_mistake_and_no_crash(agent: Any) -> None:
    a = agent()
    a.start(["./no-such-program"])
    assert a.end() == 127
    ((event, fields),) = a.reports()
    assert (event, fields["cause"]) == ("failed", "bad_config")
    assert "cannot start './no-such-program': ./no-such-program: No such file" in fields["error"]
    assert a.log() == ""  # the agent writes it, once for all ranks


def test_torchruns_variables(agent: Any) -> None:
    a = agent()
    wanted = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"]
    wanted += ["MASTER_ADDR", "MASTER_PORT"]
    wanted += ["TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "STOKER_ATTEMPT", "STOKER_CHECKPOINTS"]
    a.python(f"import os; print(*(os.environ.get(n) for n in {wanted}))", rank=1, world=2, generation=3)
    a.end(1)
    assert a.log() == f"[1] 1 1 2 2 0 0 10.0.0.7 20002 2 run 1 {a.run.checkpoints}\n"


def test_only_rank_0_writes_metrics_and_nothing_of_ours_leaks(agent: Any) -> None:
    a = agent()
    for rank in (0, 1):
        a.python(
            "import os; print(sorted(n for n in os.environ if n in ('STOKER_METRICS', 'STOKER_ZYGOTE_FD')),"
            " sorted(os.listdir('/proc/self/fd')))",
            rank=rank,
            world=2,
        )
        a.end(rank)
    # Standard streams, and the one that lists them.
    assert a.log() == "[0] ['STOKER_METRICS'] ['0', '1', '2', '3']\n[1] [] ['0', '1', '2', '3']\n"


def test_signals_mean_to_the_command_what_they_do_by_default(agent: Any) -> None:
    a = agent()
    a.start(["grep", "-E", "Sig(Ign|Blk)", "/proc/self/status"])
    a.end()
    masks = [int(line.split()[-1], 16) for line in a.log().splitlines()]
    assert [mask & 0x7FFFFFFF for mask in masks] == [0, 0]  # 32 and 33 are the C library's own


def test_output_has_the_rank_before_it_and_a_progress_bar_is_one_line(agent: Any) -> None:
    a = agent()
    program = (
        "import sys; print('one'); [print(f'\\r{i}%', end='') for i in range(99)]; print(); sys.stderr.write('two')"
    )
    a.python(program, rank=3, world=4)
    a.end(3)
    assert a.log() == "[3] one\n[3] 98%\n[3] two\n"


def test_a_heartbeat_shows_in_the_segment(agent: Any) -> None:
    a = agent()
    segment = a.python(
        "import os, time\n"
        "while not os.path.exists('beat'): time.sleep(0.02)\n"
        "def beat(text): open(os.environ['STOKER_HEARTBEAT'], 'w').write(text)\n"
        "beat('7 1'); time.sleep(0.4); beat('7 2')\n"
        "while not os.path.exists('step'): time.sleep(0.02)\n"
        "beat('8')\n"
        "time.sleep(60)"
    )
    a.receive(lambda: segment.read_heartbeat().phase is Phase.SILENT)
    silent = segment.read_heartbeat()
    a.receive(lambda: segment.read_heartbeat().time > silent.time)  # nobody is taken for hung who never said a word
    (a.run.path.parent / "beat").touch()
    a.receive(lambda: segment.read_heartbeat().sequence == 2)
    beat = segment.read_heartbeat()
    assert (beat.phase, beat.step, beat.step_seconds) == (Phase.STEP, 7, 0.0)  # no step is through yet
    time.sleep(0.3)
    assert segment.read_heartbeat().time == beat.time  # it ages
    (a.run.path.parent / "step").touch()
    a.receive(lambda: segment.read_heartbeat().step == 8)
    assert segment.read_heartbeat().step_seconds > 0
    a.stop(committed=False)
    a.receive(lambda: segment.read_control().stop_step != NO_STOP)
    assert segment.read_heartbeat().step == 8


def test_a_heartbeat_of_absurd_numbers_is_ignored_and_told_once(agent: Any) -> None:
    a = agent()
    segment = a.python(
        "import os, time\n"
        "def beat(text): open(os.environ['STOKER_HEARTBEAT'], 'w').write(text); time.sleep(0.3)\n"
        "beat('5 1'); beat('9223372036854775808'); beat('6 18446744073709551616'); beat('9' * 60)\n"
        "open(os.environ['STOKER_METRICS'], 'w').write('{\"step\": 9223372036854775808}\\n')\n"
        "beat('7 2'); time.sleep(60)"
    )
    a.receive(lambda: segment.read_heartbeat().step == 7)
    a.says("not taken as metrics")  # what is told comes by way of a thread
    assert a.log().count("stoker: heartbeat ignored, expected numbers up to") == 1
    assert a.log().count("not taken as metrics") == 1
    assert a.process.poll() is None


def test_a_look_that_fails_is_told_once_and_raises_nothing() -> None:
    said: list[bytes] = []
    rank = object.__new__(Rank)
    vars(rank).update(rank=3, _has_failed_to_look=False, _files=SimpleNamespace(log=1))
    vars(rank).update(_writer=SimpleNamespace(log=lambda _, data: said.append(data)))
    vars(rank).update(_look=lambda: struct.pack("<q", 2**63))
    rank.look()
    rank.look()
    assert len(said) == 1
    assert said[0].startswith(b"[3] stoker: cannot look at heartbeat and metrics (error: ")


def test_steps_are_not_counted_on_once_a_stop_is_proposed(agent: Any) -> None:
    """Otherwise heartbeats that skip steps would outrun each proposal."""
    a = agent()
    segment = a.python(
        "import os, time\n"
        "for i in range(10**6):\n"
        "    open(os.environ['STOKER_HEARTBEAT'], 'w').write(str(100 * i)); time.sleep(0.02)"
    )
    a.receive(lambda: segment.read_heartbeat().step > 0)
    a.stop(step=10**9, committed=False)

    def stands_still() -> bool:
        step = segment.read_heartbeat().step
        time.sleep(0.5)  # many heartbeats
        return bool(segment.read_heartbeat().step == step)

    a.receive(stands_still)


def test_metrics_become_the_runs_and_what_is_none_is_told(agent: Any) -> None:
    a = agent()
    lines = [
        '{"step": 1, "loss": 2.5, "time": 9, "x": {"nested": 1}}',
        "{broken",
        '{"loss": 1}',
        '{"step": 2, "loss": NaN}',
    ]
    text = "\n".join(lines) + '\n{"step": 3, "torn'
    a.python(f"import os; open(os.environ['STOKER_METRICS'], 'w').write({text!r})")
    a.end()
    written = [json.loads(line) for line in a.run.attempt(1).metrics(1).read_text().splitlines()]
    assert written[0] == {"step": 1, "loss": 2.5, "time": 9}
    assert (written[1]["step"], written[1]["loss"], len(written)) == (2, None, 2)
    assert a.log().count("not taken as metrics") == 2
    assert '{"loss": 1}' in a.log()


def test_a_line_of_metrics_without_end_does_not_stop_those_behind_it(agent: Any) -> None:
    a = agent()
    program = """
import json, os
for record in ({"step": 1}, {"step": 2, "x": "x" * 5_000_000}, {"step": 3}):
    with open(os.environ["STOKER_METRICS"], "a") as f:
        f.write(json.dumps(record) + chr(10))
"""
    a.python(program)
    a.end()
    written = [json.loads(line)["step"] for line in a.run.attempt(1).metrics(1).read_text().splitlines()]
    assert written == [1, 3]
    assert a.log().count("not taken as metrics") == 1
    assert len(a.log()) < 1000


def test_the_last_heartbeat_of_rank_0_is_kept_where_it_writes_no_metrics(agent: Any) -> None:
    a = agent()
    beat = "open(os.environ['STOKER_HEARTBEAT'], 'w').write"
    a.python(f"import os, time; {beat}('20'); time.sleep(0.5); {beat}('25')")
    a.end()
    (record,) = map(json.loads, a.run.attempt(1).metrics(1).read_text().splitlines())
    assert record["step"] == 25


# Nothing stays behind.

FAMILY = "sleep 301 & echo group $!; setsid sleep 302 & echo session $!; sh -c 'setsid sleep 303 & echo orphan $!';"
FAMILY += " echo ready;"


def family(a: Agent) -> list[int]:
    a.says("ready")
    pids = [int(line.split()[-1]) for line in a.log().splitlines() if line.split()[1] in ("group", "session", "orphan")]
    assert len(pids) == 3
    assert all(map(is_running, pids))
    return pids


def gone(a: Agent, pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, [p for p in pids if is_running(p)]
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_what_a_process_has_started_ends_with_it(agent: Any, how: str) -> None:
    a = agent()
    a.sh(f"{FAMILY} while ! [ -e go ]; do sleep 0.02; done")
    pids = family(a)
    if how == "killed":
        os.killpg(a.pids[0], signal.SIGKILL)  # as the agent does
    else:
        (a.run.path.parent / "go").touch()
    a.end()
    assert not any(map(is_running, pids))  # by the time that the agent hears of the end


def test_nothing_survives_an_agent_that_is_killed(agent: Any) -> None:
    a = agent()
    a.sh(f"{FAMILY} sleep 60")
    pids = [*family(a), a.pids[0]]
    a.channel.close()  # the kernel does this for a killed one
    gone(a, pids)
    a.process.wait(timeout=PATIENCE)
    assert not list(a.run.path.glob("stoker-*/own-*"))


def test_a_process_dies_with_the_stand_in_even_if_that_is_killed(agent: Any) -> None:
    a = agent()
    a.sh("echo ready; sleep 60")
    a.says("ready")
    a.process.kill()
    gone(a, [a.pids[0]])
