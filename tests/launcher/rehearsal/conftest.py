"""Directories and clusters for the tests of the rehearsal cluster. Every cluster is taken down, whatever happens."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from stoker.launcher.rehearsal import programs
from stoker.launcher.rehearsal.cluster import Cluster, clear
from stoker.launcher.rehearsal.spec import ClusterSpec


@pytest.fixture(scope="session")
def need_slurm() -> None:
    if lacking := programs.missing(ClusterSpec(isolate=True)):
        # In CI a skipped Slurm test would be a hole that nobody sees: there it fails.
        end = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        end(programs.how_to_install(ClusterSpec(isolate=True), lacking))


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory for a cluster, not made yet, with a name short enough for sockets (tmp_path's is not)."""
    base = Path(tempfile.mkdtemp(prefix="stk-"))
    yield base / "c"
    clear(base / "c")
    shutil.rmtree(base)


def _cluster(spec: ClusterSpec) -> Iterator[Cluster]:
    base = Path(tempfile.mkdtemp(prefix="stk-"))
    base.chmod(0o755)
    try:
        with Cluster.start(spec, base / "c") as cluster:
            yield cluster
    finally:
        shutil.rmtree(base)


@pytest.fixture(scope="module")
def plain(need_slurm: None) -> Iterator[Cluster]:
    yield from _cluster(ClusterSpec(nodes=4))


@pytest.fixture(scope="module")
def isolated(need_slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from _cluster(ClusterSpec(nodes=8, isolate=True, share=(str(tmp_path_factory.getbasetemp()),)))
