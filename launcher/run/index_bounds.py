"""What an index may say at most, so that a damaged or hostile one costs no more than its checkpoint's files.

Owns: those limits, for both who read an index (verification.py and the trainer's state/index.py): they are checked
before anything is made that is as large as a number says. Does not own: the index's form. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from .manifest import Manifest

# Bytes of an element, by safetensors' name of its type.
WIDTHS = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
_DIMS = 64  # as many as numpy's and torch's tensors have
_PER_SHARD = 64  # slices of one tensor; what is written here has one
_LARGEST = 2**62  # elements; twice as many still count as int64


@dataclass(frozen=True)
class Bounds:
    """Of a checkpoint with so many shards, which have so many bytes together."""

    shards: int
    bytes: int

    @staticmethod
    def of(manifest: Manifest) -> Bounds:
        sizes = [f.size for f in manifest.files if f.blocks is not None]
        return Bounds(len(sizes), sum(sizes))

    def check(self, line: Mapping[str, Any]) -> None:
        """`name`, `dtype`, `shape` and `slices.count` of a line.

        Raises:
            ValueError, KeyError, TypeError: the line is none, or says more than there is.
        """
        name, dtype, shape, count = line["name"], line["dtype"], line["shape"], line["slices"]["count"]
        if type(name) is not str or type(shape) is not list or len(shape) > _DIMS:
            raise ValueError("no name, or no shape")
        if dtype not in WIDTHS:
            raise ValueError(f"{name}: unknown dtype {dtype!r}")
        if not all(type(n) is int and n >= 0 for n in shape) or prod(n for n in shape if n) > _LARGEST:
            raise ValueError(f"{name}: no tensor has shape {shape}")
        if prod(shape) * WIDTHS[dtype] > self.bytes:
            raise ValueError(f"{name}: shape {shape} of {dtype} is more than the {self.bytes} bytes of all shards")
        if type(count) is not int or not 0 <= count <= _PER_SHARD * self.shards:
            raise ValueError(f"{name}: {count} slices in {self.shards} shards")

    def check_columns(self, line: Mapping[str, Any]) -> None:
        """The runs [first, step, count] of a line that `check` has passed: each column has a value per slice, within
        the shards and the tensor's shape. Raises as `check`."""
        s, shape = line["slices"], line["shape"]
        if len(s["start"]) != len(shape) or len(s["shape"]) != len(shape):
            raise ValueError(f"{line['name']}: slices of other dims than {shape}")
        limits = [(s["file"], self.shards - 1), (s["at"], self.bytes)]
        limits += [(runs, n) for key in ("start", "shape") for runs, n in zip(s[key], shape, strict=True)]
        for runs, limit in limits:
            _check_runs(runs, s["count"], limit, line["name"])


def _check_runs(runs: Iterable[Any], size: int, limit: int, name: str) -> None:
    left = size
    for first, step, count in runs:
        if not type(first) is type(step) is type(count) is int or not 1 <= count <= left:
            raise ValueError(f"{name}: runs of other than {size} values")
        left -= count
        last = first + step * (count - 1)
        for at in (first, last):
            if not 0 <= at <= limit:
                raise ValueError(f"{name}: a slice at {at}, expected 0 to {limit}")
    if left:
        raise ValueError(f"{name}: runs of other than {size} values")
