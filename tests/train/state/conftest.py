"""A run directory with one attempt, and a crew of processes to work on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import RunDir

sys.path.insert(0, str(Path(__file__).parent))

from state_ranks import Crew, close_jobs
from striking import make_older


@pytest.fixture(scope="session")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    c = Crew(tmp_path_factory.mktemp("crew"))
    yield c
    c.close()


@pytest.fixture(autouse=True)
def _closed_jobs() -> Iterator[None]:
    yield
    close_jobs()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    r = RunDir(tmp_path / "run")
    r.path.mkdir()
    claim(r)
    return r


@pytest.fixture(scope="session")
def older(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 10 and 15 (striking.py)."""
    r = RunDir(tmp_path_factory.mktemp("older") / "run")
    r.path.mkdir()
    claim(r)
    for result in crew.run(make_older, r, 2):
        assert result.raised is None, result.text
    return r.path
