"""A segment is a safetensors file in memory, and costs what it holds, once."""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file
from state_ranks import make_entries, shared
from stoker.launcher.run.manifest import block_checksums
from stoker.train.state.entry import DTYPES, Entry, plan
from stoker.train.state.segment import Segment, Segments
from stoker.train.state.writer import write_shard


def packed(entries: list[Entry]) -> Segment:
    segment = Segment()
    segment.pack(plan(entries))
    return segment


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_safetensors_library_reads_a_shard(tmp_path: Path, rank: int) -> None:
    slices = plan(shared(make_entries(3), rank, 3))
    segment = Segment()
    segment.pack(slices)
    write_shard(tmp_path, 0, segment)
    loaded = load_file(tmp_path / "shard-00000.safetensors")
    assert loaded.keys() == {s.key for s in slices}
    for s in slices:
        assert loaded[s.key].dtype == s.tensor.dtype
        assert torch.equal(loaded[s.key], s.tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_is_stored_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.arange(0, 256, dtype=torch.uint8).repeat(8)
    tensor = (bits % 2).bool() if dtype is torch.bool else bits.view(dtype)
    write_shard(tmp_path, 0, packed([Entry.whole("t", tensor), Entry.whole("odd", torch.zeros(3, dtype=torch.uint8))]))
    loaded = load_file(tmp_path / "shard-00000.safetensors")["t"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_a_shard_of_nothing_is_a_valid_file(tmp_path: Path) -> None:
    write_shard(tmp_path, 7, packed([]))
    with safetensors.safe_open(tmp_path / "shard-00007.safetensors", "pt") as f:
        assert list(f.keys()) == []


def test_tensors_lie_aligned_to_their_own_size_and_data_to_64_bytes() -> None:
    segment = packed(make_entries(0))
    assert min(p.at for p in segment.placed) % 64 == 0
    assert all(p.at % p.slice.tensor.element_size() == 0 for p in segment.placed)


def test_a_view_of_a_big_storage_writes_only_its_own_elements(tmp_path: Path) -> None:
    storage = torch.zeros(1000, 1000)
    segment = packed([Entry.whole("row", storage[5]), Entry.whole("column", storage[:, 5])])
    assert segment.size < 10_000
    write_shard(tmp_path, 0, segment)
    assert (tmp_path / "shard-00000.safetensors").stat().st_size == segment.size


def test_tensors_may_change_once_they_are_packed() -> None:
    entries = make_entries(1)
    segment = packed(entries)
    before = bytes(segment.data)
    for e in entries:
        e.tensor.zero_()
    assert bytes(segment.data) == before


def test_a_parameter_that_wants_gradients_is_packed() -> None:
    assert packed([Entry.whole("w", torch.nn.Parameter(torch.ones(3)))]).placed[0].size == 12


def test_sidecar_has_the_checksums_of_the_file_as_written(tmp_path: Path) -> None:
    shard, sidecar = write_shard(tmp_path, 3, packed(make_entries(0)))
    data = (tmp_path / "shard-00003.safetensors").read_bytes()
    assert (shard.name, shard.size, shard.blocks) == ("shard-00003.safetensors", len(data), "shard-00003.crc32")
    assert (tmp_path / "shard-00003.crc32").read_bytes() == block_checksums(data)
    assert sidecar.size == 4 * -(-len(data) // 2**22)


def resident() -> int:
    """Bytes of this process's memory, shared mappings included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_is_used_again_for_the_next_save_and_freed_with_the_segments() -> None:
    mib = 1024 * 1024
    entries = [Entry.whole("w", torch.zeros(32 * mib, dtype=torch.uint8))]
    before = resident()
    segments = Segments()
    first = segments.pack(plan(entries))
    address = first._tensor.data_ptr()
    for _ in range(4):
        assert segments.pack(plan(entries)) is first
    assert first._tensor.data_ptr() == address
    assert 32 * mib <= resident() - before < 40 * mib
    segments.pack(plan([Entry.whole("w", torch.zeros(1))]))
    assert first.size < 1000
    del segments, first
    assert resident() - before < 8 * mib


def test_growing_never_holds_old_and_new_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = packed([Entry.whole("w", torch.zeros(1000))])
    old = weakref.ref(segment._map)
    original = mmap.mmap

    def allocate(*arguments: Any, **options: Any) -> mmap.mmap:
        assert old() is None
        return original(*arguments, **options)

    monkeypatch.setattr(mmap, "mmap", allocate)
    segment.pack(plan([Entry.whole("w", torch.zeros(10_000))]))
    assert segment.size > 40_000


def test_with_two_generations_the_former_snapshot_stays() -> None:
    segments = Segments(2)
    first = segments.pack(plan([Entry.whole("w", torch.full((4,), 1.0))]))
    kept = bytes(first.data)
    second = segments.pack(plan([Entry.whole("w", torch.full((4,), 2.0))]))
    assert bytes(first.data) == kept
    assert second is not first
    assert segments.pack(plan([])) is first
