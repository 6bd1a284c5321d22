"""An index grows with what is irregular, not with the ranks, and a rank parses the lines of its own tensors only."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
import torch
from stoker.launcher.run.index_bounds import WIDTHS, Bounds
from stoker.launcher.run.manifest import InvalidCheckpointError, shard_name
from stoker.train.box import Box
from stoker.train.state.entry import DTYPES, Entry, plan
from stoker.train.state.index import Index, merged, part
from stoker.train.state.loader import match
from stoker.train.state.segment import layout

LAYERS = 20
BOUNDS = Bounds(64, 2**40)


def entries(rank: int, ranks: int) -> list[Entry]:
    """Rows of twenty matrices and norms; nothing is allocated."""
    found = []
    for layer in range(LAYERS):
        for name, shape in ((f"{layer:02d}.w", (4096, 512)), (f"{layer:02d}.norm", (4096,))):
            rows = shape[0] // ranks
            box = Box.whole(shape).rows(rank * rows, rows)
            found.append(Entry(name, torch.empty(box.shape, device="meta"), shape, box))
    return found


def index_of(ranks: int) -> tuple[bytes, bytes]:
    return merged([part(shard_name(r), layout(plan(entries(r, ranks)))[1]) for r in range(ranks)])


def test_a_thousand_equal_shards_take_as_much_room_as_a_few() -> None:
    few, many = index_of(4), index_of(256)
    assert len(many[0]) < 2 * len(few[0])
    assert len(many[1]) == len(few[1]) == 8 * 2 * LAYERS


def test_only_the_lines_of_a_rank_s_tensors_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(*index_of(64), "index", BOUNDS)
    own = [e for e in entries(5, 64) if e.name.startswith(("03.", "17."))]
    parsed = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(loads(text)["name"]) or loads(text))
    found = match(index, own)
    assert parsed == ["03.norm", "03.w", "17.norm", "17.w"]
    assert [(p.entry.name, p.stored.file, p.region) for p in found.pieces] == [
        (e.name, "shard-00005.safetensors", e.box) for e in sorted(own, key=lambda e: e.name)
    ]


def test_a_box_meets_the_slices_that_have_its_rows() -> None:
    index = Index(*index_of(64), "index", BOUNDS)
    box = Box((100, 7), (100, 3))  # of 64 rows each: the shards 1, 2 and 3
    [first, *_] = entries(0, 64)
    found = match(index, [replace(first, tensor=torch.empty(box.shape, device="meta"), box=box)])
    assert [(p.stored.file, p.region) for p in found.pieces] == [
        ("shard-00001.safetensors", Box((100, 7), (28, 3))),
        ("shard-00002.safetensors", Box((128, 7), (64, 3))),
        ("shard-00003.safetensors", Box((192, 7), (8, 3))),
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"at":[[', b'"at":[[x', "no runs"),
        (b'"at":[[', b'"at":[[9,0,1],[', "runs of other than 4 values"),
        (b'"start":[', b'"start":[[[0,0,4]],', "line 1"),
        (b'"count":4', b'"count":5', "runs of other than 5 values"),
        (b',"at":', b',"at" :', "not as it is written here"),
    ],
)
def test_a_line_that_makes_no_sense_is_told_by_its_number(old: bytes, new: bytes, said: str) -> None:
    index, _ = index_of(4)
    first = index[: index.index(b"\n") + 1]
    with pytest.raises(InvalidCheckpointError, match=f"line 1: .*{said}|{said}"):
        Index(first.replace(old, new, 1), bytes(8), "index", BOUNDS).find("00.norm")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"count":4,', b'"count":1000000000000,', "1000000000000 slices in 64 shards"),
        (b'"shape":[4096]', b'"shape":[999999999999999]', "is more than the 1099511627776 bytes of all shards"),
        (b'"shape":[4096]', b'"shape":[4095]', r"a slice lies beyond shape \[4095\]"),
        (b'"file":[[0,1,4]]', b'"file":[[61,1,4]]', "a slice in no shard"),
        (b'"file":[[0,1,4]]', b'"file":[[0,1,4611686018427387904],[0,1,4]]', "runs of other than 4 values"),
        (b'"file":[[0,1,4]]', b'"file":[[99999999999999999999,1,4]]', "line 1"),
        (b'"start":[[[0,1024,4]]]', b'"start":[[[-1024,1024,4]]]', "a slice of negative size or place"),
        (b'"shape":[[[1024,0,4]]]', b'"shape":[[[9223372036854775807,0,4]]]', "a slice of negative size or place"),
        (b'"dtype":"F32"', b'"dtype":' + b"[" * 100_000, "line 1"),
    ],
)
def test_a_line_that_says_more_than_there_is_is_told_before_memory_is_taken(old: bytes, new: bytes, said: str) -> None:
    first = index_of(4)[0].partition(b"\n")[0] + b"\n"
    assert old in first
    with pytest.raises(InvalidCheckpointError, match=said):
        Index(first.replace(old, new, 1), bytes(8), "index", BOUNDS).find("00.norm")


@pytest.mark.parametrize("numbers", [(0, 0), (0, 7), (1, 8), (0,), (0, 8, 9)])
def test_offsets_that_are_not_those_of_the_lines_are_refused(numbers: tuple[int, ...]) -> None:
    """Overlapping lines would be read again and again."""
    with pytest.raises(InvalidCheckpointError, match=r"index\.offsets does not say where its lines begin"):
        Index(b"1234567\n1234567\n", struct.pack(f"<{len(numbers)}Q", *numbers), "index", BOUNDS)


def test_both_readers_know_the_same_types() -> None:
    assert {name: dtype.itemsize for dtype, name in DTYPES.items()} == WIDTHS


def test_tensors_that_are_divided_alike_share_that_and_differ_in_places() -> None:
    index = Index(*index_of(64), "index", BOUNDS)
    a, b = index.find("03.w"), index.find("17.w")
    assert a is not None
    assert b is not None
    assert a.regions is b.regions
    assert (a.at != b.at).all()
    assert [common for _, common in a.meeting(Box((100, 7), (0, 3)))] == []
