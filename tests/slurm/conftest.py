"""Clusters for the tests that need a real Slurm. Started when first asked for, taken down at the end of the session
even if pytest is killed. With pytest-xdist each worker has its own.

A module that needs another size or policy overrides `plain_spec` or `isolated_spec` (session scope), or starts a
cluster of its own in `short_directory`.
"""

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
def slurm_available() -> None:
    """Skips, with the command that would help, when Slurm is not installed. All else is a failure, in CI that too."""
    spec = ClusterSpec(isolate=True)
    lacking = programs.missing(spec)
    if lacking and os.environ.get("CI") != "true":
        pytest.skip(programs.how_to_install(spec, lacking))


@pytest.fixture(scope="session")
def plain_spec() -> ClusterSpec:
    return ClusterSpec(nodes=4)


@pytest.fixture(scope="session")
def isolated_spec(tmp_path_factory: pytest.TempPathFactory) -> ClusterSpec:
    """Nodes claim more CPUs than the machine has, so that many tests fit side by side. They share pytest's tmp_path."""
    nodes = int(os.environ.get("STOKER_TEST_NODES", "12"))
    return ClusterSpec(nodes=nodes, isolate=True, share=(str(tmp_path_factory.getbasetemp()),))


@pytest.fixture(scope="session")
def plain_cluster(slurm_available: None, plain_spec: ClusterSpec) -> Iterator[Cluster]:
    """Four nodes on this machine's address; for jobs, requeue, preemption, crashes."""
    yield from _cluster(plain_spec)


@pytest.fixture(scope="session")
def isolated_cluster(slurm_available: None, isolated_spec: ClusterSpec) -> Iterator[Cluster]:
    """Nodes with their own network, for faults. Who breaks a node mends it, or tells nobody else to use it."""
    yield from _cluster(isolated_spec)


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory for a test's own cluster: tmp_path is too long for the sockets of one."""
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
