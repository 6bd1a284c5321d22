"""Two hundred random corruptions: none is loaded silently. (A sample; the full run takes all.)

Each seed corrupts the newest of two checkpoints in its own way (corruption.py), and the run is restored. Either the
state is that of the newest, bit by bit, or a line names a file that was touched and says why, and the older one is
taken: never anything else. Checksums guard against accidents, not against a person who forges files, checksums and
manifest consistently, with the manifest's own checksum: that is a checkpoint, and is loaded.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from corruption import KINDS, Scene, corrupt
from state_ranks import Crew, Job, digests, make_job, shared
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.train.state.entry import Entry

OLD, NEW = CheckpointName(10, 1), CheckpointName(20, 1)


def model(seed: int, rows: int = 1800) -> list[Entry]:
    """Of two writers each gets more than one block, and one writer three."""
    g = torch.Generator().manual_seed(seed)
    tensors = {
        "model/embedding": torch.randn(rows, 1000, generator=g),
        "model/norm": torch.randn(33, generator=g),
        "model/half": torch.randn(77, 91, generator=g).bfloat16(),
        "optim/step": torch.tensor(seed),
        "optim/v": torch.randn(400_000, generator=g),
    }
    return [Entry.whole(name, tensor) for name, tensor in tensors.items()]


def state(seed: int) -> dict[str, Any]:
    return {"consumed": seed * 1000, "fingerprints": [f"{seed:08x}", None], "at": {"epoch": 0.5}}


def save(job: Job, steps: Sequence[int], seeds: Sequence[int], rows: int = 1800) -> None:
    for step, seed in zip(steps, seeds, strict=True):
        entries = shared(model(seed, rows), job.grid.rank, job.grid.world_size)
        job.checkpointer().save(step, entries, state(seed))


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, another run of the same model, and one of another model; by one or two writers."""
    root = tmp_path_factory.mktemp("world")
    for name, arguments in {
        "run": {"steps": [10, 20], "seeds": [1, 2]},
        "other": {"steps": [20], "seeds": [3]},
        "model": {"steps": [20], "seeds": [2], "rows": 1700},
    }.items():
        run = RunDir(root / name)
        run.path.mkdir()
        claim(run)
        for result in crew.run(save_as, run, request.param, run_id=name, **arguments):
            assert result.raised is None, result.text
    return root


def save_as(job: Job, run_id: str, **arguments: Any) -> None:
    save(make_job(job.context.run, 1, run_id=run_id, grid=job.grid), **arguments)


def stage(world: Path, where: Path, seed: int) -> tuple[RunDir, str, set[str]]:
    """A run whose newest checkpoint is corrupted in the way of this seed; the kind, and the files touched."""
    run = RunDir(where / f"run-{seed}")
    shutil.copytree(world / "run", run.path, copy_function=os.link)
    kinds = list(KINDS)
    name = kinds[seed % len(kinds)]
    elsewhere = [world / other / "checkpoints" / str(NEW) for other in ("other", "model")]
    scene = Scene(run.checkpoint(NEW), run.checkpoint(OLD), *elsewhere, random.Random(seed))
    return run, name, corrupt(scene, name)


def restore(job: Job, entries: list[Entry]) -> dict[str, Any]:
    """What came of it, as JSON."""
    for e in entries:
        e.tensor.fill_(7)
    restored = job.checkpointer().restore(entries)
    return {
        "name": restored and str(restored.name),
        "state": restored and restored.manifest.state,
        "digests": digests(entries),
        "events": job.events,
    }


def restore_many(job: Job, runs: list[str]) -> list[dict[str, Any]]:
    jobs = [make_job(RunDir(Path(path)), 1, run_id="run", grid=job.grid) for path in runs]
    entries = model(0)
    return [restore(job, entries) for job in jobs]


@cache
def saved_digests(seed: int) -> dict[str, str]:
    return digests(model(seed))


def check(run: RunDir, kind: str, touched: set[str], found: dict[str, Any]) -> str:
    """`loaded` or `rejected`; fails if it is anything else."""
    case = f"{kind}: {sorted(touched)}: {json.dumps(found['events'])}"
    seed = {str(OLD): 1, str(NEW): 2}[found["name"]]
    assert found["digests"] == saved_digests(seed), case
    assert found["state"] == state(seed), case
    if seed == 2:
        assert [e["event"] for e in found["events"]] == ["restored"], case
        return "loaded"
    rejected, restored = found["events"]
    assert (rejected["event"], rejected["name"], restored["event"]) == ("checkpoint_rejected", str(NEW), "restored")
    assert str(run.checkpoint(NEW)) in rejected["error"], case
    assert any(name in rejected["error"] for name in touched), case
    return "rejected"


SAMPLES = [pytest.param(1, 2, range(40), id="by1-on2"), pytest.param(2, 1, range(40, 80), id="by2-on1")]
ALL = [
    pytest.param(writers, ranks, range(200), id=f"all-by{writers}-on{ranks}", marks=pytest.mark.full)
    for writers in (1, 2)
    for ranks in (1, 2)
]


@pytest.mark.parametrize(("world", "ranks", "seeds"), [*SAMPLES, *ALL], indirect=["world"])
def test_no_corruption_is_loaded_silently(
    crew: Crew, world: Path, ranks: int, seeds: range, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    staged = [stage(world, tmp_path, seed) for seed in seeds]
    runs = [str(run.path) for run, _, _ in staged]
    first, *others = crew.run(restore_many, staged[0][0], ranks, runs=runs)
    assert first.raised is None, first.text
    outcomes = Counter(check(*case, found) for case, found in zip(staged, first.value, strict=True))
    for other in others:
        assert [f | {"events": []} for f in first.value] == other.value, other.text
    assert outcomes.total() == len(seeds)
    assert outcomes["rejected"] > 0.7 * len(seeds), "the corruptions are of little use"
    record_property("outcomes", dict(outcomes))
    print(f"{len(seeds)} corruptions, {ranks} ranks: {dict(outcomes)}")
