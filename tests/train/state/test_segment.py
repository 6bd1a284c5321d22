"""A shard in memory is a safetensors file, and costs what it holds, once."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file
from state_ranks import make_entries, packed, shared
from stoker.train.state.entry import DTYPES, Entry, plan
from stoker.train.state.segment import Memory, populate


def written(path: Path, entries: list[Entry], rank: int = 0) -> Path:
    """The shard as the file that it is."""
    shard, memory = packed(entries, rank)
    path.write_bytes(memory.data[: shard.size])
    return path


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_safetensors_library_reads_a_shard(tmp_path: Path, rank: int) -> None:
    slices = plan(shared(make_entries(3), rank, 3))
    loaded = load_file(written(tmp_path / "s", shared(make_entries(3), rank, 3), rank))
    assert loaded.keys() == {s.key for s in slices}
    for s in slices:
        assert loaded[s.key].dtype == s.tensor.dtype
        assert torch.equal(loaded[s.key], s.tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_is_stored_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.arange(0, 256, dtype=torch.uint8).repeat(8)
    tensor = (bits % 2).bool() if dtype is torch.bool else bits.view(dtype)
    entries = [Entry.whole("t", tensor), Entry.whole("odd", torch.zeros(3, dtype=torch.uint8))]
    loaded = load_file(written(tmp_path / "s", entries))["t"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_a_shard_of_nothing_is_a_valid_file(tmp_path: Path) -> None:
    with safetensors.safe_open(written(tmp_path / "s", []), "pt") as f:
        assert list(f.keys()) == []


def test_tensors_lie_aligned_to_their_own_size_and_data_to_64_bytes() -> None:
    shard, _ = packed(make_entries(0))
    assert min(p.at for p in shard.placed) % 64 == 0
    assert all(p.at % p.slice.tensor.element_size() == 0 for p in shard.placed)


def test_a_view_of_a_big_storage_takes_only_its_own_elements() -> None:
    storage = torch.zeros(1000, 1000)
    shard, memory = packed([Entry.whole("row", storage[5]), Entry.whole("column", storage[:, 5])])
    assert shard.size < 10_000
    assert memory.capacity < 12_000


def test_tensors_may_change_once_they_are_packed() -> None:
    entries = make_entries(1)
    _, memory = packed(entries)
    before = bytes(memory.data)
    for e in entries:
        e.tensor.zero_()
    assert bytes(memory.data) == before


def test_a_parameter_that_wants_gradients_is_packed() -> None:
    assert packed([Entry.whole("w", torch.nn.Parameter(torch.ones(3)))])[0].placed[0].size == 12


def resident() -> int:
    """Bytes of this process's memory, shared mappings included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


MIB = 1024 * 1024


def test_memory_is_used_again_and_freed_with_its_object() -> None:
    before = resident()
    memory = Memory()
    memory.reserve(32 * MIB)
    memory.tensor.fill_(1)
    address = memory.tensor.data_ptr()
    memory.reserve(MIB)
    memory.reserve(32 * MIB)
    assert memory.tensor.data_ptr() == address
    assert memory.held == 32 * MIB
    assert 32 * MIB <= resident() - before < 40 * MIB
    memory.close()
    assert resident() - before < 8 * MIB


def test_another_process_that_has_the_descriptor_sees_the_same_bytes() -> None:
    memory = Memory()
    memory.reserve(MIB)
    memory.tensor[-1] = 7
    assert mmap.mmap(memory.fd, 0, prot=mmap.PROT_READ)[MIB - 1] == 7


def test_memory_of_a_worker_before_this_one_is_taken_over() -> None:
    first = Memory()
    first.reserve(4 * MIB)
    first.tensor.fill_(1)
    second = Memory(os.dup(first.fd))
    second.reserve(MIB)
    assert (second.capacity, second.held) == (4 * MIB, 4 * MIB)


def test_growing_never_holds_old_and_new_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    memory.reserve(MIB)
    old = weakref.ref(memory._map)
    original = mmap.mmap

    def allocate(*arguments: Any, **options: Any) -> mmap.mmap:
        assert old() is None
        return original(*arguments, **options)

    monkeypatch.setattr(mmap, "mmap", allocate)
    memory.reserve(2 * MIB)
    assert memory.capacity == 2 * MIB


def test_memory_is_made_present_ahead_of_the_first_copy_and_keeps_its_content() -> None:
    memory = Memory()
    memory.reserve(8 * MIB)
    memory.tensor[5] = 9
    assert memory.held < MIB
    populate([memory], torch.device("cpu")).join()
    if memory.held < MIB:
        pytest.skip("this kernel cannot")
    assert memory.held == 8 * MIB
    assert memory.tensor.sum() == 9
