"""Checkpoints of torch.distributed.checkpoint (DCP): weights to them and from them, a tensor at a time.

Owns: DCP's files `.metadata` and `__RANK_N.distcp` (torch/distributed/checkpoint/filesystem.py). Its metadata is a
pickle; dcp_metadata.py reads it in a process of its own. Does not own: our checkpoints, or the command line.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ...launcher.run.files import naming, read_json, write_json
from ..box import Box
from ..hf.config import checked, settings_text
from ..hf.importing import SETTINGS, plain, rows_of
from ..initial import model_of
from ..params import decoder_table
from ..state.agreement import summary
from ..state.entry import DTYPES
from ..storage.new_directory import new_directory
from .reading import model_settings
from .source import CheckpointWeights, open_weights
from .weights import MODEL, Origin, Weight, write_weights

METADATA = ".metadata"
OURS = "stoker-model.json"  # beside it: the settings of the model, which DCP has no place for
_FILE = 4 * 1024**3  # bytes after which a new file begins
_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_BIAS = ".router_bias"  # not a parameter: of the choice of experts

Progress = Callable[[int, int], object]  # bytes since, and all that there are


def _nothing(count: int, total: int) -> None:
    pass


# ---- export


def export_dcp(checkpoint: Path, out: Path, dtype: torch.dtype | None = None, progress: Progress = _nothing) -> int:
    """Write the weights of a checkpoint of ours into the new directory `out`, under their names in the parameter table;
    returns their number of values. dtype: default that the model was trained in.

    Raises:
        ValueError: `out` exists.
        InvalidCheckpointError: the checkpoint is damaged.
        OSError: storage refused.
    """
    weights = open_weights(checkpoint)
    try:
        kept = {name: dtype or weights.trained_dtype(name) for name in weights.shapes}
        total = sum(prod(shape) * kept[name].itemsize for name, shape in weights.shapes.items())
        with new_directory(out) as unfinished:
            unfinished.mkdir()
            metadata = _write_tensors(unfinished, weights, kept, lambda count: progress(count, total))
            if weights.checkpoint.model:
                write_json(unfinished / OURS, weights.checkpoint.model)
            with naming(unfinished / METADATA), open(unfinished / METADATA, "wb") as f:
                pickle.dump(metadata, f)
    finally:
        weights.close()
    return sum(map(prod, weights.shapes.values()))


def _write_tensors(
    directory: Path, weights: CheckpointWeights, kept: Mapping[str, torch.dtype], progress: Callable[[int], object]
) -> Metadata:
    """Each tensor as chunks of whole rows, which are DCP's shards."""
    described: dict[str, Any] = {}
    placed: dict[MetadataIndex, _StorageInfo] = {}
    number, file = 0, open(directory / "__0_0.distcp", "wb")  # noqa: SIM115 (closed below)
    try:
        for name, shape in weights.shapes.items():
            chunks: list[ChunkStorageMetadata] = []
            row = 0
            for piece in rows_of(partial(weights.fill, name), shape, kept[name]):
                if file.tell() >= _FILE:
                    file.close()
                    number += 1
                    file = open(directory / f"__0_{number}.distcp", "wb")  # noqa: SIM115 (closed below)
                at = file.tell()
                whole = io.BytesIO()  # torch.save makes a RuntimeError of what a disk refuses
                torch.save(piece, whole)
                with naming(Path(file.name)):
                    file.write(whole.getbuffer())
                    file.flush()
                offsets = torch.Size((row, *[0] * (len(shape) - 1)) if shape else ())
                place = _StorageInfo(f"__0_{number}.distcp", at, file.tell() - at)
                placed[MetadataIndex(name, offsets, len(chunks))] = place
                chunks.append(ChunkStorageMetadata(offsets, piece.size()))
                row += piece.shape[0] if shape else 1
                progress(piece.nbytes)
            properties = TensorProperties(dtype=kept[name])
            described[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    finally:
        with naming(Path(file.name)):
            file.close()
    return Metadata(described, {name: (name,) for name in described}, placed, StorageMeta(), "1.0.0")


# ---- import


@dataclass(frozen=True)
class Names:
    """How their names become ours: a prefix that is taken off, then a table (theirs without the prefix: ours)."""

    strip: str = ""
    table: Mapping[str, str] | None = None

    def ours(self, theirs: str) -> str:
        name = theirs.removeprefix(self.strip)
        return (self.table or {}).get(name, name)


@dataclass(frozen=True)
class Imported:
    """What was made. unread: names in the DCP checkpoint that the model has no place for."""

    parameters: int
    settings: dict[str, Any]
    unread: tuple[str, ...]


@dataclass(frozen=True)
class _Chunk:
    box: Box
    file: str
    at: int
    size: int  # bytes


@dataclass(frozen=True)
class _Stored:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


def import_dcp(
    source: Path,
    out: Path,
    settings: Mapping[str, Any] | None = None,
    names: Names | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress = _nothing,
) -> Imported:
    """Make the weights-only checkpoint `out` of the DCP checkpoint `source`, whole or not at all. Its pickle is read in
    a process of its own; that the user wants this is the caller's to ask.

    settings: of the model (config section `model`); default: those that `export_dcp` has left there.

    Raises:
        ValueError: `out` exists, or `source` does not fit the model; names file or tensor.
        OSError: storage refused.
    """
    stored, others = read_metadata(source)
    model = model_of(_settings(source, settings))
    if model is None:
        raise ValueError(f"{source}: does not say what model it is of; name its settings with --model FILE|CHECKPOINT")
    checked(model, str(source))
    names = names or Names()
    by_name = _by_name(source, stored, names)
    if model.num_layers > len(stored):  # before the table of so many layers is made
        raise ValueError(f"{source}: {len(stored)} tensors, too few for model.num_layers={model.num_layers}")
    expected = {f.name: f.shape for f in decoder_table(model).owned()}
    _check(source, {name: stored[theirs].shape for name, theirs in by_name.items()}, expected)
    taken = {n: stored[theirs] for n, theirs in by_name.items() if n in expected or n.endswith(_BIAS)}
    weights = [
        Weight(MODEL + n, dtype or s.dtype, s.shape, partial(_rows, source, by_name[n], s, dtype or s.dtype))
        for n, s in taken.items()
    ]
    total = sum(w.nbytes for w in weights)
    with new_directory(out) as unfinished:
        origin = Origin(state={"dcp": {"source": source.name}})
        write_weights(unfinished, weights, plain(model), origin, lambda count: progress(count, total))
        path = unfinished / SETTINGS
        path.parent.mkdir(parents=True)
        path.write_text(
            f"# from {str(source)!a}\n{yaml.safe_dump(settings_text(model), sort_keys=False)}", encoding="utf-8"
        )
    unread = tuple(sorted({*others, *(theirs for n, theirs in by_name.items() if n not in taken)}))
    return Imported(sum(map(prod, expected.values())), settings_text(model), unread)


def _by_name(source: Path, stored: Mapping[str, _Stored], names: Names) -> dict[str, str]:
    """Their names by ours."""
    found: dict[str, str] = {}
    for theirs in stored:
        ours = names.ours(theirs)
        if ours in found:
            raise ValueError(
                f"{source}: {found[ours]} and {theirs} both become {ours}; choose another --strip or --map"
            )
        found[ours] = theirs
    return found


def _settings(source: Path, given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is not None:
        return dict(given)
    path = source / OURS
    return model_settings({"model": read_json(path)}) if path.is_file() else {}


def _check(source: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(expected.keys() - found.keys())
    if missing:
        first = missing[0]
        prefixes = sorted({n.removesuffix(first) for n in found if n.endswith(f".{first}")})
        hint = f"; with --strip {prefixes[0]} it would be" if prefixes else f"; it has {summary(sorted(found))}"
        raise ValueError(f"{source}: not in it: {summary(missing)}{hint}")
    wrong = [f"{n}: {list(found[n])}, expected {list(s)}" for n, s in expected.items() if found[n] != s]
    if wrong:
        raise ValueError(f"{source}: shapes are not those of the model's settings: {summary(wrong)}")


def _rows(directory: Path, name: str, stored: _Stored, dtype: torch.dtype) -> Iterator[Tensor]:
    """The whole tensor: shards may be cut in any dim."""
    whole = torch.empty(stored.shape, dtype=dtype)
    is_there = torch.zeros(stored.shape, dtype=torch.bool)  # that as many values lie in the shards says not yet which
    for chunk in stored.chunks:
        with open(directory / chunk.file, "rb") as f:
            there = max(0, os.fstat(f.fileno()).st_size - chunk.at)
            f.seek(chunk.at)
            data = f.read(min(chunk.size, there))
        try:
            with warnings.catch_warnings():  # torch's, on what it finds in a damaged file
                warnings.simplefilter("ignore")
                tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as e:
            problem = "is no tensor: the file is damaged, or has other pickles than tensors"
            raise ValueError(f"{directory / chunk.file}: {name} at byte {chunk.at} {problem}") from e
        fits = isinstance(tensor, Tensor) and tuple(tensor.shape) == chunk.box.shape and tensor.dtype == stored.dtype
        if not fits:
            raise ValueError(f"{directory / chunk.file}: {name} at byte {chunk.at} is not what {METADATA} says")
        place = chunk.box.slices_in(Box.whole(stored.shape))
        whole[place].copy_(tensor)
        is_there[place] = True
    if not is_there.all():
        raise ValueError(f"{directory / METADATA}: {name}: its shards overlap and leave gaps")
    yield whole


def read_metadata(directory: Path) -> tuple[dict[str, _Stored], list[str]]:
    """The tensors by name, and the names of what is none.

    Raises:
        ValueError: it is not a DCP checkpoint, or one that cannot be read.
    """
    path = directory / METADATA
    if not path.is_file():
        raise ValueError(f"{path}: no such file: not a checkpoint of torch.distributed.checkpoint")
    program = Path(__file__).with_name("dcp_metadata.py")
    command = [sys.executable, "-I", "-S", str(program), str(path.absolute())]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env={}, cwd="/", check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"ended with {done.returncode}"]
        raise ValueError(f"{path}: {said[-1]}")
    try:
        raw = json.loads(done.stdout)
        return {name: _stored(directory, name, s) for name, s in raw["tensors"].items()}, list(raw["others"])
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise ValueError(f"{path}: not what torch.distributed.checkpoint writes ({type(e).__name__}: {e})") from e


def _stored(directory: Path, name: str, raw: Mapping[str, Any]) -> _Stored:
    shape = _sizes(raw["shape"])
    chunks = tuple(
        _Chunk(Box(_sizes(c["start"], shape), _sizes(c["shape"], shape)), c["file"], *_sizes((c["at"], c["size"])))
        for c in raw["chunks"]
    )
    where = f"{directory / METADATA}: {name}"
    for c in chunks:
        # A name leads nowhere but into the directory.
        is_inside = isinstance(c.file, str) and os.path.basename(c.file) == c.file and c.file.isprintable()
        if not is_inside or not c.file.endswith(".distcp"):
            raise ValueError(f"{where}: bad file name {c.file!r}")
        if c.box.numel and Box.whole(shape).intersect(c.box) != c.box:
            raise ValueError(f"{where}: a shard beyond the tensor's end")
    if sum(c.box.numel for c in chunks) != prod(shape):
        raise ValueError(f"{where}: its shards do not make it up")
    return _Stored(_TYPES[raw["dtype"]], shape, chunks)


def _sizes(found: Iterable[Any], like: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Raises TypeError: they are not all whole numbers from 0 on, or not as many as in `like`."""
    sizes = tuple(found)
    if not all(type(n) is int and 0 <= n < 2**63 for n in sizes) or (like is not None and len(sizes) != len(like)):
        raise TypeError(f"{sizes} are no sizes or places")
    return sizes
