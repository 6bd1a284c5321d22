"""The private copy that a user's own script runs in: whoever sweeps takes away dead ones' and nobody else's."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
from stoker.launcher import task_place
from stoker.launcher.run.layout import RunDir
from stoker.launcher.task_place import Place


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.run.write_text(json.dumps({"id": "x", "code": {"cwd": None}}))
    run.env.write_text(json.dumps({"cwd": str(tmp_path)}))
    monkeypatch.setenv("STOKER_LOCAL_DIR", str(tmp_path))
    return run


def test_the_next_one_takes_away_what_a_dead_one_has_left(run: RunDir) -> None:
    dead, live = Place.make(run), Place.make(run)
    task_place.os.close(dead.lock)
    last = Place.make(run)
    assert [place.root.exists() for place in (dead, live, last)] == [False, True, True]
    for place in (live, last):
        place.remove()
        assert not place.root.exists()


def test_where_the_configured_directory_is_missing_another_one_serves(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("STOKER_LOCAL_DIR", str(tmp_path / "missing"))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    place = Place.make(run)
    assert tmp_path / "tmp" in place.root.parents
    assert f"stoker: going on below {tmp_path}/tmp (" in capsys.readouterr().err
    place.remove()


def test_one_that_is_swept_before_it_holds_its_lock_is_made_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = []

    def late(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not swept:  # somebody else is quicker
            swept.append(fd)
            task_place._sweep(next(iter(run.path.parent.glob("stoker-*"))))
        flock(fd, operation)

    flock = fcntl.flock
    monkeypatch.setattr(task_place.fcntl, "flock", late)
    place = Place.make(run)
    assert swept
    assert place.root.is_dir()
    assert [path.name for path in place.root.parent.glob("own-*")] == [place.root.name]
    place.remove()
