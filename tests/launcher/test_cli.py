"""The command itself: help, unknown verbs, how errors look, what is imported."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
from stoker.launcher import cli
from stoker.launcher.errors import UserError, environment_error


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stoker.launcher.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {verb} " in out for verb in cli.VERBS)


def test_no_verb_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: stoker VERB" in capsys.readouterr().out


def test_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lunch"]) == 2
    assert capsys.readouterr().err == "stoker: error: unknown verb 'lunch'; did you mean `launch`?\n"


@pytest.mark.parametrize("verb", ["launch", "run", "status", "logs", "cancel", "resume"])
def test_each_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--help"])
    assert end.value.code == 0
    assert f"usage: stoker {verb}" in capsys.readouterr().out


def fake_verb(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def main(argv: list[str]) -> int:
        raise error

    module = types.ModuleType("stoker.launcher.fake_verb")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stoker.launcher.fake_verb", module)
    monkeypatch.setitem(cli.VERBS, "fake", ("fake_verb", "raises"))


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("a: first\nb: second"), 2, "stoker fake: error: a: first\nstoker fake: error: b: second\n"),
        (environment_error("no Slurm"), 1, "stoker fake: error: no Slurm\n"),
        (ValueError("x=3: expected 4"), 2, "stoker fake: error: x=3: expected 4\n"),
        (OSError(28, "No space left on device", "/full"), 1, "[Errno 28] No space left on device: '/full'\n"),
        (ZeroDivisionError("oops"), 1, "internal error: ZeroDivisionError: oops\n"),
    ],
)
def test_errors_are_lines_with_the_command_in_front(
    error: Exception, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_verb(monkeypatch, error)
    assert cli.main(["fake"]) == code
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err


def test_debug_lets_the_traceback_through(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_verb(monkeypatch, UserError("x"))
    with pytest.raises(UserError):
        cli.main(["fake", "--debug"])


def test_interrupt_is_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_verb(monkeypatch, KeyboardInterrupt())
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == ""


def test_closed_pipe_is_silent(tmp_path: Path) -> None:
    command = f"{sys.executable} -m stoker.launcher.cli status --json {tmp_path} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("--help >&-", 0, ""),
        ("watch --once . >&-", 0, ""),
        ("status . >&-", 0, ""),
        ("status . >&- 2>&-", 0, ""),
        ("--help >/dev/full", 1, "stoker: error: [Errno 28] No space left on device\n"),
        ("watch --help >/dev/full", 1, "stoker watch: error: [Errno 28] No space left on device\n"),
        ("status . >/dev/full", 1, "stoker status: error: [Errno 28] No space left on device\n"),
    ],
)
def test_output_that_is_closed_or_full_is_no_defect(line: str, code: int, said: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m stoker.launcher.cli {line}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr.replace("standard output: ", "")) == (code, said)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["status", "."]])
def test_quick_verbs_import_the_standard_library_only(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "from stoker.launcher import cli\n"
        f"cli.main({arguments!r})\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stderr.strip() == "['stoker']"


def test_logs_and_cancel_import_neither_hydra_nor_submitit(tmp_path: Path) -> None:
    code = (
        "import sys\nimport stoker.launcher.logs, stoker.launcher.cancel\n"
        "print(sorted({'hydra', 'omegaconf', 'submitit', 'torch', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.strip() == "[]"


def test_version_is_the_package_s() -> None:
    import stoker

    assert run("--version").stdout == f"stoker {stoker.__version__}\n"
