"""The lines of cluster.setup are read by bash before a job is made of them."""

from __future__ import annotations

from typing import Any

import pytest
from stoker.launcher import cli
from stoker.launcher.setup_lines import problem_with


@pytest.mark.parametrize(
    "lines", [[], ["if true", "then echo 1", "fi"], ["x=$(cat <<E", "it's", "E", ")"], ["no-such-command --x"], [""]]
)
def test_lines_that_can_be_read_together(lines: list[str]) -> None:
    assert problem_with(lines) is None


@pytest.mark.parametrize(
    ("lines", "start"),
    [
        (["if true"], "cluster.setup.0: the lines are no shell text: syntax error: unexpected end of file"),
        (["true", "fi"], "cluster.setup.1: the lines are no shell text: syntax error near unexpected token `fi'"),
        (["x='1"], "cluster.setup.0: the lines are no shell text: unexpected EOF while looking for matching"),
    ],
)
def test_lines_that_cannot(lines: list[str], start: str) -> None:
    assert str(problem_with(lines)).startswith(start)


def test_a_launch_with_such_lines_is_refused(tokens: str, fake_slurm: Any, capsys: Any) -> None:
    overrides = ["data=custom", f"data.sources.0.prefix={tokens}", "data.seq_len=64", "name=t"]
    assert cli.main(["launch", *overrides, "cluster.setup=[if true]", "--dry-run"]) == 2
    assert "cluster.setup.0: the lines are no shell text" in capsys.readouterr().err
