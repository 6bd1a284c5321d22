"""Makes checkpoints as trainers of any layout do, in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import RunDir

sys.path.insert(0, str(Path(__file__).parents[1] / "state"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    r = RunDir(tmp_path / "run")
    r.path.mkdir()
    r.run.write_text('{"id": "run"}')
    claim(r)
    return r
