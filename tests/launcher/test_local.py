"""Working on a run without sbatch: the loop around the supervisor, cancelling it, resuming it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import cli, code, local
from stoker.launcher.local import Loop, start_detached
from stoker.launcher.process import ProcessId, loop_process
from stoker.launcher.run import bootstrap
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.process_start import start_ticks
from stoker.launcher.run.submissions import Submission, new_submission, submissions
from stoker.launcher.state import State, look

# Stands for a supervisor: notes each start and each signal in `seen`, ends as `plan` says, one word per attempt.
SUPERVISOR = """#!/bin/bash
cd "$(dirname "$0")"
for name in INT TERM USR1; do trap "echo $name >> seen; [ $name = USR1 ] && exit 75 || exit 143" $name; done
echo "start $*" >> seen
step=$(grep -c start seen)
plan=($(cat plan))
end=${plan[$((step - 1))]}
[ "$end" != wait ] && exit $end
while true; do sleep 0.05; done
"""


@pytest.fixture
def local_run(make_run: Callable[..., RunDir], tmp_path: Path) -> Iterator[Callable[[str], RunDir]]:
    """A frozen local run whose attempts end as a plan says: exit codes, or `wait`."""
    made: list[RunDir] = []

    def make(plan: str) -> RunDir:
        run = make_run("it's a (local) run", SUPERVISOR, kind="local")
        (run.path / "plan").write_text(plan)
        snapshot = code.collect(tmp_path)
        packed = code.pack(snapshot, run.code)
        identity = {"id": "x", "code": {"sha256": packed.sha256, "pythonpath": ["code"]}}
        run.run.write_text(json.dumps(identity))
        shutil.copy(bootstrap.__file__, run.path / "bootstrap.py")
        made.append(run)
        return run

    yield make
    for run in made:
        for submission in submissions(run):
            process = loop_process(submission)
            if process and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)


def seen(run: RunDir) -> list[str]:
    path = run.path / "seen"
    return path.read_text().splitlines() if path.exists() else []


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def loop(run: RunDir) -> subprocess.Popen[bytes]:
    """The loop in a process of its own, as `stoker run` has it."""
    submission = new_submission(run, "local")
    program = (
        "import sys; from pathlib import Path; from stoker.launcher.local import Loop\n"
        "from stoker.launcher.run.layout import RunDir; from stoker.launcher.run.submissions import Submission\n"
        "sys.exit(Loop(Submission(RunDir(Path(sys.argv[1])), int(sys.argv[2])), inside_slurm=False).run())"
    )
    return subprocess.Popen([sys.executable, "-c", program, str(run.path), str(submission.number)])


@pytest.mark.parametrize(("plan", "code_"), [("0", 0), ("1", 1), ("75 75 0", 0), ("75 2", 2)])
def test_it_starts_again_exactly_on_the_requeue_code(plan: str, code_: int, local_run: Any) -> None:
    run = local_run(plan)
    assert loop(run).wait(timeout=60) == code_
    assert seen(run) == ["start --local"] * len(plan.split())


@pytest.mark.parametrize(("sent", "received"), [("INT", "INT"), ("TERM", "TERM"), ("HUP", "TERM")])
def test_end_signals_reach_the_supervisor_and_end_the_run(sent: str, received: str, local_run: Any) -> None:
    run = local_run("wait 0")
    process = loop(run)
    wait_until(lambda: "start --local" in seen(run))
    process.send_signal(signal.Signals[f"SIG{sent}"])
    assert process.wait(timeout=30) == 143
    assert seen(run) == ["start --local", received]
    assert submissions(run)[0].is_cancelled


@pytest.mark.parametrize("when", ["being made", "at work"])
def test_an_interrupt_reaches_the_supervisor_once_and_as_such_whenever_it_comes(
    when: str, local_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first one lets it save; a second, or SIGTERM, would end it at once."""
    made = Loop(new_submission(local_run("0"), "local"), inside_slurm=False)
    sent: list[int] = []

    class Child:
        pid = os.getpid()

        def __init__(self, *_: Any, **__: Any) -> None:
            if when == "being made":
                made._on_signal(signal.SIGINT, None)

        def poll(self) -> None:
            pass

        def wait(self) -> int:
            if when == "at work":
                made._on_signal(signal.SIGINT, None)
            return 143

        def send_signal(self, number: int) -> None:
            sent.append(number)

    monkeypatch.setattr(subprocess, "Popen", Child)
    monkeypatch.setattr(local, "_hears", lambda pid, number: True)
    assert made._attempt() == 143
    assert sent == [signal.SIGINT]


def test_warning_signal_reaches_the_supervisor_and_the_run_goes_on(local_run: Any) -> None:
    run = local_run("wait 0")
    process = loop(run)
    wait_until(lambda: "start --local" in seen(run))
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=30) == 0
    assert seen(run) == ["start --local", "USR1", "start --local"]


def test_a_warning_that_comes_before_the_script_can_hear_it_waits_for_it(local_run: Any) -> None:
    run = local_run("wait 0")
    script = SUPERVISOR.replace("for name", "touch begun; sleep 0.5\nfor name", 1)
    (run.path / "submit.sbatch").write_text(script)
    process = loop(run)
    wait_until((run.path / "begun").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=30) == 0
    assert seen(run) == ["start --local", "USR1", "start --local"]


def test_killed_supervisor_is_not_started_again(local_run: Any) -> None:
    run = local_run("wait 0")
    (run.path / "submit.sbatch").write_text("#!/bin/bash\necho start >> seen\nkill -9 $$\n")
    assert loop(run).wait(timeout=30) == 137
    assert seen(run) == ["start"]


def test_detached_loop_outlives_its_starter_and_is_cancelled(local_run: Any, capsys: Any) -> None:
    run = local_run("75 wait 0")
    process = start_detached(new_submission(run, "local"))
    wait_until(lambda: len(seen(run)) == 2)
    assert look(run, None).state is State.PENDING  # the stand-in makes no attempts
    assert os.getsid(process.pid) == process.pid
    assert cli.main(["cancel", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{run.path}: cancelled; process {process.pid} ended\n"
    assert process.is_alive() is False
    assert seen(run)[-1] == "TERM"
    assert look(run, None).state is State.CANCELLED
    assert cli.main(["cancel", str(run.path)]) == 0
    assert "CANCELLED already; nothing to cancel" in capsys.readouterr().out


def test_resume_refuses_while_it_runs_and_goes_on_after(local_run: Any, capsys: Any) -> None:
    run = local_run("wait 0")
    process = start_detached(new_submission(run, "local"))
    wait_until(lambda: len(seen(run)) == 1)
    assert cli.main(["resume", str(run.path)]) == 1
    assert f"process {process.pid} on {os.uname().nodename} still works on it" in capsys.readouterr().err
    assert cli.main(["cancel", str(run.path)]) == 0
    assert cli.main(["resume", str(run.path)]) == 0
    wait_until(lambda: loop_gone(run, 2))
    assert seen(run) == ["start --local", "TERM", "start --local"]


def loop_gone(run: RunDir, submission: int) -> bool:
    process = loop_process(Submission(run, submission))
    return process is not None and process.is_alive() is False


def test_supervisor_left_by_a_killed_loop_is_found(local_run: Any, capsys: Any) -> None:
    run = local_run("wait")
    loop_id = start_detached(new_submission(run, "local"))
    wait_until(lambda: len(seen(run)) == 1)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(loop_id.pid)], capture_output=True, text=True).stdout
    supervisor = int(children)
    os.kill(loop_id.pid, signal.SIGKILL)
    wait_until(lambda: loop_id.is_alive() is False)
    attempt = run.attempt(1)
    attempt.path.mkdir()
    start = {"submission": 1, "host": loop_id.host, "pid": supervisor, "pid_start": start_ticks(supervisor)}
    attempt.start.write_text(json.dumps(start))
    assert cli.main(["cancel", str(run.path)]) == 0
    assert f"process {supervisor} ended" in capsys.readouterr().out
    assert seen(run)[-1] == "TERM"


def test_process_on_another_host_is_named(local_run: Any, capsys: Any) -> None:
    run = local_run("wait")
    submission = new_submission(run, "local")
    record = {"host": "elsewhere", "pid": 1, "start": 1}
    (run.submissions / "0001.local.json").write_text(json.dumps(record))
    assert cli.main(["cancel", str(run.path)]) == 1
    assert "its process is on elsewhere: repeat this there" in capsys.readouterr().out
    assert submission.is_cancelled


def test_background_that_cannot_start_says_why(local_run: Any) -> None:
    run = local_run("wait")
    run.code.write_bytes(b"damaged")
    with pytest.raises(Exception, match=r"ended at once: stoker: error: .*code\.tar\.gz: changed since"):
        start_detached(new_submission(run, "local"))


def test_reused_pid_is_another_process() -> None:
    own = ProcessId.own()
    assert own.is_alive() is True
    assert ProcessId(own.host, own.pid, own.start - 1).is_alive() is False
    assert ProcessId("elsewhere", own.pid, own.start).is_alive() is None


def test_zombie_has_ended() -> None:
    child = subprocess.Popen(["true"])
    wait_until(lambda: start_ticks(child.pid) is None)
    child.wait()
