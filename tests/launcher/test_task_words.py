"""A user's command on its way: from the shell into the configuration unchanged, and what of it the job will lack."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from stoker.conf.overrides import prepare
from stoker.launcher import cli
from stoker.launcher.options import parse, parser
from stoker.launcher.task_words import look, script_position


def composed(override: str) -> list[str]:
    """What becomes of `task.cmd=...` in the configuration."""
    (ready,), problems = prepare([override], {}, ())
    assert problems == []
    value = OverridesParser.create().parse_override(ready).value()
    resolved: Any = OmegaConf.to_container(OmegaConf.create({"name": "run", "cmd": value}), resolve=True)
    return list(resolved["cmd"])


WORD = st.text(st.sampled_from("ab1-.,:=[]{}()'\"\\ ${}~+@/#%&*!e\u00fc"), max_size=8)


@given(st.lists(WORD, min_size=1, max_size=4))
@example(["python", "train.py", "--lr", "1e-3", "--flag", "true", "null", "007", "0x1F"])
@example(["${name}", "\\${name}", "\\", "it's", "a\\'", "", " ", "$HOME", "[1,2]", "--", "k=v"])
def test_words_behind_two_dashes_arrive_as_they_are(words: list[str]) -> None:
    arguments = parse(parser("launch", ""), ["name=x", "--", *words])
    assert arguments.overrides[0] == "name=x"
    assert composed(arguments.overrides[1]) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[python,train.py,--lr,1e-3]", ["python", "train.py", "--lr", "1e-3"]),
        (
            "[python, -m, mine, 'a, b', \"c'd\", 007, true, null]",
            ["python", "-m", "mine", "a, b", "c'd", "007", "true", "null"],
        ),
        ("[./run.sh,--x=[1,2],a\\,b]", ["./run.sh", "--x=[1,2]", "a,b"]),
        ("[]", []),
    ],
)
def test_a_list_of_words_keeps_them_as_they_are(text: str, words: list[str]) -> None:
    assert composed(f"task.cmd={text}") == words


@pytest.mark.parametrize(
    ("line", "position"),
    [
        ("python train.py --lr 1", 1),
        ("python3.11 -u -W ignore train.py", 4),
        ("/opt/py/bin/python -s train.py", 2),
        ("python -m mine train.py", None),
        ("python -Im mine", None),
        ("python -c print(1)", None),
        ("python", None),
        ("bash -e -o pipefail run.sh x", 4),
        ("bash -ec true", None),
        ("./run.sh train.py", 0),
        ("torchrun train.py", None),
    ],
)
def test_which_word_is_the_script(line: str, position: int | None) -> None:
    assert script_position(line.split()) == position


def test_what_the_job_will_not_have(tmp_path: Path) -> None:
    for name in ("train.py", "kept.yaml", "data/x", "ignored.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    files = {"code/user/exp/train.py", "code/user/exp/kept.yaml", "code/user/lib/a.py"}

    def found(*cmd: str, frozen: str | None = "code/user/exp") -> tuple[Any, Any]:
        said = look(cmd, tmp_path, frozen, files, True)
        return said.errors, said.warnings

    assert found("python", "train.py", "kept.yaml", "--data", "absent") == ((), ())
    assert found("python", "trian.py") == ((f"task.cmd.1=trian.py: no such file in {tmp_path}",), ())
    assert found("python", "/no/such.py") == (("task.cmd.1=/no/such.py: no such file",), ())
    (error,), _ = found("python", "ignored.py")
    assert error.startswith("task.cmd.1=ignored.py: is not frozen with the run: git ignores it")
    _, (warning,) = found("python", "train.py", "data")
    assert warning.startswith("task.cmd.2=data: is here, but the job runs in a copy of what git does not ignore")
    errors, (warning,) = found("python", "ignored.py", frozen=None)
    assert errors == ()
    assert "is in no git project, so nothing of it is frozen" in warning


def test_a_command_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "my tool").touch(0o755)

    def found(*cmd: str, is_here: bool = True) -> tuple[Any, Any]:
        said = look(cmd, tmp_path, "code/user", {"code/user/run.sh"}, is_here, {"sh": "/bin/sh"}.get)
        return said.errors, said.warnings

    (error,) = found("./run.sh")[0]
    assert error == "task.cmd.0=./run.sh: cannot be executed; `chmod +x` it, or name its interpreter"
    assert found("sh", "./run.sh") == found("python", "run.sh") == ((), ())
    (tmp_path / "run.sh").chmod(0o755)
    assert found("./run.sh") == ((), ())
    assert found(str(tmp_path / "data"))[0] == (f"task.cmd.0={tmp_path}/data: a directory; expected a program",)
    assert found(str(tmp_path / "data"), is_here=False)[0] == ()
    (error,) = found("python train.py --lr 1")[0]
    assert error.startswith("task.cmd.0=python train.py --lr 1: one word with blanks in it")
    assert found("torchrunn", "x")[1] == (
        "task.cmd.0=torchrunn: no such program on the PATH here; if it is so on the nodes, nothing starts",
    )
    assert look(["torchrunn"], tmp_path, "code/user", (), True).warnings == ()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "project" / "exp"
    directory.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(directory.parent)], check=True)
    (directory / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(directory)
    return directory


def test_a_launch_needs_no_data_and_freezes_where_it_was_made(project: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = [
        f"run_root={tmp_path}/runs",
        "cluster=local",
        "--no-submit",
        "--",
        "python",
        "train.py",
        "--lr",
        "1e-3",
    ]
    assert cli.main(["launch", *arguments]) == 0
    assert capsys.readouterr().err == ""
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "config.json").read_text())["task"]["cmd"] == ["python", "train.py", "--lr", "1e-3"]
    assert json.loads((run / "run.json").read_text())["code"]["cwd"] == "code/user/exp"


def test_all_that_is_wrong_is_told_at_once(project: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = [f"run_root={tmp_path}/runs", "cluster=local", "task.stop_signal=USR3", "cluster.nodes=0"]
    assert cli.main(["launch", *arguments, "--", "python", "trian.py", ""]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in lines] == [
        "cluster.nodes=0",
        "task.cmd.2=''",
        "task.stop_signal=USR3",
        "task.cmd.1=trian.py",
    ]
    assert "nearest: SIGUSR1" in lines[2] or "nearest: SIGUSR2" in lines[2]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("cmd", [["--", "python", "a\nb"], ['task.cmd=[python,"a']])
def test_a_word_that_is_refused_is_one_error(cmd: list[str], project: Path, tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["launch", f"run_root={tmp_path}/runs", "cluster=local", *cmd]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stoker launch: error: task.cmd")


def test_settings_of_the_trainer_are_said_to_have_no_effect(project: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = [f"run_root={tmp_path}/runs", "cluster=local", "model=small", "train.global_batch=7", "--dry-run"]
    assert cli.main(["launch", *arguments, "--", "python", "train.py"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "train.global_batch, model.vocab_size" in line
    assert line.endswith("without effect: task.cmd runs a script of your own, not stoker's trainer")
