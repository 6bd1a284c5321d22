"""A segment: one region of memory that holds a shard exactly as its file will hold it (safetensors).

Owns: the byte layout and copying tensors in. A checkpoint is a segment that a writer persists; checksums are computed
from the segment, and the tensors may change as soon as they are packed. Does not own: files (writer.py).
Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .entry import DTYPES, Slice

_ALIGN = 64  # bytes; where tensors begin in file and memory


@dataclass(frozen=True)
class Placed:
    """A slice and the bytes `at : at + size` of the shard that hold it, row-major, little-endian."""

    slice: Slice
    at: int
    size: int


def layout(slices: Sequence[Slice]) -> tuple[bytes, tuple[Placed, ...]]:
    """The shard's header (length and JSON, padded) and where each slice lies."""
    # Wide types first: the format allows no gaps, and so each tensor is aligned to its own element size.
    ordered = sorted(slices, key=lambda s: (-s.tensor.element_size(), s.key))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for s in ordered:
        end = at + s.tensor.nbytes
        header[s.key] = {"dtype": DTYPES[s.tensor.dtype], "shape": list(s.box.shape), "data_offsets": [at, end]}
        at = end
    assert len(header) == len(slices) + 1, "two slices of one shard have the same key"
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    head = len(text).to_bytes(8, "little") + text
    placed, at = [], len(head)
    for s in ordered:
        placed.append(Placed(s, at, s.tensor.nbytes))
        at += s.tensor.nbytes
    return head, tuple(placed)


class Segment:
    """Memory for one shard, kept and used again: it grows when a larger shard comes, and never shrinks."""

    def __init__(self) -> None:
        self.size = 0  # bytes of the packed shard
        self.placed: tuple[Placed, ...] = ()
        self.capacity = 0
        self._map: mmap.mmap | None = None
        self._tensor: torch.Tensor | None = None

    @property
    def data(self) -> memoryview:
        """The shard's bytes. Drop it before the next `pack`."""
        assert self._map is not None
        return memoryview(self._map)[: self.size]

    def pack(self, slices: Sequence[Slice]) -> None:
        """Copy the slices in, from any device. Only the elements of a view are copied, not its storage."""
        head, placed = layout(slices)
        size = placed[-1].at + placed[-1].size if placed else len(head)
        self._reserve(size)
        assert self._map is not None
        assert self._tensor is not None
        self._map[: len(head)] = head
        for p in placed:
            if p.size:
                target = self._tensor[p.at : p.at + p.size].view(p.slice.tensor.dtype)
                target.view(p.slice.box.shape).copy_(p.slice.tensor)
        self.size, self.placed = size, placed

    def _reserve(self, size: int) -> None:
        if size <= self.capacity:
            return
        # The old memory goes before the new comes: both at once is what kills a node at its first save.
        self._tensor, self._map, self.capacity = None, None, 0
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.capacity = size


class Segments:
    """Segments used in turn. With two, the snapshot before stays whole while the next one is packed."""

    def __init__(self, generations: int = 1) -> None:
        self._ring = [Segment() for _ in range(generations)]
        self._next = 0

    def pack(self, slices: Sequence[Slice]) -> Segment:
        """Pack into the oldest segment, whose former content is lost."""
        segment = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        segment.pack(slices)
        return segment
