"""Attempt numbers are fencing tokens: unique, without gaps, and only the highest may publish."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from stoker.launcher.run.attempts import Fence, SupersededError, claim
from stoker.launcher.run.layout import RunDir


def test_first_attempt_is_one_and_has_its_folders(tmp_path: Path) -> None:
    attempt = claim(RunDir(tmp_path))
    assert attempt.number == 1
    assert sorted(p.name for p in attempt.path.iterdir()) == ["events", "logs"]


def test_many_claims_at_once_get_different_numbers_without_gaps(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from stoker.launcher.run.attempts import claim\n"
        "from stoker.launcher.run.layout import RunDir\n"
        "run = RunDir(Path(sys.argv[1])); print('up', flush=True); sys.stdin.readline()\n"
        "for _ in range(20): print(claim(run).number)\n"
    )
    claimers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for c in claimers:
        assert c.stdout is not None
        c.stdout.readline()
    numbers = []
    for c in claimers:
        assert c.stdin is not None
        c.stdin.write("\n")
        c.stdin.flush()
    for c in claimers:
        numbers += [int(n) for n in c.communicate(timeout=60)[0].split()]
    assert sorted(numbers) == list(range(1, 81))


def test_fence_falls_when_a_later_attempt_is_claimed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    fence = Fence(run, claim(run).number)
    fence.check()
    second = claim(run)
    assert not fence.is_current()
    with pytest.raises(SupersededError, match=r"attempt 1 of .* was superseded"):
        fence.check()
    Fence(run, second.number).check()
