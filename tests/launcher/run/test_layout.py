"""Names and numbers in the run directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.launcher.run.layout import CheckpointName, RunDir, open_run


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("step-00001000-a0001", CheckpointName(1000, 1)),
        ("step-123456789-a12345", CheckpointName(123456789, 12345)),
        ("step-1000-a0001", None),
        ("step-00001000", None),
        ("step-00001000-a0001.old", None),
        (".tmp-step-00001000-a0001-g0001-abcdef01", None),
        (".tmp-deleting-step-00001000-a0001-abcdef01", None),
    ],
)
def test_checkpoint_names(name: str, parsed: CheckpointName | None) -> None:
    assert CheckpointName.parse(name) == parsed
    if parsed is not None:
        assert str(parsed) == name


def test_checkpoints_are_listed_newest_first_by_step_then_attempt_not_by_text(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for name in ["step-00000020-a0001", "step-100000000-a0001", "step-00000020-a0003", "step-99999999-a0002", "notes"]:
        (run.checkpoints / name).mkdir(parents=True)
    (run.checkpoints / ".tmp-step-00000030-a0003-g0001-ab").mkdir()
    found = [(c.step, c.attempt) for c in run.all_checkpoints()]
    assert found == [(100000000, 1), (99999999, 2), (20, 3), (20, 1)]


def test_attempts_are_listed_by_number(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.all_attempts() == []
    for name in ["0002", "0010", "10000", "0001", "abc", "1"]:
        (run.attempts / name).mkdir(parents=True)
    assert [a.number for a in run.all_attempts()] == [1, 2, 10, 10000]
    assert run.attempt(2).path == tmp_path / "attempts" / "0002"


def test_metrics_files_are_listed_by_generation(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    for generation in (2, 10, 1):
        attempt.metrics(generation).touch()
    (attempt.path / "metrics-g0003.jsonl.bak").touch()
    assert [generation for generation, _ in attempt.all_metrics()] == [1, 2, 10]


def test_open_run_refuses_another_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a run directory \(no run.json"):
        open_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    assert open_run(tmp_path).path == tmp_path
