"""Tools on checkpoints whose bytes lie in a bucket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checkpoint_bytes import SHARD, save
from stoker.conf.schema import CheckpointConfig
from stoker.launcher.checkpoint_look import Health, look_around
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.train.checkpoint import __main__ as tools
from stoker.train.storage.bucket import Bucket
from stoker.train.storage.choice import shelf_of

SIZE = 5_000_000


@pytest.fixture
def bucket(run: RunDir, store: str) -> Bucket:
    """Of a run with two checkpoints."""
    shelf = shelf_of(run, CheckpointConfig(storage=f"{store}/runs"))
    for step in (10, 20):
        save(shelf, step, b"z" * SIZE)
    return Bucket(f"{store}/runs/some-run/")


def test_verify_reads_the_store_and_notes_beside_the_manifest_what_is_good(
    run: RunDir, bucket: Bucket, capsys: Any
) -> None:
    first, second = (str(run.checkpoint(CheckpointName(step, 1))) for step in (10, 20))
    assert tools.main(["verify", first, second]) == 0
    assert [line.split(":")[1] for line in capsys.readouterr().out.splitlines()] == [" good", " good"]
    assert [f.health for f in look_around(run)] == [Health.VERIFIED, Health.VERIFIED]
    bucket.put(f"step-00000010-a0001/g0001-00000001.{SHARD}", b"z" * (SIZE - 1) + b"y")
    assert tools.main(["verify", "--json", first, second]) == 1
    verdicts = json.loads(capsys.readouterr().out)
    assert [v["good"] for v in verdicts] == [False, True]
    assert [(d["block"], d["tensors"]) for d in verdicts[0]["damage"]] == [(1, ["model/w"])]


def test_remove_takes_the_objects_too(run: RunDir, bucket: Bucket) -> None:
    assert tools.main(["remove", str(run.checkpoint(CheckpointName(10, 1)))]) == 0
    assert [f.name.step for f in look_around(run)] == [20]
    assert {key.split("/")[0] for key in bucket.sizes()} == {"step-00000020-a0001"}
