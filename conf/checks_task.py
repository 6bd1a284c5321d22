"""Rules for a training script of the user's own (`task.cmd`), and which settings it leaves without effect.

Owns: the words of the command and the name of the stop signal. Whether the script's file is there, and frozen with the
run, is the launcher's to see (launcher/task_words.py). Standard library only.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import Any

from .problems import Problem, nearest
from .schema import Config

# Sections that only stoker's own trainer reads, and single fields besides.
TRAINER_SECTIONS = ("train", "model", "data", "parallel", "optim", "precision", "kernels", "checkpoint", "profile")
TRAINER_FIELDS = ("seed", "plugins", "resilience.save_timeout", "resilience.eval_timeout")
# A process cannot catch the first two; the others mean something else to it, or to the shell around it.
_UNFIT = ("SIGKILL", "SIGSTOP", "SIGCONT", "SIGCHLD", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGPIPE", "SIGSEGV")


def task_rules(config: Config) -> Iterator[Problem]:
    """All rules of this file."""
    cmd = config.task.cmd
    if cmd and not cmd[0]:
        yield Problem("task.cmd.0", "''", "expected a program, like python")
    for position, word in enumerate(cmd):
        if position and not word.strip():
            message = "an empty word; leave it out, or check the variable of your shell that it came from"
            yield Problem(f"task.cmd.{position}", f"'{word}'", message)
    name = config.task.stop_signal
    if stop_signal(name) is None:
        near = None if _full(name) in _UNFIT else nearest(_full(name), _fit())
        what = "no script can be asked to stop with it" if _full(name) in _UNFIT else "expected a signal's name"
        yield Problem("task.stop_signal", name, f"{what}; {f'nearest: {near}' if near else _COMMON}")
    if not cmd and name != "SIGTERM":
        yield Problem("task.stop_signal", name, "has no effect without task.cmd", "warning")


_COMMON = "common ones: SIGTERM, SIGUSR1, SIGUSR2, SIGINT"


def _fit() -> list[str]:
    return [s.name for s in signal.Signals if s.name not in _UNFIT]


def stop_signal(name: str) -> signal.Signals | None:
    """The signal of this name, `SIGUSR1` or `USR1`; None if there is none that a script can be asked with to stop."""
    return signal.Signals[_full(name)] if _full(name) in _fit() else None


def _full(name: str) -> str:
    return name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"


def without_effect(chosen: Mapping[str, Any], default: Mapping[str, Any]) -> list[str]:
    """Fields, dotted, that only stoker's trainer reads and that differ from what they are when nobody sets them."""
    found = []
    for section in TRAINER_SECTIONS:
        found += [f"{section}.{key}" for key, value in chosen[section].items() if value != default[section][key]]
    for field in TRAINER_FIELDS:
        section, _, key = field.rpartition(".")
        here, there = (chosen[section], default[section]) if section else (chosen, default)
        found += [field] if here[key] != there[key] else []
    return found
