"""Findings about nodes: files that several runs share."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.launcher.run.badnodes import Finding, known, note, to_avoid


def finding(node: str, time: float = 1000.0, until: float = 2000.0, run: str = "r1", own: bool = False) -> Finding:
    return Finding(node, "its agent failed at start", "launch_failed", run, 3, time, until, own)


def test_findings_hold_until_they_expire_and_the_newest_counts(tmp_path: Path) -> None:
    note(tmp_path / "b", finding("n1"))
    note(tmp_path / "b", finding("n1", time=1100.0, until=3000.0))
    note(tmp_path / "b", finding("n2"))
    assert sorted(known(tmp_path / "b", now=1500.0)) == ["n1", "n2"]
    assert known(tmp_path / "b", now=2500.0) == {"n1": finding("n1", time=1100.0, until=3000.0)}


def test_expired_ones_are_swept_a_day_later(tmp_path: Path) -> None:
    note(tmp_path, finding("n1"))
    assert known(tmp_path, now=2000.0 + 23 * 3600) == {}
    assert len(list(tmp_path.iterdir())) == 1
    known(tmp_path, now=2000.0 + 25 * 3600)
    assert list(tmp_path.iterdir()) == []


def test_a_suspicion_of_one_run_is_none_of_the_others_business(tmp_path: Path) -> None:
    note(tmp_path, finding("n1", own=True))
    assert list(known(tmp_path, "r1", now=1500.0)) == ["n1"]
    assert known(tmp_path, "r2", now=1500.0) == {}


def test_damaged_and_foreign_files_and_a_missing_directory_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "n1-x.json").write_text("{")
    (tmp_path / "n2-x.json").write_text('{"node": "n2"}')
    (tmp_path / ".tmp-n3.json").write_text('{"node": "n3"}')
    assert known(tmp_path) == {}
    assert known(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("nodes", "asked_for", "needed", "usable", "avoided"),
    [
        ("n1 n2", [], 2, 8, ["n1", "n2"]),
        ("n1 n2", ["n1"], 2, 8, ["n2"]),
        ("n1 n2 n3", [], 2, 4, ["n2", "n3"]),  # the newest first, half of the nodes at most
        ("n1 n2 n3", [], 3, 4, ["n3"]),  # and never what the job needs
        ("n1 n2 n3", [], 4, 4, []),
        ("n1 n2 n3", [], 8, 4, []),
        ("n1 n2 n3", [], 1, None, ["n3"]),  # their number is not known
        ("", [], 1, 8, []),
    ],
)
def test_never_so_many_are_avoided_that_the_job_could_not_run(
    nodes: str, asked_for: list[str], needed: int, usable: int | None, avoided: list[str]
) -> None:
    found = {node: finding(node, time=float(i)) for i, node in enumerate(nodes.split())}
    assert to_avoid(found, asked_for, needed, usable) == avoided
