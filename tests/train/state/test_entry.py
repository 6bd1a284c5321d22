"""Who writes what: exact, balanced, the same for whoever asks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from state_ranks import make_entries, shared
from stoker.train.box import Box
from stoker.train.state.entry import Entry, check, plan

MIB = 1024 * 1024


def covered(entries: list[Entry], size: int) -> dict[str, torch.Tensor]:
    """How often each element is written by `size` ranks together."""
    counts = {e.name: torch.zeros(e.shape, dtype=torch.int64) for e in entries}
    for rank in range(size):
        for s in plan(shared(entries, rank, size)):
            counts[s.name][s.box.slices_in(Box.whole(s.shape))] += 1
            assert tuple(s.tensor.shape) == s.box.shape
    return counts


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64])
def test_each_element_is_written_once(size: int) -> None:
    entries = make_entries(0)
    assert all(bool((count == 1).all()) for count in covered(entries, size).values())
    names = [s.name for rank in range(size) for s in plan(shared(entries, rank, size))]
    assert set(names) == {e.name for e in entries}  # empty tensors too
    assert sum(name == "optim/none" for name in names) == 1


@given(
    shapes=st.lists(st.lists(st.integers(0, 2000), max_size=2), max_size=12),
    size=st.integers(1, 9),
)
def test_any_shapes_are_written_once_and_evenly(shapes: list[list[int]], size: int) -> None:
    entries = [Entry.whole(f"t{i}", torch.empty(shape, dtype=torch.uint8)) for i, shape in enumerate(shapes)]
    assert all(bool((count == 1).all()) for count in covered(entries, size).values())
    total = sum(e.tensor.nbytes for e in entries)
    for rank in range(size):
        written = sum(s.tensor.nbytes for s in plan(shared(entries, rank, size)))
        assert abs(written - total / size) <= MIB


def test_a_big_tensor_is_shared_row_by_row() -> None:
    entries = [Entry.whole("w", torch.empty(1001, 1000)), Entry.whole("x", torch.empty(10))]
    slices = [plan(shared(entries, rank, 4)) for rank in range(4)]
    assert [[(s.name, s.box.start, s.box.shape) for s in of_rank] for of_rank in slices] == [
        [("w", (0, 0), (250, 1000))],
        [("w", (250, 0), (251, 1000))],
        [("w", (501, 0), (250, 1000))],
        [("w", (751, 0), (250, 1000)), ("x", (0,), (10,))],
    ]
    assert [s.key for s in slices[3]] == ["w@751,0", "x"]


def test_small_tensors_stay_whole() -> None:
    entries = [Entry.whole(f"t{i}", torch.empty(100, 100)) for i in range(10)]
    slices = [s for rank in range(3) for s in plan(shared(entries, rank, 3))]
    assert [s.name for s in slices] == [f"t{i}" for i in range(10)]
    assert all(s.box == Box.whole((100, 100)) for s in slices)


def test_a_part_of_a_shard_keeps_its_place_in_the_logical_tensor() -> None:
    local = torch.arange(2 * 1024 * 1024, dtype=torch.float32).view(2048, 1024)
    entry = Entry("w", local, (4096, 1024), Box((2048, 0), (2048, 1024)))
    first, second = (plan(shared([entry], rank, 2))[0] for rank in range(2))
    assert (first.box, second.box) == (Box((2048, 0), (1024, 1024)), Box((3072, 0), (1024, 1024)))
    assert torch.equal(second.tensor, local[1024:])
    assert first.key == "w@2048,0"


def test_what_a_rank_holds_alone_it_writes_alone() -> None:
    common = Entry.whole("a", torch.empty(1024, 1024))
    own = Entry("b", torch.empty(512, 1024), (1024, 1024), Box((512, 0), (512, 1024)))
    slices = [plan([own, *shared([common], rank, 2)]) for rank in range(2)]
    assert [[(s.name, s.box.start[0], s.box.shape[0]) for s in of_rank] for of_rank in slices] == [
        [("a", 0, 512), ("b", 512, 512)],
        [("a", 512, 512), ("b", 512, 512)],
    ]


def test_one_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'model/w' is listed twice"):
        check([Entry.whole("model/w", torch.empty(2)), Entry.whole("model/w", torch.empty(2))])


def test_a_tied_tensor_under_two_names_is_refused_and_fused_views_are_not() -> None:
    weight = torch.empty(8, 4)
    check([Entry.whole("model/wq", weight[:4]), Entry.whole("model/wk", weight[4:])])
    with pytest.raises(ValueError, match="'model/embedding' and 'model/head' are the same memory"):
        check([Entry.whole("model/embedding", weight), Entry.whole("model/head", weight)])
