"""What is installed is read from the names of the records alone."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from stoker.launcher.run.packages import installed


def test_names_and_versions_are_those_that_their_metadata_tell() -> None:
    told = {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version for d in metadata.distributions()}
    told.pop("stoker", None)
    assert installed() == dict(sorted(told.items()))


def test_the_first_on_the_path_counts_and_odd_names_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "a": ["torch-2.11.0+cu130.dist-info", "ruamel.yaml-0.18.dist-info", "old_one-1.0-py3.11.egg-info"],
        "b": ["torch-2.13.0.dist-info", "stoker-0.1.0.dist-info", "stoker.egg-info", "torch", "x.pth"],
    }
    for folder, entries in names.items():
        for entry in entries:
            (tmp_path / folder / entry).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "gone"), str(tmp_path / "a"), str(tmp_path / "b")])
    assert installed() == {"old-one": "1.0", "ruamel-yaml": "0.18", "torch": "2.11.0+cu130"}
