"""Tools on checkpoints whose bytes lie in a bucket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checkpoint_bytes import SHARD, SIDECAR, begin, put
from stoker.conf.schema import CheckpointConfig
from stoker.launcher.checkpoint_look import Health, look_around
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.manifest import INDEX, OFFSETS, FileEntry, Manifest, block_checksums, describe
from stoker.train.checkpoint import __main__ as tools
from stoker.train.storage.base import Shelf
from stoker.train.storage.bucket import Bucket
from stoker.train.storage.choice import shelf_of

SIZE = 5_000_000
RUN = [[0, 0, 1]]  # one slice, in shard 0, from byte 0 on
SLICES = {"count": 1, "file": RUN, "at": RUN, "start": [RUN], "shape": [[[SIZE, 0, 1]]]}
LINE = {"name": "model/w", "dtype": "U8", "shape": [SIZE], "slices": SLICES}


def save(shelf: Shelf, step: int) -> None:
    """One tensor of bytes, that fills its shard."""
    target, shard = begin(shelf, step, size=SIZE), b"z" * SIZE
    index = json.dumps(LINE).encode() + b"\n"
    small = {SIDECAR: block_checksums(shard), INDEX: index, OFFSETS: bytes(8)}
    for file, data in {SHARD: shard, **small}.items():
        put(target, file, data)
    files = (FileEntry(SHARD, SIZE, None, SIDECAR), *(describe(n, d) for n, d in small.items()))
    target.publish(Manifest("run-1", step, 1, 1, 1700000000.0, {"data": 1}, {"step": step}, files))


@pytest.fixture
def bucket(run: RunDir, store: str) -> Bucket:
    """Of a run with two checkpoints."""
    shelf = shelf_of(run, CheckpointConfig(storage=f"{store}/runs"))
    for step in (10, 20):
        save(shelf, step)
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
