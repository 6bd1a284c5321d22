"""Places for checkpoints: directories, and a bucket of a real server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import stoker.train.storage.bucket as bucket_module
from stoker.launcher.run.layout import RunDir

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "state"))

from store_server import CREDENTIALS, serving


@pytest.fixture(scope="session")
def store_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("store")) as address:
        yield address


@pytest.fixture
def store(store_address: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """s3://BUCKET of a fresh bucket."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store_address)
    name = f"bucket-{abs(hash(request.node.nodeid))}"
    bucket_module._connection(os.getpid()).mkdir(name)
    return f"s3://{name}"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    r = RunDir(tmp_path / "some-run")
    r.path.mkdir()
    return r
