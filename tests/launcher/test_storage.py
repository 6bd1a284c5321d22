"""`checkpoint.storage` at launch: a directory of the run's own elsewhere, behind a link, made whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stoker.conf.load import to_plain
from stoker.conf.schema import Config
from stoker.launcher import cli, freeze, storage
from stoker.launcher.bundle import listing
from stoker.launcher.errors import UserError
from stoker.launcher.resume import changed_config
from stoker.launcher.run.layout import RunDir


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    made = tmp_path / "elsewhere"
    made.mkdir()
    return made


@pytest.fixture
def overrides(tokens: str, tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    place = [f"run_root={tmp_path}/runs", f"checkpoint.storage={elsewhere}"]
    return ["data=custom", f"data.sources.0.prefix={tokens}", "name=t", "data.seq_len=64", *place]


def launched(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "runs").iterdir()
    return found


def test_checkpoints_is_a_link_to_a_fresh_directory(
    overrides: list[str], tmp_path: Path, elsewhere: Path, fake_slurm: Any
) -> None:
    assert cli.main(["launch", "--no-submit", *overrides]) == 0
    run = launched(tmp_path)
    assert os.readlink(run / "checkpoints") == str(elsewhere / run.name)
    assert list(elsewhere.iterdir()) == [elsewhere / run.name]
    assert list((run / "checkpoints").iterdir()) == []
    (elsewhere / run.name / "some").write_text("x")
    assert " checkpoints/some\n" in listing(RunDir(run), [])


def test_refused_by_slurm_leaves_nothing_there_either(
    overrides: list[str], tmp_path: Path, elsewhere: Path, fake_slurm: Any, capsys: Any
) -> None:
    fake_slurm.program("sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    fake_slurm.program("squeue", "true")
    assert cli.main(["launch", *overrides]) == 1
    assert list(elsewhere.iterdir()) == []
    assert not (tmp_path / "runs").exists()


def test_a_failed_launch_leaves_nothing_there(
    overrides: list[str], tmp_path: Path, elsewhere: Path, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*paths: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(freeze.os, "rename", broken)
    assert cli.main(["launch", "--no-submit", *overrides]) == 1
    assert list(elsewhere.iterdir()) == []
    assert not (tmp_path / "runs").exists()


def test_a_directory_that_is_there_already_is_another_runs(
    overrides: list[str], tmp_path: Path, elsewhere: Path, fake_slurm: Any, capsys: Any
) -> None:
    (elsewhere / "mine").mkdir()
    assert cli.main(["launch", "--no-submit", f"--run-dir={tmp_path}/runs/mine", *overrides]) == 1
    assert f"{elsewhere}/mine exists already; it is another run's" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert (elsewhere / "mine").is_dir()


def test_a_place_that_is_not_there_is_said_with_all_else(
    overrides: list[str], tmp_path: Path, fake_slurm: Any, capsys: Any
) -> None:
    overrides[-1] = f"checkpoint.storage={tmp_path}/nowhere"
    assert cli.main(["launch", "--no-submit", *overrides]) == 2
    assert f"checkpoint.storage={tmp_path}/nowhere: no such directory" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_run_does_not_resume_where_its_checkpoints_are_out_of_sight(
    overrides: list[str], tmp_path: Path, elsewhere: Path, fake_slurm: Any, capsys: Any
) -> None:
    assert cli.main(["launch", "--no-submit", *overrides]) == 0
    run = launched(tmp_path)
    elsewhere.rename(tmp_path / "away")
    assert cli.main(["resume", str(run)]) == 1
    assert f"{run}/checkpoints leads to {elsewhere / run.name}, which is not there" in capsys.readouterr().err
    assert RunDir(run).all_attempts() == []


def test_a_place_that_may_not_be_written(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    errors, _ = storage.problems(str(elsewhere), sys.executable)
    assert errors == [f"checkpoint.storage={elsewhere}: may not be written; choose a directory of your own"]


def test_a_store_that_does_not_answer_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, "", "s3://b/x/: EndpointConnectionError: no route\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)
    errors, warnings = storage.problems("s3://b/x", sys.executable)
    assert errors == []
    assert warnings[0].startswith(
        "checkpoint.storage=s3://b/x: cannot be used from here: s3://b/x/: EndpointConnectionError: no route; "
    )


def test_a_store_without_its_client_is_refused() -> None:
    """The trainer's own answer, with the client hidden."""
    code = (
        "import sys; sys.modules['s3fs'] = None; from stoker.train.storage.probe import main; sys.exit(main('s3://b'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == storage._NO_CLIENT
    assert "needs s3fs in this interpreter" in done.stderr
    assert "pip install 'stoker[s3]'" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "is_allowed"),
    [
        (None, "s3://b/x", True),
        ("s3://b/x", "s3://b/y", True),
        (None, "/other", False),
        ("/one", "/other", False),
        ("/one", "s3://b/x", False),
    ],
)
def test_a_resumed_run_stays_in_its_directory(old: str | None, new: str, is_allowed: bool) -> None:
    plain = to_plain(Config())
    plain["checkpoint"]["storage"] = old
    if is_allowed:
        assert changed_config(plain, [f"checkpoint.storage={new}"])["checkpoint"]["storage"] == new
    else:
        with pytest.raises(UserError, match=r"cannot change on resume from .*; launch a new run"):
            changed_config(plain, [f"checkpoint.storage={new}"])
