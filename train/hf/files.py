"""The weights of a Hugging Face directory: which file holds which tensor, and reading any region of one.

Owns: model.safetensors, or model.safetensors.index.json and its shards, checked before a byte of them is used. Does not
own: what the names mean (maps.py). Pickled weights are never opened. Files are read, not mapped: there, a disk's error
would end the process, and the pages read would count as its memory.
Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..box import Box
from ..state.entry import DTYPES, TORCH_DTYPES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_CHUNK = 32 * 1024 * 1024  # bytes of host memory through which a region passes
_LARGEST_HEADER = 100 * 1000 * 1000  # as the format's own library allows
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Stored:
    """A whole tensor in a file, row-major from byte `at` on."""

    file: Path
    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def tensors_of(directory: Path) -> dict[str, Stored]:
    """Every tensor of the directory, by Hugging Face's name.

    Raises:
        ValueError: there are no safetensors files, one is damaged or cut off, or the weights are quantised.
    """
    index = directory / INDEX
    if index.is_file():
        return _of_index(directory, _json_of(index))
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory")
    pickled = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLED and "training_args" not in p.name)
    if pickled:
        raise ValueError(
            f"{directory / pickled[0]}: pickled weights, which can run any code when they are loaded; have "
            "transformers write them as safetensors (save_pretrained), in a place where that does no harm"
        )
    raise ValueError(f"{directory}: no {SINGLE} and no {INDEX} in it")


def _of_index(directory: Path, index: Any) -> dict[str, Stored]:
    where = directory / INDEX
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise ValueError(f"{where}: has no weight_map from names to files")
    outside = sorted({f for f in weights.values() if not _is_beside(f)})
    if outside:
        raise ValueError(f"{where}: names {outside[0]!r}; expected names of .safetensors files beside it")
    headers = {file: read_header(directory / file) for file in sorted(set(weights.values()))}
    missing = sorted(name for name, file in weights.items() if name not in headers[file])
    if missing:
        raise ValueError(f"{directory / weights[missing[0]]}: {missing[0]} is not in it, but {INDEX} says so")
    return {name: headers[file][name] for name, file in weights.items()}


def _is_beside(file: str) -> bool:
    return Path(file).name == file and file.isprintable() and file.endswith(".safetensors")


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file; its size is checked, no tensor is read.

    Raises:
        ValueError: it is missing, unreadable, no such file, or shorter or longer than its header says.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise ValueError(f"{path}: no safetensors file, or cut off: {size} bytes")
            text = file.read(length)
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from e
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        found = {name: _stored(path, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise ValueError(f"{path}: its header is damaged ({e})") from None
    begins = sorted((s.at, s.at + prod(s.shape) * s.dtype.itemsize) for s in found.values())
    end = 8 + length
    for first, last in begins:
        if first != end:
            raise ValueError(f"{path}: its header is damaged: a gap or an overlap at byte {min(first, end)}")
        end = last
    if end != size:
        raise ValueError(f"{path}: {size} bytes, its header says {end}: cut off, or not whole yet")
    return found


def _stored(path: Path, base: int, entry: dict[str, Any]) -> Stored:
    if entry["dtype"] not in TORCH_DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is unknown")
    dtype, shape = TORCH_DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    begin, end = map(int, entry["data_offsets"])
    if begin < 0 or min(shape, default=0) < 0 or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"{list(shape)} of {entry['dtype']} does not take bytes {begin} to {end}")
    return Stored(path, base + begin, dtype, shape)


def check_floating(name: str, stored: Stored) -> None:
    """Raises ValueError: the tensor is not one of floating-point numbers that a weight can be taken from."""
    if stored.dtype not in _FLOATS:
        expected = ", ".join(DTYPES[d] for d in _FLOATS)
        raise ValueError(f"{stored.file}: {name} is {DTYPES[stored.dtype]} (quantised?); expected one of {expected}")


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: not JSON ({e})") from None


class Reader:
    """Reads regions of the tensors in files, one file open at a time."""

    def __init__(self) -> None:
        self._open: tuple[Path, int] | None = None

    def fill(self, stored: Stored, region: Box, out: Tensor) -> None:
        """Copy `region` of the tensor into `out` (of the region's shape; any dtype, device and stride).

        Whole rows (dim 0) are read, as many at a time as fit into a fixed amount of memory.

        Raises:
            ValueError: the file ends too early, or the disk fails; names it.
        """
        if region.numel == 0:
            return
        shape = stored.shape
        if not shape:  # a scalar is one row
            shape, region, out = (1,), Box((0,), (1,)), out.view(1)
        row = prod(shape[1:]) * stored.dtype.itemsize
        step = max(1, min(region.shape[0], _CHUNK // row))
        staging = bytearray(step * row)
        taken = (slice(None), *region.slices_in(Box.whole(shape))[1:])
        for done in range(0, region.shape[0], step):
            count = min(step, region.shape[0] - done)
            self._read(stored.file, stored.at + (region.start[0] + done) * row, memoryview(staging)[: count * row])
            raw = torch.frombuffer(staging, dtype=torch.uint8, count=count * row)
            out[done : done + count].copy_(raw.view(stored.dtype).view(count, *shape[1:])[taken])

    def _read(self, file: Path, at: int, into: memoryview) -> None:
        try:
            fd, done = self._descriptor(file), 0
            while done < len(into):
                got = os.preadv(fd, [into[done:]], at + done)
                if got == 0:
                    raise ValueError(f"{file}: ends at byte {at + done}, more was expected")
                done += got
        except OSError as e:
            raise ValueError(f"{file}: {e.strerror}") from e

    def _descriptor(self, file: Path) -> int:
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        return self._open[1]

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None
