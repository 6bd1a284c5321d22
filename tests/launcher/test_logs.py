"""The logs of all attempts and nodes as one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import cli
from stoker.launcher.logs import Follower, Source, sources, tail_offset
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.run.submissions import new_submission


@pytest.fixture
def run(make_run: Callable[..., RunDir]) -> RunDir:
    found = make_run()
    new_submission(found, "sbatch").set_job("7")
    (found.job_logs / "7.log").write_text("batch\n")
    for number in (1, 2):
        attempt = claim(found)
        for node in ("n1", "n2", "n10"):
            attempt.log(node).write_text(f"{node} of {number}, line 1\nline 2\n")
    return found


def shown(capsys: Any, *arguments: str) -> list[str]:
    assert cli.main(["logs", *arguments]) == 0
    return list(capsys.readouterr().out.splitlines())


def test_everything_in_order(run: RunDir, capsys: Any) -> None:
    lines = shown(capsys, str(run.path))
    assert lines[0] == "[job 7] batch"
    assert [line for line in lines if "line 1" in line] == [
        f"[{a} {n}] {n} of {a}, line 1" for a in (1, 2) for n in ("n1", "n2", "n10")
    ]
    assert len(lines) == 13


def test_one_node(run: RunDir, capsys: Any) -> None:
    assert shown(capsys, str(run.path), "--node", "n2")[::2] == ["[1 n2] n2 of 1, line 1", "[2 n2] n2 of 2, line 1"]


def test_one_attempt(run: RunDir, capsys: Any) -> None:
    lines = shown(capsys, str(run.path), "--attempt", "2", "-n", "1")
    assert lines == ["[2 n1] line 2", "[2 n2] line 2", "[2 n10] line 2"]


def test_no_log_yet(make_run: Callable[..., RunDir], capsys: Any) -> None:
    assert cli.main(["logs", str(make_run("empty").path)]) == 0
    assert "no log yet" in capsys.readouterr().err


def test_follower_waits_for_whole_lines_and_bytes(tmp_path: Path) -> None:
    path, out = tmp_path / "x.log", []
    follower = Follower(lambda: [Source(path, "x")], out.append)
    assert follower.poll() is False
    path.write_bytes(b"one\ntw")
    assert follower.poll() is True
    with open(path, "ab") as f:
        f.write(b"o \xff\nthree")
    follower.poll()
    assert out == ["[x] one\n", "[x] two \ufffd\n"]
    follower.poll(with_torn=True)
    assert out[-1] == "[x] three\n"


@pytest.mark.parametrize("lines", [0, 1, 3, 5000, 20000])
def test_tail(lines: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    text = [f"line {i} {'x' * (i % 40)}\n" for i in range(10000)]
    path.write_text("".join(text))
    offset = tail_offset(path, lines)
    assert path.read_bytes()[offset:].decode() == "".join(text[-lines:] if lines else [])


def test_tail_of_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    assert tail_offset(tmp_path / "x", 5) == 0


def test_follow_goes_on_over_a_requeue_and_ends_with_the_run(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", "printf '7\\x1fRUNNING\\x1f1:00\\x1fn1\\x1fNone\\x1f/w\\x1fx\\x1f/c\\n'")
    Outcome(Cause.PREEMPTED, Next.REQUEUE, 75, "preempted").write(run.attempt(2))

    def go_on() -> None:
        # Of what its first look finds it shows nothing; Slurm is asked after that.
        deadline = time.monotonic() + 30
        while not fake_slurm.calls("squeue") and time.monotonic() < deadline:
            time.sleep(0.02)
        third = claim(run)
        third.log("n5").write_text("went on\n")
        third.start.write_text('{"submission": 1}')
        time.sleep(0.3)
        with open(third.log("n5"), "a") as f:
            f.write("last words")
        Outcome(Cause.FINISHED, Next.NOTHING, 0, "done").write(third)

    thread = threading.Thread(target=go_on)
    thread.start()
    lines = shown(capsys, "-f", "-n", "0", str(run.path))
    thread.join()
    assert lines == ["[3 n5] went on", "[3 n5] last words"]


def test_sources_are_listed_anew(run: RunDir) -> None:
    before = len(sources(run))
    claim(run).log("n9").write_text("")
    assert len(sources(run)) == before + 1
