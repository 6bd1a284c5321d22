"""What srun says of agents that failed to start (words of 22.05, seen on a cluster)."""

from __future__ import annotations

import os

import pytest
from stoker.launcher import srun_words
from stoker.launcher.srun_words import SrunWords, failures_in


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("srun: error: n2: task 1: Exited with exit code 127\n", [("n2", "Exited with exit code 127", False)]),
        ("srun: error: n2: task 1: Killed\n", [("n2", "Killed", False)]),
        ("srun: error: n2,n4: tasks 1,3: Terminated\n", [("n2", "Terminated", False), ("n4", "Terminated", False)]),
        (
            "srun: error: n[2-3]: tasks 1-2: Exited with exit code 1\n",
            [("n2", "Exited with exit code 1", False), ("n3", "Exited with exit code 1", False)],
        ),
        (
            "srun: error: Task launch for StepId=7.0 failed on node n2: Communication connection failure\n",
            [("n2", "Communication connection failure", True)],
        ),
        ("srun: error: Application launch failed: Communication connection failure\n", []),
        ("srun: launch/slurm: _step_signal: Terminating StepId=7.0\n", []),
        ("anything else: task 1: Exited\n", []),
    ],
)
def test_nodes_that_failed(line: str, found: list[tuple[str, str, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srun_words, "hostnames", lambda text: ["n2", "n3"] if "[" in text else text.split(","))
    assert list(failures_in(line)) == found


def test_words_are_passed_on_and_kept(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as stream:
        words = SrunWords(stream)
        os.write(writer, b"hello\nsrun: error: n2: task 1: Killed\nno end")
        os.close(writer)
        words.join()
        assert words.take() == [("n2", "Killed", False)]
        assert words.take() == []
    assert capfd.readouterr().err == "hello\nsrun: error: n2: task 1: Killed\nno end"


@pytest.mark.parametrize(
    ("said", "last"),
    [
        (b"sh: bwarp: not found\nsrun: error: n2: task 1: Exited with exit code 127\n", "sh: bwarp: not found"),
        (b"srun: unrecognized option '--x'\nTry \"srun --help\"\n", "srun: unrecognized option '--x'"),
        (b"srun: error: n2: task 1: Killed\n", ""),
    ],
)  # fmt: skip
def test_the_line_that_tells_why_nothing_started_is_kept(said: bytes, last: str) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as stream:
        words = SrunWords(stream)
        os.write(writer, said)
        os.close(writer)
        words.join()
        assert words.last == last
