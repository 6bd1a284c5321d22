"""Writes the safetensors files of a model: streaming, a few rows at a time, never a whole model in memory.

Owns: how tensors are divided among files, their headers, the index, and that a directory appears whole or not at all.
Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from secrets import token_hex

import torch
from torch import Tensor

from ...launcher.run.files import fsync_dir, write_json
from ..state.entry import DTYPES
from ..storage.posix import PosixSink
from .files import INDEX, SINGLE


@dataclass(frozen=True)
class Planned:
    """A tensor to write; `rows()` gives it in order, in pieces that are cut along dim 0."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A name beside `path` for a directory that the caller makes and fills; it becomes `path` at the end.

    Raises:
        ValueError: there is something at `path`.
    """
    if os.path.lexists(path):
        raise ValueError(f"{path}: exists already; name a new directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".tmp-{path.name}-{token_hex(4)}")
    try:
        yield unfinished
        for file in unfinished.rglob("*"):
            if file.is_file():
                _sync(file)
        os.rename(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    fsync_dir(path.parent)


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_tensors(
    directory: Path, tensors: Sequence[Planned], limit: int, progress: Callable[[int], object]
) -> list[str]:
    """Write all tensors into files of at most `limit` bytes each (a tensor is never divided); the files' names.

    Raises:
        OSError: storage refused; names the file.
    """
    shards = _divide(tensors, limit)
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


def _divide(tensors: Sequence[Planned], limit: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_file(path: Path, tensors: Sequence[Planned], progress: Callable[[int], object]) -> None:
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
