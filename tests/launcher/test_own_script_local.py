"""A shell script of the user's own through the real supervisor and agents, on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stoker.launcher.process import loop_process
from stoker.launcher.rehearsal.trial import Trial, wait_for
from stoker.launcher.run.outcome import Outcome
from stoker.launcher.run.submissions import submissions

# First crashes; then works until it is asked to stop; then finds that nothing is left to do.
SCRIPT = """
[ $STOKER_ATTEMPT = 2 ] && { echo done; exit 0; }
[ $STOKER_GENERATION = 1 ] && { echo oh no; exit 3; }
trap 'echo saved > "$STOKER_CHECKPOINTS/state-$RANK"; exit 0' USR2
echo 4 > "$STOKER_HEARTBEAT"; sleep 0.4; echo 5 > "$STOKER_HEARTBEAT"
while :; do sleep 0.05; done
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    made: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str) -> Trial:
        command = [sys.executable, "-m", "stoker.launcher.cli", "run", "cluster=local", f"run_root={tmp_path}/runs"]
        env = os.environ | {"TMPDIR": str(tmp_path)}
        made.append(subprocess.Popen([*command, *arguments], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL))
        wait_for(lambda: list(tmp_path.glob("runs/*/submissions/*.local.json")), lambda: "a start")
        (path,) = tmp_path.glob("runs/*")
        return Trial(path)

    yield run
    for process in made:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def beats(directory: Path) -> list[str]:
    return [path.read_text() for path in directory.glob("stoker-*/own-*/rank-*-g2/heartbeat")]


def last(run: Trial) -> Outcome:
    return run.wait_end()


def test_crashed_asked_to_stop_and_finished(start: Callable[..., Trial], tmp_path: Path) -> None:
    (tmp_path / "work.sh").write_text(SCRIPT)
    run = start("cluster.nodes=2", "task.stop_signal=USR2", "--", "bash", "work.sh")
    wait_for(lambda: len(run.events("form")) == 2, run.story)
    wait_for(lambda: beats(tmp_path) == ["5\n", "5\n"], run.story)
    loop = loop_process(submissions(run.dir)[-1])
    assert loop is not None
    os.kill(loop.pid, signal.SIGUSR1)
    assert last(run).reason == "all ranks exited 0", run.story()
    first, second = run.outcomes()
    assert first is not None
    assert second is not None
    assert (first.cause.value, first.reason) == ("time_limit", "the time limit is near (warned by SIGUSR1)")
    assert (second.cause.value, second.exit_code) == ("finished", 0)
    (trouble,) = run.events("trouble")
    assert trouble["reason"] in ("rank 0 exited with code 3", "rank 1 exited with code 3")
    assert sorted(e["rank"] for e in run.events("stop_signal")) == [0, 1]
    assert {p.name for p in run.dir.checkpoints.iterdir()} == {"state-0", "state-1"}
    (metrics,) = [json.loads(line) for line in run.dir.attempt(1).metrics(2).read_text().splitlines()]
    assert metrics["step"] == 5
    wait_for(lambda: not list(tmp_path.glob("stoker-*/own-*")), lambda: "the nodes' copies to be gone")


def test_a_command_that_is_not_there_fails_at_once_and_says_so(start: Callable[..., Trial]) -> None:
    run = start("--", "no-such-program", "x")
    outcome = last(run)
    assert (outcome.cause.value, outcome.exit_code, outcome.rank) == ("bad_config", 2, 0)
    assert outcome.reason == "cannot start 'no-such-program': no-such-program: No such file or directory"
    assert len(run.events("form")) == 1
