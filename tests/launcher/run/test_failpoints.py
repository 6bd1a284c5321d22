"""Breaking on purpose: conditions, actions, bad input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest


def run(points: str, code: str) -> subprocess.CompletedProcess[str]:
    program = f"from stoker.launcher.run.failpoints import failpoint\n{code}"
    environment = dict(os.environ, STOKER_FAILPOINTS=points)
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)


STEPS = "for step in range(5):\n    failpoint('step', step=step, rank=1)\n    print(step)"


@pytest.mark.parametrize(
    ("points", "code", "printed"),
    [
        ("", 0, "0 1 2 3 4"),
        ("step@step=2:exit", 66, "0 1"),
        ("step@step=2@rank=0:exit", 0, "0 1 2 3 4"),
        ("step@attempt=1:exit", 0, "0 1 2 3 4"),
        ("other:exit", 0, "0 1 2 3 4"),
        ("step@step=1:kill", -signal.SIGKILL, "0"),
        ("step@step=3:signal-TERM", -signal.SIGTERM, "0 1 2"),
        ("step@step=3:raise,step@step=1:exit", 66, "0"),
    ],
)
def test_acts_only_where_all_conditions_hold(points: str, code: int, printed: str) -> None:
    done = run(points, STEPS.replace("print(step)", "print(step, flush=True)"))
    assert (done.returncode, done.stdout.split()) == (code, printed.split())


def test_raise_acts_once() -> None:
    code = (
        "for n in range(2):\n    try:\n        failpoint('a')\n        print('passed')\n"
        "    except RuntimeError as e:\n        print(e)"
    )
    assert run("a:raise", code).stdout.splitlines() == ["failpoint a", "passed"]


def test_freeze_stops_the_process_until_it_is_continued() -> None:
    program = "from stoker.launcher.run.failpoints import failpoint\nfailpoint('a')\n"
    process = subprocess.Popen([sys.executable, "-c", program], env=dict(os.environ, STOKER_FAILPOINTS="a:freeze"))
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


def test_pause_acts_every_time() -> None:
    began = time.monotonic()
    assert run("step:pause-100", STEPS).returncode == 0
    assert time.monotonic() - began > 0.5


@pytest.mark.parametrize("points", ["a", "a:explode", "a@b:exit", ":exit", "a:signal-NOPE", "a:TERM", "a:pause-x"])
def test_a_mistyped_failpoint_is_refused_at_start(points: str) -> None:
    done = run(points, "")
    assert done.returncode == 1
    assert "expected NAME[@key=value...]:ACTION" in done.stderr
