"""A persister alone: what it is handed becomes a checkpoint, bit by bit, or an answer that says why not."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from persist_parts import BLOCK, PATIENCE, RankData, answer, request
from state_ranks import blank, digests, make_entries, make_job
from stoker.launcher.run import failpoints
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.verification import verify
from stoker.train.state.persist import Persister, Wave
from stoker.train.state.persist_local import LocalPersister
from stoker.train.storage.posix import PosixShelf


def local(run: RunDir, data: RankData) -> LocalPersister:
    return LocalPersister(run, PosixShelf(run.checkpoints), data.fds)


@pytest.fixture
def ranks(run: RunDir) -> Iterator[list[tuple[RankData, Persister]]]:
    """Two ranks with the state of step 10."""
    both = [RankData(rank, 2, seed=10) for rank in (0, 1)]
    found: list[tuple[RankData, Persister]] = [(data, local(run, data)) for data in both]
    yield found
    for data, persister in found:
        persister.close()
        for fd in data.fds:
            os.close(fd)


def save(run: RunDir, ranks: list[tuple[RankData, Persister]], job: int, step: int, keep: int | None = None) -> Any:
    for data, persister in ranks:
        data.save(persister, data.part(run, job, step, 2))
    parts = [answer(persister, "part") for _, persister in ranks]
    ranks[0][1].publish(job, request(parts, step, keep=keep))
    return answer(ranks[0][1], "published")


def names(run: RunDir) -> list[str]:
    return sorted(p.name for p in run.checkpoints.glob("*"))


def test_what_two_ranks_hand_over_is_restored_bit_by_bit(run: RunDir, ranks: list[tuple[RankData, Persister]]) -> None:
    assert save(run, ranks, job=1, step=10).fields["events"] == []
    manifest = verify(run.checkpoint(CheckpointName(10, 1)))
    assert (manifest.step, manifest.generation, manifest.state) == (10, 1, {"note": "x"})
    assert sorted(p.name for p in run.checkpoint(CheckpointName(10, 1)).iterdir()) == [
        "index.jsonl",
        "index.offsets",
        "manifest.json",
        "shard-00000.crc32",
        "shard-00000.safetensors",
        "shard-00001.crc32",
        "shard-00001.safetensors",
    ]
    entries = blank(make_entries(10))
    assert make_job(run, 1).checkpointer().restore(entries) is not None
    assert digests(entries) == digests(make_entries(10))


def test_waves_come_through_two_halves_of_memory_and_in_the_end_lie_in_one_file(run: RunDir) -> None:
    data = RankData(0, 1, seed=3)
    persister = local(run, data)
    assert len(data.data) > 2 * BLOCK
    half = BLOCK + len(data.lines)
    os.ftruncate(data.fds[0], 2 * half)
    part = data.part(run, 1, 20, 1)
    persister.begin(part)
    free = [True, True]
    for k, at in enumerate(range(0, len(data.data), BLOCK)):
        if not free[k % 2]:
            done = answer(persister, "wave")
            assert done.fields == {"segment": 0, "file_at": at - 2 * BLOCK}
        chunk = data.data[at : at + BLOCK]
        os.pwrite(data.fds[0], chunk + data.lines * (k == 0), k % 2 * half)
        persister.wave(1, Wave(0, k % 2 * half, at, len(chunk)))
        free[k % 2] = False
    written = answer(persister, "part")
    assert written.fields["part"] == zlib.crc32(data.lines)
    persister.publish(1, request([written], 20))
    answer(persister, "published")
    persister.close()
    verify(run.checkpoint(CheckpointName(20, 1)))
    assert (run.checkpoint(CheckpointName(20, 1)) / "shard-00000.safetensors").read_bytes() == data.data


def test_a_segment_that_has_grown_is_read_to_its_new_end(run: RunDir) -> None:
    data = RankData(0, 1, seed=3)
    persister = local(run, data)
    small = RankData(0, 4, seed=4)
    os.ftruncate(data.fds[0], len(small.data) + len(small.lines))
    os.pwrite(data.fds[0], small.data + small.lines, 0)
    persister.begin(small.part(run, 1, 10, 1))
    persister.wave(1, Wave(0, 0, 0, len(small.data)))
    answer(persister, "part")
    persister.abandon(1)
    data.save(persister, data.part(run, 2, 20, 1))
    persister.publish(2, request([answer(persister, "part")], 20))
    answer(persister, "published")
    persister.close()
    verify(run.checkpoint(CheckpointName(20, 1)))


def test_an_abandoned_job_leaves_nothing_and_answers_nothing(
    run: RunDir, ranks: list[tuple[RankData, Persister]]
) -> None:
    for data, persister in ranks:
        data.save(persister, data.part(run, 1, 10, 2))
        answer(persister, "part")
    for _, persister in reversed(ranks):
        persister.abandon(1)
    save(run, ranks, job=2, step=20)
    assert all(persister.poll() == [] for _, persister in ranks)
    assert names(run) == ["step-00000020-a0001"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_is_one_answer_and_the_next_job_is_as_good_as_any(
    run: RunDir, ranks: list[tuple[RankData, Persister]], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "_POINTS", failpoints._parse(f"checkpoint.write@rank={rank}:raise"))
    for data, persister in ranks:
        data.save(persister, data.part(run, 1, 10, 2))
    found = ranks[rank][1].wait(60.0)
    assert [(a.what, a.error) for a in found] == [("failed", "RuntimeError: failpoint checkpoint.write")]
    for _, persister in reversed(ranks):
        persister.abandon(1)
    save(run, ranks, job=2, step=10)
    assert names(run) == ["step-00000010-a0001"]
    verify(run.checkpoint(CheckpointName(10, 1)))


def test_a_file_that_cannot_be_made_is_named(run: RunDir, ranks: list[tuple[RankData, Persister]]) -> None:
    run.checkpoints.write_text("in the way")
    data, persister = ranks[0]
    data.save(persister, data.part(run, 1, 10, 2))
    (failed,) = persister.wait(60.0)
    assert (failed.what, failed.superseded) == ("failed", False)
    assert failed.error == f"{run.checkpoints}: File exists"


POINTS = ("prepare", "shard", "write", "sync", "sidecar", "part", "index", "offsets", "manifest", "publish")


@pytest.mark.parametrize("point", POINTS)
def test_a_later_attempt_stops_a_writer_at_whichever_point_it_begins(
    run: RunDir, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def on(name: str, **values: int | str) -> None:
        if name == f"checkpoint.{point}":
            seen.append(values)
            claim(run)

    monkeypatch.setattr("stoker.train.state.persist_job.failpoint", on)
    data = RankData(0, 1, seed=1)
    persister = local(run, data)
    data.save(persister, data.part(run, 1, 10, 1))
    found = []
    while not found or found[-1].what not in ("failed", "published"):
        found += persister.wait(60.0)
        if found[-1].what == "part":
            persister.publish(1, request([found[-1]], 10))
    persister.close()
    assert seen == [{"rank": 0, "step": 10, "attempt": 1, "generation": 1}]
    assert (found[-1].what, found[-1].superseded) == ("failed", True)
    assert found[-1].error == f"attempt 1 of {run.path} was superseded by a later one"
    # Between the last look at the fence and the rename nothing can stop it: then it is there under its own number.
    assert names(run) == (["step-00000010-a0001"] if point == "publish" else [])


def test_the_writer_prunes_after_it_has_published(run: RunDir, ranks: list[tuple[RankData, Persister]]) -> None:
    for job, step in enumerate((10, 20, 30), 1):
        save(run, ranks, job, step, keep=2)
    assert names(run) == ["step-00000020-a0001", "step-00000030-a0001"]


def test_who_is_abandoned_while_it_publishes_removes_nothing(
    run: RunDir, ranks: list[tuple[RankData, Persister]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers may be reading an older one by then."""
    save(run, ranks, 1, 10, keep=1)
    published = threading.Event()

    def on(name: str, **values: int | str) -> None:
        if name == "checkpoint.published":
            ranks[0][1].abandon(2)
            published.set()

    monkeypatch.setattr("stoker.train.state.persist_job.failpoint", on)
    for data, persister in ranks:
        data.save(persister, data.part(run, 2, 20, 2))
    ranks[0][1].publish(2, request([answer(persister, "part") for _, persister in ranks], 20, keep=1))
    assert published.wait(PATIENCE)
    ranks[0][1].close()
    assert names(run) == ["step-00000010-a0001", "step-00000020-a0001"]


def test_a_part_that_is_not_what_its_rank_wrote_is_refused(
    run: RunDir, ranks: list[tuple[RankData, Persister]]
) -> None:
    for data, persister in ranks:
        data.save(persister, data.part(run, 1, 10, 2))
    parts = [answer(persister, "part") for _, persister in ranks]
    part = next(Path(run.checkpoints).glob("*/index-00001.part"))
    part.write_bytes(part.read_bytes()[:-1])
    ranks[0][1].publish(1, request(parts, 10))
    (failed,) = ranks[0][1].wait(60.0)
    assert failed.error is not None
    assert failed.error.startswith("index-00001.part: ")
    ranks[0][1].abandon(1)
    ranks[0][1].close()
    assert names(run) == []
