"""Whatever boxes a tensor was written in, any other boxes of it come back the same, through blocks of any size."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from stoker.launcher.run import manifest as m
from stoker.launcher.run.index_bounds import Bounds
from stoker.launcher.run.manifest import shard_name, sidecar_name
from stoker.train.box import Box
from stoker.train.state import loader, reader
from stoker.train.state.entry import Entry, Slice
from stoker.train.state.index import Index, merged, part
from stoker.train.state.reader import VerifiedReader
from stoker.train.state.segment import layout
from stoker.train.state.source import FileSource

BLOCK = 64  # bytes, so that small tensors have many
TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool)
PLACES = ("together", "every second", "backwards", "elsewhere")


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 9) | st.integers(20, 30), max_size=3))
    kind = draw(st.sampled_from(TYPES))
    return torch.randint(0, 2**15, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(kind)


@st.composite
def cuts(draw: Any, shape: tuple[int, ...]) -> list[Box]:
    """The whole, cut at random again and again."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        number, dim = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        box = boxes.pop(number)
        at = draw(st.integers(0, box.shape[dim]))
        for first, count in ((0, at), (at, box.shape[dim] - at)):
            start, size = list(box.start), list(box.shape)
            start[dim], size[dim] = start[dim] + first, count
            boxes.append(Box(tuple(start), tuple(size)))
    return boxes


def write(directory: Path, wholes: dict[str, torch.Tensor], slices: list[list[tuple[str, Box]]]) -> m.Manifest:
    content, parts = {}, []
    for rank, own in enumerate(slices):
        head, placed = layout(
            [Slice(n, wholes[n][b.slices_in(Box.whole(wholes[n].shape))], wholes[n].shape, b) for n, b in own]
        )
        tensors = [p.slice.tensor.clone(memory_format=torch.contiguous_format) for p in placed if p.size]
        shard = head + b"".join(bytes(t.flatten().view(torch.uint8).tolist()) for t in tensors)
        content |= {shard_name(rank): shard, sidecar_name(rank): m.block_checksums(shard)}
        parts.append(part(shard_name(rank), placed))
    content[m.INDEX], content[m.OFFSETS] = merged(parts)
    for name, data in content.items():
        (directory / name).write_bytes(data)
    large = [m.FileEntry(shard_name(r), len(content[shard_name(r)]), None, sidecar_name(r)) for r in range(len(slices))]
    small = [m.describe(name, data) for name, data in content.items() if not name.startswith("shard-") or "crc" in name]
    return m.Manifest("run", 1, 1, 1, 0.0, {}, {}, (*large, *small))


def empty(box: Box, dtype: torch.dtype, place: str) -> torch.Tensor:
    """Room for a box: in memory of its own, or as a view of other strides."""
    if place == "every second" and box.shape:
        return torch.zeros((*box.shape[:-1], 2 * box.shape[-1]), dtype=dtype)[..., ::2]
    if place == "backwards":
        return torch.zeros(box.shape[::-1], dtype=dtype).permute(tuple(reversed(range(len(box.shape)))))
    if place == "elsewhere":
        return torch.zeros(box.numel + 3, dtype=dtype)[3:].view(box.shape)
    return torch.zeros(box.shape, dtype=dtype)


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate], derandomize=True)
@given(st.data())
def check_any_boxes(data: st.DataObject) -> None:
    wholes = {f"t{i}": t for i, t in enumerate(data.draw(st.lists(tensors(), min_size=1, max_size=4)))}
    ranks = data.draw(st.integers(1, 4))
    slices: list[list[tuple[str, Box]]] = [[] for _ in range(ranks)]
    for name, tensor in wholes.items():
        shape = tuple(tensor.shape)
        boxes = data.draw(cuts(shape)) if tensor.numel() else [Box.whole(shape)]
        for box in [b for b in boxes if b.numel or b.shape == shape]:
            slices[data.draw(st.integers(0, ranks - 1))].append((name, box))
    with tempfile.TemporaryDirectory() as temporary:
        source = FileSource(Path(temporary))
        source.piece = BLOCK * data.draw(st.sampled_from([1, 2, 5]))
        read = VerifiedReader(source, write(Path(temporary), wholes, slices))
        index = Index(read.small(m.INDEX), read.small(m.OFFSETS), "index", Bounds(64, 2**40))
        for _ in range(2):
            entries = [
                Entry(name, empty(box, tensor.dtype, data.draw(st.sampled_from(PLACES))), tuple(tensor.shape), box)
                for name, tensor in wholes.items()
                for box in [data.draw(st.sampled_from(data.draw(cuts(tuple(tensor.shape)))))]
            ]
            found = loader.match(index, entries)
            assert found.differences == ()
            loader.load(read, found.pieces)
            for e in entries:
                assert torch.equal(e.tensor, wholes[e.name][e.box.slices_in(Box.whole(e.shape))])
        source.close()


def test_any_boxes_come_back_from_any_boxes() -> None:
    with patch.multiple(m, BLOCK=BLOCK), patch.multiple(reader, BLOCK=BLOCK, _DIRECT=24):
        check_any_boxes()


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (1, 1, 1), (4, 1, 3)])
def test_any_stretch_of_a_tensor_is_boxes(shape: tuple[int, ...]) -> None:
    values = torch.arange(Box.whole(shape).numel).view(shape)
    for first in range(values.numel() + 1):
        for end in range(first, values.numel() + 1):
            found: list[int] = []
            for box, at in loader.boxes(shape, first, end):
                there = values[box.slices_in(Box.whole(shape))].flatten().tolist()
                assert there == list(range(at, at + len(there)))
                found += there
            assert sorted(found) == list(range(first, end))
