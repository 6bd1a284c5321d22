"""The last word of an attempt."""

from __future__ import annotations

from pathlib import Path

from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.outcome import EXIT_FAILED, EXIT_REQUEUE, Cause, Next, Outcome


def test_first_outcome_stands_and_reads_back_equal(tmp_path: Path) -> None:
    attempt = claim(RunDir(tmp_path))
    assert Outcome.read(attempt) is None
    first = Outcome(
        Cause.PREEMPTED, Next.REQUEUE, EXIT_REQUEUE, "preempted", 7, 7, None, "n1", None, {"signal": "USR1"}, 1.5
    )
    assert first.write(attempt)
    assert not Outcome(Cause.CRASH, Next.NOTHING, EXIT_FAILED, "late").write(attempt)
    assert Outcome.read(attempt) == first
