"""Copies that wait for storage: the ranks wait for the slowest together, and for none longer than a save may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from state_ranks import PATIENCE, Crew, Job, make_entries, make_job, until
from stoker.conf.schema import CheckpointConfig
from stoker.launcher.run.layout import RunDir
from stoker.train.state import persist_job
from stoker.train.state.checkpointer import Checkpointer, Ended
from stoker.train.state.entry import Entry
from stoker.train.state.packing import Packer

WAVES = {"staging_mb": 8}  # three waves of what `own_entries` has


def own_entries(rank: int) -> list[Entry]:
    return [replace(e, name=f"rank-{rank}/{e.name}") for e in make_entries(rank)]


def settle_behind(job: Job, packed: str) -> float:
    """When this rank went on. Rank 1's storage takes nothing before rank 0 is packed, and a while."""
    if job.grid.rank == 1:
        settle = persist_job._Shard.settle

        def wait(self: Any) -> None:
            persist_job._Shard.settle = settle  # type: ignore[method-assign]
            until(Path(packed).exists)
            time.sleep(0.5)  # in which a rank that does not wait goes on
            Path(packed).with_suffix(".opened").write_text(str(time.monotonic()))
            settle(self)

        persist_job._Shard.settle = wait  # type: ignore[method-assign]
    else:
        guarded = Packer._guarded

        def told(self: Packer, work: Callable[[], None]) -> None:
            guarded(self, work)
            Path(packed).touch()

        Packer._guarded = told  # type: ignore[method-assign]
    checkpointer = job.checkpointer(**WAVES)
    checkpointer.begin(10, own_entries(job.grid.rank), {})
    checkpointer.settle()
    settled = time.monotonic()
    assert checkpointer.is_settled
    assert checkpointer.finish() == Ended(10, None)
    return settled


def test_no_rank_goes_on_before_the_slowest_one_is_packed(crew: Crew, run: RunDir, tmp_path: Path) -> None:
    results = crew.run(settle_behind, run, 2, packed=str(tmp_path / "packed"))
    assert [r.raised for r in results] == [None, None], results
    opened = float((tmp_path / "packed.opened").read_text())
    assert min(r.value for r in results) > opened


@pytest.mark.parametrize("way", ["settle", "finish"])
def test_storage_that_hangs_holds_no_step_longer_than_a_save_may_take(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    opened = threading.Event()
    monkeypatch.setattr(persist_job._Shard, "settle", lambda self: opened.wait(PATIENCE))
    job = make_job(run, 1)
    checkpointer = Checkpointer(job.context, job.grid, CheckpointConfig(**WAVES), timeout=0.1)
    checkpointer.begin(10, own_entries(0), {})
    if way == "settle":
        checkpointer.settle()
        ended = checkpointer.advance(*checkpointer.counts())
    else:
        ended = checkpointer.finish()
    opened.set()
    checkpointer.close()
    assert ended is not None
    assert ended.problem is not None
    assert ended.problem.endswith("not done within resilience.save_timeout=0.1 seconds")
    assert list(run.checkpoints.iterdir()) == []
