"""Saving and restoring over any number of ranks gives back the same bits."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from state_ranks import Crew, Job, blank, digests, make_entries, make_job
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.manifest import INDEX, OFFSETS, InvalidCheckpointError, describe, read_manifest
from stoker.launcher.run.verification import verify
from stoker.train.box import Box
from stoker.train.state.entry import Entry
from stoker.train.state.reader import VerifiedReader
from stoker.train.state.restorer import NoValidCheckpointError
from stoker.train.state.source import FileSource

WANTED = digests(make_entries(1))


def save(job: Job, step: int, seed: int) -> str:
    return str(job.checkpointer().save(step, job.entries(seed), {"consumed_samples": 10 * step}))


def restore(job: Job) -> Any:
    entries = blank(make_entries(0))
    restored = job.checkpointer().restore(entries)
    return None if restored is None else [str(restored.name), restored.manifest.state, digests(entries)]


def save_and_restore(job: Job, seed: int) -> Any:
    save(job, 10, seed)
    return restore(job)


@pytest.mark.parametrize(("writers", "readers"), [(1, 4), (2, 1), (2, 4), (3, 2), (4, 2)])
def test_any_number_of_ranks_loads_what_any_number_saved(crew: Crew, run: RunDir, writers: int, readers: int) -> None:
    for result in crew.run(save, run, writers, step=10, seed=1):
        assert (result.value, result.raised) == ("step-00000010-a0001", None), result.text
    directory = run.checkpoint(CheckpointName(10, 1))
    manifest = verify(directory)
    ones = dict.fromkeys(("pipeline", "context", "tensor", "expert"), 1)
    assert manifest.layout == {"world": writers, "data": writers, **ones}
    sizes = [f.size for f in manifest.files if f.blocks is not None]
    assert len(sizes) == writers
    assert max(sizes) - min(sizes) < 2**21
    assert {f.name for f in manifest.files} | {"manifest.json"} == {p.name for p in directory.iterdir()}
    for result in crew.run(restore, run, readers, generation=2):
        assert result.value == ["step-00000010-a0001", {"consumed_samples": 100}, WANTED], result.text


def test_one_pass_saves_and_restores_and_reports_once(crew: Crew, run: RunDir) -> None:
    first, second = crew.run(save_and_restore, run, 2, seed=1)
    assert first.value == second.value
    assert second.events == []
    saved, restored = first.events
    assert (saved["event"], saved["step"]) == ("checkpoint_saved", 10)
    assert saved["bytes"] == sum(
        p.stat().st_size for p in run.checkpoint(CheckpointName(10, 1)).glob("shard*.safetensors")
    )
    assert saved["slowest_rank"] in (0, 1)
    assert (restored["event"], restored["step"], restored["name"]) == ("restored", 10, "step-00000010-a0001")
    assert saved["seconds"] >= saved["slowest_seconds"] > 0
    assert restored["seconds"] > 0


def test_nothing_saved_is_nothing_restored(crew: Crew, run: RunDir) -> None:
    for result in crew.run(restore, run, 2):
        assert (result.value, result.raised, result.events) == (None, None, [])


def test_index_has_a_line_per_tensor_and_where_each_begins(run: RunDir) -> None:
    make_job(run, 1).checkpointer().save(1, make_entries(0), {})
    directory = run.checkpoint(CheckpointName(1, 1))
    index = (directory / "index.jsonl").read_bytes()
    lines = [json.loads(line) for line in index.splitlines()]
    assert [line["name"] for line in lines] == sorted(e.name for e in make_entries(0))
    assert lines[6]["name"] == "model/wq"
    [[at, step, count]] = lines[6]["slices"].pop("at")
    assert (step, count) == (0, 1)
    assert lines[6] == {
        "name": "model/wq",
        "dtype": "F32",
        "shape": [100, 1000],
        "slices": {
            "count": 1,
            "file": [[0, 0, 1]],
            "start": [[[0, 0, 1]], [[0, 0, 1]]],
            "shape": [[[100, 0, 1]], [[1000, 0, 1]]],
        },
    }
    shard = (directory / "shard-00000.safetensors").read_bytes()
    assert shard[at : at + 400_000] == make_entries(0)[1].tensor.numpy().tobytes()
    offsets = struct.unpack(f"<{len(lines)}Q", (directory / "index.offsets").read_bytes())
    assert [json.loads(index[o:].split(b"\n")[0])["name"] for o in offsets] == [line["name"] for line in lines]


def test_any_box_loads_from_any_boxes(run: RunDir) -> None:
    """Written as a 2x2 mosaic by one rank and as rows by another; read as columns, rows, an inner part."""
    whole = torch.arange(40 * 30, dtype=torch.float32).view(40, 30)
    mosaic = [Box((a, b), (c, d)) for a, c in ((0, 25), (25, 15)) for b, d in ((0, 7), (7, 23))]
    # Four grids of one would write four checkpoints: the parts of one tensor under one name need one writer each, so
    # the mosaic's index is put together from four entries of one rank.
    job = make_job(run, 1)
    parts = [Entry(f"w{i}", whole[b.slices_in(Box.whole((40, 30)))], (40, 30), b) for i, b in enumerate(mosaic)]
    job.checkpointer().save(1, parts, {})
    directory = run.checkpoint(CheckpointName(1, 1))
    _join_lines(directory, "w")
    for box in (Box((0, 5), (40, 4)), Box((24, 0), (3, 30)), Box((20, 6), (10, 2)), Box.whole((40, 30))):
        target = Entry("w", torch.zeros(box.shape), (40, 30), box)
        assert job.checkpointer().restore([target]) is not None
        assert torch.equal(target.tensor, whole[box.slices_in(Box.whole((40, 30)))])


def _join_lines(directory: Path, name: str) -> None:
    """Make one tensor of all lines of the index."""
    lines = [json.loads(line) for line in (directory / INDEX).read_bytes().splitlines()]
    slices = {"count": len(lines)}
    for key in ("file", "at"):
        slices[key] = [run for one in lines for run in one["slices"][key]]
    for key in ("start", "shape"):
        slices[key] = [[run for one in lines for run in one["slices"][key][dim]] for dim in (0, 1)]
    _rewrite_index(directory, lines[0] | {"name": name, "slices": slices})


def _rewrite_index(directory: Path, line: dict[str, Any]) -> None:
    """Give a checkpoint an index of this one line, with all digests right."""
    content = {INDEX: json.dumps(line, separators=(",", ":")).encode() + b"\n", OFFSETS: struct.pack("<Q", 0)}
    manifest = read_manifest(directory)
    files = [f for f in manifest.files if f.name not in content]
    for file, data in content.items():
        (directory / file).write_bytes(data)
        files.append(describe(file, data))
    replace(manifest, files=tuple(files)).write(directory)


def _slices(**columns: Any) -> dict[str, Any]:
    """One slice of four elements."""
    good = {"count": 1, "file": [[0, 0, 1]], "at": [[0, 0, 1]], "start": [[[0, 0, 1]]], "shape": [[[4, 0, 1]]]}
    return {"slices": good | columns}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_slices(count=0, file=[], at=[], start=[[]], shape=[[]]), "0 elements"),
        (_slices(file=[[7, 0, 1]]), "line 1: a slice in no shard"),
        (_slices(at=[[10**6, 0, 1]]), "reaches beyond"),
        (_slices(at=[[-8, 0, 1]]), "line 1: a slice in no shard"),
        (_slices(count=10**12, file=[[0, 0, 10**12]], at=[[0, 0, 10**12]]), "line 1: w: 1000000000000 slices in 1"),
        (_slices(count=2, file=[[0, 0, 2]], at=[[0, 0, 2]], start=[[[0, 2, 2]]], shape=[[[2, 0, 2]]]), "two slices"),
        (_slices(at=[[0, 0, 2]]), "line 1: runs of other than 1 values"),
        (_slices(start=[]), "line 1"),
        ({"slices": []}, "line 1"),
    ],
)
def test_an_index_that_makes_no_sense_is_a_damaged_checkpoint(run: RunDir, change: dict[str, Any], said: str) -> None:
    job = make_job(run, 1)
    job.checkpointer().save(1, [Entry.whole("w", torch.ones(4))], {})
    _rewrite_index(run.checkpoint(CheckpointName(1, 1)), {"name": "w", "dtype": "F32", "shape": [4]} | change)
    with pytest.raises(NoValidCheckpointError, match=said):
        job.checkpointer().restore([Entry.whole("w", torch.ones(4))])


def test_a_rank_checks_the_small_files_that_it_reads_itself(run: RunDir) -> None:
    make_job(run, 1).checkpointer().save(1, [Entry.whole("w", torch.ones(4))], {})
    directory = run.checkpoint(CheckpointName(1, 1))
    manifest = read_manifest(directory)
    reader = VerifiedReader(FileSource(directory), manifest)
    reader.small("shard-00000.crc32")
    # The first rank found everything right; what another node's file system shows may be older.
    (directory / "shard-00000.crc32").write_bytes(b"\0\0\0\0")
    with pytest.raises(InvalidCheckpointError, match="does not match its checksum in the manifest"):
        reader.small("shard-00000.crc32")


def test_only_the_blocks_that_a_box_touches_are_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1024 * 1024
    make_job(run, 1).checkpointer().save(1, [Entry.whole("w", torch.arange(10 * mib).view(10, mib))], {})
    read = 0
    original = FileSource.read

    def counted(self: FileSource, file: str, at: int, *into: memoryview) -> None:
        nonlocal read
        read += sum(map(len, into)) if file.startswith("shard-00000.s") else 0
        original(self, file, at, *into)

    monkeypatch.setattr(FileSource, "read", counted)
    box = Box((5, 0), (1, mib))
    target = Entry("w", torch.zeros(1, mib, dtype=torch.int64), (10, mib), box)
    make_job(run, 1).checkpointer().restore([target])
    assert torch.equal(target.tensor[0], torch.arange(5 * mib, 6 * mib))
    assert read <= 3 * 4 * mib  # 8 MiB at an odd place


def test_rows_wider_than_a_read_are_put_together(run: RunDir) -> None:
    """One row of 12 MiB, of which a box has an inner part: no read holds it."""
    mib = 1024 * 1024
    make_job(run, 1).checkpointer().save(1, [Entry.whole("w", torch.arange(3 * mib).view(1, 3, mib // 2, 2))], {})
    box = Box((0, 0, 1000, 1), (1, 3, mib // 4, 1))
    target = Entry("w", torch.zeros(box.shape, dtype=torch.int64), (1, 3, mib // 2, 2), box)
    make_job(run, 1).checkpointer().restore([target])
    whole = torch.arange(3 * mib).view(1, 3, mib // 2, 2)
    assert torch.equal(target.tensor, whole[box.slices_in(Box.whole(whole.shape))])


def test_restore_fills_views_in_place_and_nothing_beside_them(run: RunDir) -> None:
    job = make_job(run, 1)
    job.checkpointer().save(1, [Entry.whole("w", torch.full((3, 2), 5.0))], {})
    storage = torch.zeros(6, 4)
    view = storage[::2, 1:3]
    parameter = torch.nn.Parameter(view)
    job.checkpointer().restore([Entry.whole("w", parameter)])
    assert storage.tolist() == [[0, 5, 5, 0], [0, 0, 0, 0]] * 3
    assert parameter.requires_grad


def restore_other(job: Job, change: str) -> None:
    entries = make_entries(0)
    tensors = {e.name: e.tensor for e in entries}
    if change == "shape":
        tensors["model/norm"] = torch.zeros(130)
    elif change == "dtype":
        tensors["model/norm"] = torch.zeros(129, dtype=torch.bfloat16)
    elif change == "more":
        tensors["model/other"] = torch.zeros(1)
    elif change == "less":
        del tensors["model/norm"]
    elif change == "one rank" and job.grid.rank == 1:
        tensors["model/norm"] = torch.zeros(130)
    job.checkpointer().restore([Entry.whole(name, t) for name, t in tensors.items()])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("shape", "model/norm: shape [129] in the checkpoint, [130] here"),
        ("dtype", "model/norm: F32 in the checkpoint, BF16 here"),
        ("more", "model/other: not in the checkpoint"),
        ("less", "model/norm: only in the checkpoint"),
        ("one rank", "model/norm: shape [129] in the checkpoint, [130] here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_on_all_ranks_and_not_skipped(
    crew: Crew, run: RunDir, change: str, said: str
) -> None:
    for step in (10, 20):
        make_job(run, 1).checkpointer().save(step, make_entries(1), {})
    for result in crew.run(restore_other, run, 2, change=change):
        assert result.raised == "ValueError"
        assert result.text == f"checkpoint step-00000020-a0001 does not fit this model: {said}"
        assert result.events == []


def test_the_newest_is_the_highest_step_then_the_highest_attempt(run: RunDir) -> None:
    for step in (20, 30):
        make_job(run, 1).checkpointer().save(step, make_entries(1), {})
    for _ in range(2):
        claim(run)
    make_job(run, 3).checkpointer().save(30, make_entries(3), {})
    restored = make_job(run, 3).checkpointer().restore(make_entries(0))
    assert restored is not None
    assert restored.name == CheckpointName(30, 3)


def test_saving_the_same_step_again_writes_nothing(run: RunDir) -> None:
    job = make_job(run, 1)
    checkpointer = job.checkpointer()
    name = checkpointer.save(5, make_entries(1), {})
    before = run.checkpoint(name).stat().st_ino
    assert checkpointer.save(5, make_entries(1), {}) == name
    again = job.checkpointer()
    again.restore(make_entries(0))
    assert again.save(5, make_entries(1), {}) == name
    assert run.checkpoint(name).stat().st_ino == before
    assert [e["event"] for e in job.events] == ["checkpoint_saved", "restored"]
    assert [p.name for p in run.checkpoints.iterdir()] == [str(name)]


def test_state_must_be_json(run: RunDir) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        make_job(run, 1).checkpointer().save(5, make_entries(1), {"loss": float("nan")})
    assert not run.checkpoints.exists()


@pytest.mark.gpu
def test_tensors_of_a_device_are_saved_and_restored_without_growing_its_memory(run: RunDir) -> None:
    device = torch.device("cuda")
    entries = [Entry.whole(e.name, e.tensor.to(device)) for e in make_entries(1)]
    other = [Entry.whole(e.name, torch.zeros_like(e.tensor)) for e in entries]
    before = torch.cuda.memory_allocated()
    job = make_job(run, 1)
    job.checkpointer().save(1, entries, {})
    assert job.checkpointer().restore(other) is not None
    assert torch.cuda.memory_allocated() == before
    for a, b in zip(entries, other, strict=True):
        assert torch.equal(a.tensor, b.tensor)
