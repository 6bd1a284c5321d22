"""Writes a checkpoint that no trainer saved: weights from elsewhere, or an average. Streams; memory is bounded.

Owns: such a checkpoint's files, the same that a trainer's have: shards, block checksums, index, manifest last, one
rename. Does not own: where the tensors come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import time
from typing import Any

import torch

from ...launcher.run.manifest import (
    BLOCK,
    INDEX,
    OFFSETS,
    FileEntry,
    Manifest,
    block_checksums,
    check_sizes,
    describe,
    shard_name,
    sidecar_name,
)
from ..box import Box
from ..state.checksum import crc32
from ..state.entry import Slice
from ..state.index import merged, part
from ..state.segment import layout
from ..storage.new_directory import new_directory
from ..storage.posix import PosixSink

MODEL = "model/"  # names of weights in a checkpoint begin with it
_SHARD = 4 * 1024**3  # bytes after which a new shard begins
_AT_ONCE = 8 * BLOCK  # bytes checked and written at a time

Progress = Callable[[int], object]  # called with the number of bytes that have been written since


@dataclass(frozen=True)
class Weight:
    """A tensor to write. `rows()` gives it in pieces, in order: tensors [n, *shape[1:]] of any device and stride that
    make up `shape` along dim 0 (a scalar: one tensor of shape []). Called once, when its turn has come."""

    name: str  # in a checkpoint of ours: model/<name in the parameter table>
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Origin:
    """What the manifest says of where it comes from."""

    run: str = ""
    step: int = 0
    state: Mapping[str, Any] | None = None  # added to the manifest's state; JSON


def write_weights(
    directory: Path,
    weights: Sequence[Weight],
    model: Mapping[str, Any],
    origin: Origin | None = None,
    progress: Progress = lambda count: None,
) -> Manifest:
    """Write a weights-only checkpoint: what `model.init_from` reads. Names begin with `model/`.

    `model`: the plain settings of the model (config section `model`). Raises as `write_checkpoint`.
    """
    foreign = [w.name for w in weights if not w.name.startswith(MODEL)]
    assert not foreign, foreign
    origin = origin or Origin()
    state = {**(origin.state or {}), "weights_only": True, "model": dict(model)}
    return write_checkpoint(directory, weights, Origin(origin.run, origin.step, state), progress)


def write_checkpoint(
    directory: Path, weights: Sequence[Weight], origin: Origin, progress: Progress = lambda count: None
) -> Manifest:
    """Write a checkpoint into the new directory `directory`; it is there as a whole or not at all.

    Raises:
        ValueError: there is something at `directory`; or a `Weight` does not give what it says (names it).
        OSError: storage refused.
    """
    with new_directory(directory) as unfinished:
        unfinished.mkdir()
        files, lines = [], []
        for number, shard in enumerate(divide(sorted(weights, key=lambda w: w.name), _SHARD)):
            written, index = _write_shard(unfinished, number, shard, progress)
            files += written
            lines.append(index)
        files += _write_index(unfinished, lines)
        manifest = Manifest(
            run=origin.run,
            step=origin.step,
            attempt=0,
            generation=0,
            time=time(),
            layout={},
            state=dict(origin.state or {}),
            files=tuple(files),
        )
        manifest.write(unfinished)
        check_sizes(unfinished, manifest)
    return manifest


def divide(weights: Iterable[Weight], limit: int) -> list[list[Weight]]:
    """Groups of at most `limit` bytes, in the given order; a tensor is never divided."""
    shards: list[list[Weight]] = [[]]
    size = 0
    for weight in weights:
        if shards[-1] and size + weight.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += weight.nbytes
    return shards


def _write_shard(
    directory: Path, number: int, weights: Sequence[Weight], progress: Progress
) -> tuple[list[FileEntry], bytes]:
    """The manifest's entries for shard and sidecar, and the shard's lines of the index."""
    by_name = {w.name: w for w in weights}
    # Tensors without memory: only their types and shapes count for the header.
    slices = [
        Slice(w.name, torch.empty(w.shape, dtype=w.dtype, device="meta"), w.shape, Box.whole(w.shape)) for w in weights
    ]
    head, placed = layout(slices)
    shard, sidecar = shard_name(number), sidecar_name(number)
    file = _CheckedFile(directory / shard, len(head) + sum(p.size for p in placed), progress)
    try:
        file.write(memoryview(head))
        for p in placed:
            for piece in _pieces(by_name[p.slice.name]):
                file.write(_bytes_of(piece))
        checksums = file.finish()
    finally:
        file.abort()
    _write_small(directory / sidecar, checksums)
    entry = FileEntry(shard, file.size, None, sidecar)
    return [entry, describe(sidecar, checksums)], part(shard, placed)


def _pieces(weight: Weight) -> Iterator[torch.Tensor]:
    """What `rows` gives, held against what the weight promises."""
    got = 0
    for piece in weight.rows():
        fits = piece.dtype == weight.dtype and (tuple(piece.shape[1:]) == weight.shape[1:] or not weight.shape)
        if not fits:
            raise ValueError(
                f"{weight.name}: rows {list(piece.shape)} of {piece.dtype}, expected [n, "
                f"{', '.join(map(str, weight.shape[1:]))}] of {weight.dtype}"
            )
        got += piece.numel()
        yield piece
    if got != prod(weight.shape):
        raise ValueError(f"{weight.name}: {got} elements, expected {prod(weight.shape)} for {list(weight.shape)}")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _write_index(directory: Path, lines: Sequence[bytes]) -> list[FileEntry]:
    index, table = merged(lines)
    _write_small(directory / INDEX, index)
    _write_small(directory / OFFSETS, table)
    return [describe(INDEX, index), describe(OFFSETS, table)]


class _CheckedFile:
    """A file written in pieces of any size, whose block checksums are made of the bytes on their way out."""

    def __init__(self, path: Path, size: int, progress: Progress) -> None:
        self.size = size
        self._sink, self._progress = PosixSink(path), progress
        self._buffer, self._filled, self._checksums = bytearray(min(_AT_ONCE, max(size, 1))), 0, bytearray()
        self._written = 0

    def write(self, data: memoryview) -> None:
        while data:
            count = min(len(data), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == len(self._buffer):
                self._flush()

    def _flush(self) -> None:
        view = memoryview(self._buffer)[: self._filled]
        self._checksums += block_checksums(view, crc32)
        self._sink.write(view)
        self._written += len(view)
        self._progress(len(view))
        self._filled = 0

    def finish(self) -> bytes:
        """On stable storage; the block checksums."""
        self._flush()
        assert self._written == self.size, f"{self._written} bytes, {self.size} expected"
        self._sink.finish()
        return bytes(self._checksums)

    def abort(self) -> None:
        self._sink.abort()


def _write_small(path: Path, data: bytes) -> None:
    sink = PosixSink(path)
    try:
        sink.write(memoryview(data))
        sink.finish()
    finally:
        sink.abort()
