"""Reads any checkpoint as logical tensors, whole or a few rows at a time, in bounded memory; every block is verified.

Owns: what tools see of a checkpoint. Does not own: where the bytes lie and how slices are put together (train/state).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ...launcher.run.index_bounds import Bounds
from ...launcher.run.manifest import INDEX, OFFSETS, InvalidCheckpointError, Manifest
from ..box import Box
from ..state.entry import TORCH_DTYPES, Entry
from ..state.index import Index
from ..state.loader import load, match
from ..state.reader import VerifiedReader
from ..state.source import ByteSource
from ..storage.posix import manifest_at, source_at

CHUNK = 64 * 1024 * 1024  # bytes of a tensor that are in memory at once


@dataclass(frozen=True)
class Logical:
    """A logical (unsharded) tensor of a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Of dim 0; a scalar is one row."""
        return self.shape[0] if self.shape else 1


class Checkpoint:
    """An open checkpoint. Used by one thread; a context manager. Every method raises InvalidCheckpointError."""

    def __init__(self, directory: Path, manifest: Manifest, source: ByteSource) -> None:
        """Use `open_checkpoint`."""
        self.directory, self.manifest, self._source = directory, manifest, source
        self._reader = VerifiedReader(source, manifest)
        index, offsets = self._reader.small(INDEX), self._reader.small(OFFSETS)
        self._index = Index(index, offsets, source.where(INDEX), Bounds.of(manifest))
        self.tensors: dict[str, Logical] = {}  # by name, sorted
        for line in self._index.lines():
            if line.dtype not in TORCH_DTYPES:
                raise InvalidCheckpointError(f"{source.where(INDEX)}: line {line.number + 1} is not what was written")
            self.tensors[line.name] = Logical(line.name, TORCH_DTYPES[line.dtype], line.shape)

    @property
    def model(self) -> dict[str, Any]:
        """The settings of the model (config section `model`), by name."""
        return model_settings(self.manifest.state)

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """`count` rows (dim 0) of a tensor from row `first` on, default all: a new tensor on the host."""
        t = self.tensors[name]
        box = Box.whole(t.shape)
        if t.shape:
            box = box.rows(first, t.rows - first if count is None else count)
        out = torch.empty(box.shape, dtype=t.dtype)
        entry = Entry(name, out, t.shape, box)
        load(self._reader, match(self._index, [entry]).pieces)
        return out

    def chunks(self, name: str, limit: int = CHUNK) -> Iterator[tuple[int, torch.Tensor]]:
        """The whole tensor in order: (first row, rows) of about `limit` bytes, at least a row; none if it is empty."""
        t = self.tensors[name]
        if not t.nbytes:
            return
        step = max(1, limit * t.rows // t.nbytes)
        for first in range(0, t.rows, step):
            yield first, self.read(name, first, min(step, t.rows - first))

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open the checkpoint in `directory` (see launcher/run/chosen.py for what a person may type).

    Raises:
        InvalidCheckpointError: it is none, or damaged at a look.
    """
    manifest = manifest_at(directory)
    source = source_at(directory)
    try:
        return Checkpoint(directory, manifest, source)
    except BaseException:
        source.close()
        raise


def model_settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of a weights-only checkpoint `state["model"]`, of a trainer's the settings `model.*`; {} if it says nothing."""
    if isinstance(state.get("model"), Mapping):
        return dict(state["model"])
    settings = state.get("settings")
    if not isinstance(settings, Mapping):
        return {}
    return {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
