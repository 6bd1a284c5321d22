"""srun right after a requeue (words of 22.05, seen on a cluster): the batch script runs, and no step can be had yet."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from stoker.launcher import launch_agents
from stoker.launcher.launch_agents import Launch, _Srun

EARLY = "srun: error: Unable to create step for job 1: Job/step already completing or completed"
OTHER = "srun: error: Unable to create step for job 1: Invalid account"


def srun(tmp_path: Path, words: str, ends: int) -> tuple[Launch, Path]:
    """It fails with these words so often, then succeeds; the file has a line for each call."""
    calls = tmp_path / "calls"
    script = f'echo >> {calls}; [ $(wc -l < {calls}) -gt {ends} ] && exit 0; echo "{words}" >&2; exit 1'
    return _Srun(lambda: subprocess.Popen(["sh", "-c", script], stderr=subprocess.PIPE)), calls


def end_of(launch: Launch) -> int:
    deadline = time.monotonic() + 30
    while (code := launch.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return code


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_agents, "_PAUSE", 0.05)


def test_a_step_that_cannot_be_had_yet_is_asked_for_again(tmp_path: Path) -> None:
    launch, calls = srun(tmp_path, EARLY, 2)
    assert end_of(launch) == 0
    assert calls.read_text() == "\n" * 3


def test_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_agents, "_PATIENCE", 0.3)
    launch, calls = srun(tmp_path, EARLY, 99)
    assert end_of(launch) == 1
    assert len(calls.read_text()) > 1


def test_other_failures_are_the_supervisors_to_judge(tmp_path: Path) -> None:
    launch, calls = srun(tmp_path, OTHER, 2)
    assert end_of(launch) == 1
    assert calls.read_text() == "\n"
