"""Makes checkpoints as trainers of any layout do, in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import RunDir

sys.path.insert(0, str(Path(__file__).parents[1] / "state"))

from state_ranks import Crew


@pytest.fixture(scope="session")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Processes that save together, as ranks of a trainer do."""
    c = Crew(tmp_path_factory.mktemp("crew"))
    yield c
    c.close()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    r = RunDir(tmp_path / "run")
    r.path.mkdir()
    r.run.write_text('{"id": "run"}')
    claim(r)
    return r
