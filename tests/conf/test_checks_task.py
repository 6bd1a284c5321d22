"""Rules for a script of the user's own, and the rules of the trainer that it is spared."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from stoker.conf.checks import check
from stoker.conf.checks_task import stop_signal, without_effect
from stoker.conf.load import to_plain
from stoker.conf.schema import Config


def told(cmd: list[str], stop: str = "SIGTERM", **fields: Any) -> list[str]:
    config = Config()
    config.task.cmd, config.task.stop_signal = cmd, stop
    config.cluster.nodes = fields.get("nodes", 1)
    return [f"{p.severity[0]} {p}" for p in check(config)]


CASES: list[tuple[list[str], str, list[str]]] = [
    # No data, and a batch that three ranks do not divide: none of it is the script's affair.
    (["python", "train.py"], "SIGTERM", []),
    (["python", "train.py"], "usr1", []),
    ([""], "SIGTERM", ["e task.cmd.0='': expected a program, like python"]),
    (["a", " "], "SIGTERM", [
        "e task.cmd.1=' ': an empty word; leave it out, or check the variable of your shell that it came from",
    ]),
    (["a"], "SIGTRM", ["e task.stop_signal=SIGTRM: expected a signal's name; nearest: SIGTERM"]),
    (["a"], "SIGKILL", [
        "e task.stop_signal=SIGKILL: no script can be asked to stop with it; "
        "common ones: SIGTERM, SIGUSR1, SIGUSR2, SIGINT",
    ]),
    (["a"], "15", [
        "e task.stop_signal=15: expected a signal's name; common ones: SIGTERM, SIGUSR1, SIGUSR2, SIGINT",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("cmd", "stop", "lines"), CASES)
def test_rules_for_the_command(cmd: list[str], stop: str, lines: list[str]) -> None:
    assert told(cmd, stop, nodes=3) == lines


def test_a_stop_signal_without_a_command_has_no_effect() -> None:
    assert "w task.stop_signal=SIGUSR1: has no effect without task.cmd" in told([], "SIGUSR1")


def test_names_of_signals() -> None:
    assert stop_signal("SIGUSR1") is stop_signal("usr1") is signal.SIGUSR1
    assert stop_signal("SIGTERM") is signal.SIGTERM
    assert [stop_signal(name) for name in ("SIGKILL", "STOP", "", "9", "SIG")] == [None] * 5


def test_settings_that_only_the_trainer_reads() -> None:
    config = Config()
    config.model.num_layers, config.seed, config.resilience.save_timeout, config.cluster.nodes = 9, 1, 5.0, 4
    found = without_effect(to_plain(config), to_plain(Config()))
    assert found == ["model.num_layers", "seed", "resilience.save_timeout"]
