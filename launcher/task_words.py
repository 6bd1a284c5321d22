"""Reading a user's command (`task.cmd`): which word is the script, and whether what it names will be there in the job.

Owns: that, as values. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
# Options that take the word behind them, and those that leave no script to look for.
_WITH_WORD = {"python": ("-W", "-X", "--check-hash-based-pycs"), "shell": ("-o", "+o", "-O", "+O", "--rcfile")}
_NO_SCRIPT = {"python": re.compile(r"-[A-Za-z]*[cm]|-"), "shell": re.compile(r"-[A-Za-z]*[cs]|-")}


@dataclass(frozen=True)
class Findings:
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def is_python(word: str) -> bool:
    return _PYTHON.fullmatch(os.path.basename(word)) is not None


def script_position(cmd: Sequence[str]) -> int | None:
    """Position of the word that names the script; None if there is none to be seen (`-m module`, a program by name)."""
    kind = "python" if is_python(cmd[0]) else "shell" if os.path.basename(cmd[0]) in _SHELLS else None
    if kind is None:
        return 0 if "/" in cmd[0] else None
    skips = False
    for position, word in enumerate(cmd[1:], start=1):
        if skips:
            skips = False
        elif _NO_SCRIPT[kind].fullmatch(word):
            return None
        elif word in _WITH_WORD[kind]:
            skips = True
        elif not word.startswith(("-", "+")):
            return position
    return None


def look(
    cmd: Sequence[str],
    cwd: Path,
    frozen_cwd: str | None,
    files: Collection[str],
    is_here: bool,
    which: Callable[[str], str | None] | None = None,
) -> Findings:
    """What of the command will not be in the job.

    Args:
        frozen_cwd: the current directory's place in the archive; None if it is in no git project.
        files: names in the archive.
        is_here: programs and absolute paths are those of this machine, not of a container.
        which: finds a program on the PATH that the job will have; None if that is not known here.
    """
    errors, warnings = [], []
    if frozen_cwd is None:
        warnings.append(
            f"task.cmd: {cwd} is in no git project, so nothing of it is frozen: the job runs what is there by then;"
            " `git init` there, and files that git does not ignore are frozen with the run"
        )
    script = script_position(cmd)
    if len(cmd) == 1 and len(cmd[0].split()) > 1 and not (cwd / cmd[0]).exists():
        return Findings((f"task.cmd.0={cmd[0]}: one word with blanks in it; give its words without quotes around all",))
    if which is not None and "/" not in cmd[0] and not is_python(cmd[0]) and which(cmd[0]) is None:
        warnings.append(
            f"task.cmd.0={cmd[0]}: no such program on the PATH here; if it is so on the nodes, nothing starts"
        )
    for position, word in enumerate(cmd):
        field = f"task.cmd.{position}={word}"
        if position == script:
            found = _script_problems(field, word, cwd, frozen_cwd, files, is_here)
            errors += found or ([] if position or not is_here else _program_problems(field, cwd / word))
        elif position and frozen_cwd is not None and _is_left_behind(word, cwd, frozen_cwd, files):
            warnings.append(
                f"{field}: is here, but the job runs in a copy of what git does not ignore; give its absolute path"
            )
    return Findings(tuple(errors), tuple(warnings))


def _script_problems(
    field: str, word: str, cwd: Path, frozen_cwd: str | None, files: Collection[str], is_here: bool
) -> list[str]:
    if os.path.isabs(word):
        return [f"{field}: no such file"] if is_here and not os.path.exists(word) else []
    if not (cwd / word).is_file():
        return [f"{field}: no such file in {cwd}"]
    if frozen_cwd is not None and not _is_frozen(word, frozen_cwd, files):
        return [f"{field}: is not frozen with the run: git ignores it, or it lies outside of the project around {cwd}"]
    return []


def _program_problems(field: str, path: Path) -> list[str]:
    if path.is_dir():
        return [f"{field}: a directory; expected a program"]
    return [] if os.access(path, os.X_OK) else [f"{field}: cannot be executed; `chmod +x` it, or name its interpreter"]


def _is_left_behind(word: str, cwd: Path, frozen_cwd: str, files: Collection[str]) -> bool:
    if not word.strip() or word.startswith("-") or os.path.isabs(word):
        return False
    return (cwd / word).exists() and not _is_frozen(word, frozen_cwd, files)


def _is_frozen(word: str, frozen_cwd: str, files: Collection[str]) -> bool:
    name = os.path.normpath(f"{frozen_cwd}/{word}")
    return name in files or any(file.startswith(f"{name}/") for file in files)
