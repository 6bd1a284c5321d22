"""A checkpoint of a few bytes, written by hand through a target."""

from __future__ import annotations

import json
import struct
from typing import Any

from stoker.launcher.run.layout import CheckpointName
from stoker.launcher.run.manifest import INDEX, OFFSETS, FileEntry, Manifest, block_checksums, describe
from stoker.train.storage.base import LastCheck, Shelf, Target, nothing
from stoker.train.storage.choice import target_of

SHARD, SIDECAR = "shard-00000.safetensors", "shard-00000.crc32"


def put(target: Target, file: str, data: bytes) -> None:
    sink = target.create(file, len(data))
    sink.write(memoryview(data))
    sink.finish()


def begin(shelf: Shelf, step: int, attempt: int = 1, save: int = 1, size: int = 1000) -> Target:
    target = target_of(shelf.spec(CheckpointName(step, attempt), f"g0001-{save:08x}", size, 1))
    target.prepare()
    return target


def index_of(size: int) -> bytes:
    """One tensor of bytes, which fills the only shard."""
    run = [[0, 0, 1]]  # one slice, in shard 0, from byte 0 on
    slices = {"count": 1, "file": run, "at": run, "start": [run], "shape": [[[size, 0, 1]]]}
    return json.dumps({"name": "model/w", "dtype": "U8", "shape": [size], "slices": slices}).encode() + b"\n"


def fill(target: Target, step: int, shard: bytes, attempt: int = 1) -> Manifest:
    """All files but the manifest, which is returned."""
    sidecar = block_checksums(shard)
    small = {SIDECAR: sidecar, INDEX: index_of(len(shard)), OFFSETS: struct.pack("<Q", 0)}
    put(target, SHARD, shard)
    for file, data in small.items():
        put(target, file, data)
    files = (FileEntry(SHARD, len(shard), None, SIDECAR), *(describe(n, d) for n, d in small.items()))
    return Manifest("run-1", step, attempt, 1, 1700000000.0, {"data": 1}, {"step": step}, files)


def save(shelf: Shelf, step: int, shard: bytes = b"x" * 1000, last: LastCheck = nothing, **more: Any) -> CheckpointName:
    target = begin(shelf, step, size=len(shard), **more)
    manifest = fill(target, step, shard, more.get("attempt", 1))
    target.publish(manifest, last)
    return manifest.name
