"""A checkpoint written by hand with the standard library, for tests of what looks at one."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.manifest import INDEX, OFFSETS, FileEntry, Manifest, block_checksums, describe

SIZE = 5 * 1024 * 1024 + 40  # of the shard: two blocks


def make_checkpoint(run: RunDir, step: int, attempt: int = 1, loss: Any = None, **fields: Any) -> Path:
    """One shard with two tensors: model/early in block 0, optim/exp_avg/late in block 1."""
    directory = run.checkpoint(CheckpointName(step, attempt))
    directory.mkdir(parents=True)
    shard = bytes(step % 251 for _ in range(1000)) + bytes(SIZE - 1000)
    lines: list[dict[str, Any]] = [
        {"name": "model/early", "dtype": "F32", "shape": [10, 3], "slices": piece([10, 3], 1024)},
        {
            "name": "optim/exp_avg/late",
            "dtype": "BF16",
            "shape": [20],
            "slices": piece([20], SIZE - 40),
        },
    ]
    lines[0] |= fields.get("change", {})
    index, offsets = b"", []
    for line in lines:
        offsets.append(len(index))
        index += json.dumps(line, separators=(",", ":")).encode() + b"\n"
    content = {
        "shard-00000.safetensors": shard,
        "shard-00000.crc32": block_checksums(shard),
        INDEX: index,
        OFFSETS: struct.pack("<2Q", *offsets),
    }
    for name, data in content.items():
        (directory / name).write_bytes(data)
    files = [describe(n, d) for n, d in content.items() if not n.endswith(".safetensors")]
    state = {
        "step": step,
        "consumed_samples": 8 * step,
        "validation": None if loss is None else {"step": step, "loss": loss},
        "settings": {"seed": 1, "model.hidden_size": 64},
    }
    Manifest(
        run=fields.get("run", run.path.name),
        step=step,
        attempt=attempt,
        generation=1,
        time=fields.get("time", time.time() - 600),
        layout={"data": 2, "tensor": 1},
        state=state,
        files=(FileEntry("shard-00000.safetensors", SIZE, None, "shard-00000.crc32"), *files),
        location=fields.get("location"),
    ).write(directory)
    return directory


def piece(shape: list[int], at: int) -> dict[str, Any]:
    """One slice in the first shard, as columns of runs."""
    start, sizes = [[[0, 0, 1]] for _ in shape], [[[n, 0, 1]] for n in shape]
    return {"count": 1, "file": [[0, 0, 1]], "at": [[at, 0, 1]], "start": start, "shape": sizes}


def flip(path: Path, at: int) -> None:
    """Change one byte, and nothing that a look would see."""
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
