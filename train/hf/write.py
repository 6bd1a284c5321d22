"""Writes the safetensors files of a model: streaming, a few rows at a time, never a whole model in memory.

Owns: the files' names and headers, and the index.
Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ...launcher.run.files import write_json
from ..checkpoint.weights import Weight, divide
from ..state.entry import DTYPES
from ..storage.posix import PosixSink
from .files import INDEX, SINGLE


def write_tensors(
    directory: Path, tensors: Sequence[Weight], limit: int, progress: Callable[[int], object]
) -> list[str]:
    """Write all tensors into files of at most `limit` bytes each (a tensor is never divided); the files' names.

    Raises:
        OSError: storage refused; names the file.
    """
    shards = divide(tensors, limit)
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]  # fmt: skip
    for name, shard in zip(names, shards, strict=True):
        _write_file(directory / name, shard, progress)
    if len(shards) > 1:
        where = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        total = sum(t.nbytes for t in tensors)
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
        names.append(INDEX)
    return names


def _write_file(path: Path, tensors: Sequence[Weight], progress: Callable[[int], object]) -> None:
    # Wide types first: the format allows no gaps, and so each tensor is aligned to its own element size.
    ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for t in ordered:
        header[t.name] = {
            "dtype": DTYPES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [at, at + t.nbytes],
        }
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sink = PosixSink(path)
    try:
        sink.write(memoryview(len(text).to_bytes(8, "little") + text))
        for t in ordered:
            written = 0
            for rows in t.rows():
                data = rows.contiguous().flatten().view(torch.uint8).numpy().data
                sink.write(data)
                written += len(data)
                progress(len(data))
            assert written == t.nbytes, f"{t.name}: {written} bytes, {t.nbytes} expected"
        sink.finish()
    finally:
        sink.abort()
