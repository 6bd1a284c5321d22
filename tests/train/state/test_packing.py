"""What is packed in waves is, put together, what is packed at once; memory is used again only when it may be."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_ranks import make_entries, packed
from stoker.train.state.entry import Entry
from stoker.train.state.packing import Packer, Planner, Shard, Staging, rows
from stoker.train.state.persist import Answer, Part, Wave
from stoker.train.state.segment import Memory

MIB = 1024 * 1024
CPU = torch.device("cpu")


class Reader:
    """A persister that reads a wave when it is told to, as a slow writer does, and then says so."""

    def __init__(self, memories: Sequence[Memory], is_slow: bool = False) -> None:
        self.file, self.memories, self.lines = bytearray(), memories, b""
        self.waiting: list[Wave] = []
        self.may_read, self.has_waited = threading.Event(), threading.Event()
        self.part: Part | None = None
        if not is_slow:
            self.may_read.set()

    def begin(self, part: Part) -> None:
        self.part = part

    def wave(self, job: int, wave: Wave) -> None:
        self.waiting.append(wave)
        assert self.part is not None
        if wave.file_at == 0:
            self.lines = bytes(self.memories[wave.segment].data[wave.size : wave.size + self.part.lines])

    def read(self) -> list[Answer]:
        wave = self.waiting.pop(0)
        assert wave.file_at == len(self.file)
        self.file += self.memories[wave.segment].data[wave.segment_at : wave.segment_at + wave.size]
        return [Answer(1, "wave", {})]

    def wait(self, timeout: float) -> list[Answer]:
        self.has_waited.set()
        return self.read() if self.may_read.wait(timeout) else []


def job(shard: Shard) -> Part:
    return Part(1, {}, 0, 10, 1, 1, shard.size, len(shard.lines))


def memories() -> tuple[Memory, Memory]:
    return Memory(), Memory()


@pytest.mark.parametrize("first", [0, 1])
def test_waves_make_the_same_file_as_a_whole_copy(first: int) -> None:
    shard, whole = packed(make_entries(1))
    two = memories()
    staging = Staging.halves(shard, 8 * MIB)
    assert [w.size for w in staging.waves(first)] == [4 * MIB, 4 * MIB, shard.size - 8 * MIB]
    reader = Reader(two)
    packer = Packer(shard, staging, first, two, {})
    packer.start(reader, job(shard), CPU)
    packer.wait()
    while reader.waiting:
        reader.read()
    assert packer.problem is None
    assert reader.file == whole.data[: shard.size]
    assert reader.lines == shard.lines
    assert all(m.capacity == 4 * MIB + len(shard.lines) for m in two)


def test_what_fits_into_a_half_goes_at_once() -> None:
    shard, _ = packed(make_entries(1))
    assert Staging.halves(shard, 64 * MIB).waves(0) == [Wave(0, 0, 0, shard.size)]
    assert Staging.halves(shard, 64 * MIB).is_whole
    assert not Staging.halves(shard, 16 * MIB).is_whole
    assert Staging.whole(shard).capacity == shard.size + len(shard.lines)


def test_a_half_that_is_not_written_yet_is_not_packed_again() -> None:
    shard, whole = packed(make_entries(1))
    two = memories()
    reader = Reader(two, is_slow=True)
    packer = Packer(shard, Staging.halves(shard, 8 * MIB), 0, two, {})
    packer.start(reader, job(shard), CPU)
    assert reader.has_waited.wait(60)
    assert len(reader.waiting) == 2
    assert not packer.is_done
    assert two[1].data[: 4 * MIB] == whole.data[4 * MIB : 8 * MIB]
    reader.may_read.set()
    packer.wait()
    while reader.waiting:
        reader.read()
    assert reader.file == whole.data[: shard.size]


def test_packing_ends_when_it_is_cancelled_or_the_writer_has_failed() -> None:
    shard, _ = packed(make_entries(1))
    two = memories()
    reader = Reader(two, is_slow=True)
    packer = Packer(shard, Staging.halves(shard, 8 * MIB), 0, two, {})
    packer.start(reader, job(shard), CPU)
    packer.cancel()
    assert packer.is_done
    assert len(reader.waiting) <= 2

    failing = Reader(two)
    failing.wait = lambda timeout: [Answer(1, "failed", {}, "disk full")]  # type: ignore[method-assign]
    packer = Packer(shard, Staging.halves(shard, 8 * MIB), 0, two, {})
    packer.start(failing, job(shard), CPU)
    packer.wait()
    assert [a.error for a in packer.answers] == ["disk full"]


def test_memory_that_cannot_be_had_is_a_problem_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, _ = packed(make_entries(1))
    two = memories()

    def refuse(self: Memory, size: int) -> None:
        raise MemoryError

    monkeypatch.setattr(Memory, "reserve", refuse)
    packer = Packer(shard, Staging.whole(shard), 0, two, {})
    packer.run(Reader(two), job(shard))
    assert packer.problem == "out of memory"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_any_range_of_any_tensor_is_found_in_row_major_order(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.arange(int(torch.tensor(shape).prod())).view(shape).permute(order)
    begin = data.draw(st.integers(0, tensor.numel()))
    end = data.draw(st.integers(begin, tensor.numel()))
    views = rows(tensor, begin, end)
    found = torch.cat([v.flatten() for v in views]) if views else torch.empty(0, dtype=torch.int64)
    assert torch.equal(found, tensor.flatten()[begin:end])
    assert all(v.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for v in views)


def test_a_save_is_planned_once_as_long_as_the_tensors_stay_where_they_are() -> None:
    planner, tensors = Planner(0), {"a": torch.ones(4), "b": torch.ones(3)}

    def entries() -> list[Entry]:
        return [Entry.whole(name, t.detach()) for name, t in tensors.items()]

    shard = planner.shard(entries())
    tensors["a"].zero_()
    assert planner.shard(entries()) is shard
    old, tensors["b"] = tensors["b"], torch.ones(3)
    again = planner.shard(entries())
    assert again is not shard
    assert old.data_ptr() not in [p.slice.tensor.data_ptr() for p in again.placed]
    tensors["a"] = tensors["a"].double()
    assert planner.shard(entries()) is not again
