"""Saves beside training: what is saved is the state of the step that it names, and nothing that follows is lost by it.

Writers are held up, so that each save lasts for several steps; every checkpoint is compared, bit by bit, with the one
that a run made which stood still for each of its saves.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import digest, events, make_context, metrics, tiny_config
from stoker.conf.fields import build
from stoker.conf.layout import Layout
from stoker.conf.load import to_plain
from stoker.conf.schema import Config
from stoker.launcher.run.heartbeat import Control, Save, Segment
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.verification import verify
from stoker.train.grid import Membership, form, single
from stoker.train.loop import Trainer
from stoker.train.pulse import Pulse
from stoker.train.state import persist_job

STEPS = 10
# So large that the shards of two ranks need several blocks, and copies go in waves where memory for two halves is all.
WIDE = {"hidden_size": 256, "ffn_size": 512, "num_layers": 3}
PATIENCE = 40.0  # seconds
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "zero1": (2, {"data": "zero1"}),
    "fsdp": (2, {"data": "fsdp"}),
}


def configured(data: Path, parallel: dict[str, Any] | None = None, **checkpoint: Any) -> Config:
    return tiny_config(data, STEPS, model=WIDE, parallel=parallel or {}, checkpoint={"keep": 99, **checkpoint})


def one_pass(
    member: Membership | None, plain: dict[str, Any], run: str, attempt: int, stop: int | None, **hands: Any
) -> dict[str, Any]:
    """Train to the end or to a committed stop. `hands`: of `Hands`."""
    config = build(Config, plain, (), [])
    grid = single() if member is None else form(member, Layout.of(config, member.world_size), timeout=60)
    pulse = None
    if stop is not None:
        segment = Segment.create("test")
        segment.write_control(Control(1, stop, True, Save.BOTH))
        pulse = Pulse(segment, 1)
    trainer = Trainer.build(config, grid, make_context(run, attempt, pulse=pulse))
    hands = Hands(trainer, stop or STEPS, **hands)
    try:
        ended = trainer.run()
        ends = [ended.finished, ended.step, ended.saved_step]
        return {"ended": ends, "digest": digest(trainer), "flights": hands.flights}
    finally:
        trainer.close()
        grid.close()


class Hands:
    """Holds a writer's thread by events of the training.

    hold: it begins with a file only when the trainer waits to change its tensors, and finishes it only when that is two
    steps further. park: the first save stays at this point until the trainer is told to stop, or has no more to do.
    spoil: these steps are bad.
    """

    def __init__(
        self, trainer: Trainer, last: int, hold: bool = False, park: str = "", spoil: Sequence[int] = ()
    ) -> None:
        self.flights = 0  # steps that had a save in flight
        self._trainer, self._last, self._hold, self._park, self._spoil = trainer, last, hold, park, spoil
        self._settling, self._parked, self._stopping = threading.Event(), threading.Event(), threading.Event()
        self._moved = threading.Condition()
        self._first: int | None = None
        saving = trainer.saving
        self._step, self._settle, self._now, self._finish = trainer.step, saving.settle, saving.now, saving.finish
        trainer.step, saving.settle = self.step, self.settle  # type: ignore[method-assign]
        saving.now, saving.finish = self.now, self.finish  # type: ignore[method-assign]
        persist_job.failpoint = self.failpoint

    def step(self) -> None:
        saving, step = self._trainer.saving.checkpointer.in_flight, self._trainer.progress.step
        if saving is not None and (self._park or step > saving + 2):
            # It may get further now: without a pause these few steps are over before it does.
            self._parked.wait(0.3) if self._park else time.sleep(0.05)
        self._settling.clear()
        self.flights += saving is not None
        if step + 1 in self._spoil:
            self._trainer.data_parallel.squared_norm = lambda: torch.tensor(float("nan"), dtype=torch.float64)
        self._step()
        self._trainer.data_parallel.__dict__.pop("squared_norm", None)
        with self._moved:
            self._moved.notify_all()

    def settle(self) -> None:
        self._settling.set()
        self._settle()

    def now(self, *args: Any, **rest: Any) -> Any:
        self._stopping.set()
        return self._now(*args, **rest)

    def finish(self, *args: Any, **rest: Any) -> None:
        self._stopping.set()
        self._finish(*args, **rest)

    def failpoint(self, name: str, step: int, **_: int) -> None:
        """In the writer's thread."""
        progress, goal = self._trainer.progress, min(step + 2, self._last)
        self._first = self._first or step
        if name == f"checkpoint.{self._park}" and step == self._first:
            self._parked.set()
            assert self._stopping.wait(PATIENCE)
        if self._hold and name == "checkpoint.shard" and goal > step:
            self._settling.wait(PATIENCE)
        if self._hold and name == "checkpoint.sync":
            with self._moved:
                assert self._moved.wait_for(lambda: progress.step >= goal, PATIENCE)


class Runs:
    """Passes of one layout's run, on as many ranks as it takes."""

    def __init__(self, run_ranks: Callable[..., list[Any]], data: Path, layout: str) -> None:
        self._run_ranks, self._data = run_ranks, data
        self.size, self._parallel = LAYOUTS[layout]

    def go(
        self,
        run: Path,
        attempt: int = 1,
        stop: int | None = None,
        hold: bool = False,
        park: str = "",
        spoil: Sequence[int] = (),
        **checkpoint: Any,
    ) -> list[dict[str, Any]]:
        plain = to_plain(configured(self._data, self._parallel, **checkpoint))
        values = {"attempt": attempt, "stop": stop, "hold": hold, "park": park, "spoil": spoil}
        function = alone if self.size == 1 else one_pass
        return self._run_ranks(self.size, function, plain=plain, run=str(run), **values)


def alone(member: Membership, **values: Any) -> dict[str, Any]:
    return one_pass(None, **values)


def saved(run: Path) -> dict[int, dict[str, Any]]:
    """By step: what is in its checkpoint, files by their digests. Each is verified."""
    directory, found = RunDir(run), {}
    for name in directory.all_checkpoints():
        manifest = verify(directory.checkpoint(name))
        files = {
            f.name: hashlib.sha256((directory.checkpoint(name) / f.name).read_bytes()).hexdigest()
            for f in manifest.files
        }
        found.setdefault(name.step, {"files": files, "state": manifest.state})
    return found


@pytest.fixture(scope="module")
def still(
    run_ranks: Callable[..., list[Any]], tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Runs, dict[int, dict[str, Any]], list[dict[str, Any]], list[float]]]:
    """By layout: the run that stands still at each step until that is saved, its checkpoints, ends and losses."""
    known: dict[str, Any] = {}

    def of(layout: str) -> Any:
        if layout not in known:
            runs, path = Runs(run_ranks, tiny_data, layout), tmp_path_factory.mktemp("still")
            ends = runs.go(path, interval=1, asynchronous=False)
            known[layout] = runs, saved(path), ends, [line["loss"] for line in metrics(path)]
            assert sorted(known[layout][1]) == list(range(1, STEPS + 1))
        return known[layout]

    return of


GENERATIONS, WAVES = {"staging_mb": 0}, {"staging_mb": 8}


@pytest.mark.parametrize(
    ("layout", "staging"),
    [
        pytest.param("alone", WAVES, id="alone-waves"),
        pytest.param("zero1", GENERATIONS, id="zero1-generations"),
        pytest.param("fsdp", WAVES, id="fsdp-waves"),
        pytest.param("alone", GENERATIONS, id="alone-generations", marks=pytest.mark.full),
        pytest.param("zero1", WAVES, id="zero1-waves", marks=pytest.mark.full),
        pytest.param("fsdp", GENERATIONS, id="fsdp-generations", marks=pytest.mark.full),
    ],
)
def test_what_is_saved_is_the_state_of_its_step_though_training_goes_on(
    tmp_path: Path, still: Any, layout: str, staging: dict[str, Any]
) -> None:
    runs, expected, ends, losses = still(layout)
    found = runs.go(tmp_path, hold=True, interval=2, **staging)
    assert [f["digest"] for f in found] == [e["digest"] for e in ends]
    assert [line["loss"] for line in metrics(tmp_path)] == losses
    assert min(f["flights"] for f in found) >= 4, "training stood still"
    assert next(e["step"] for e in events(tmp_path) if e["event"] == "checkpoint_late") == 4
    checkpoints = saved(tmp_path)
    assert len(checkpoints) >= 2
    assert STEPS in checkpoints
    for step, checkpoint in checkpoints.items():
        assert checkpoint == expected[step], f"step {step}"


def test_a_run_resumed_from_any_of_its_checkpoints_has_the_same_bits(tmp_path: Path, still: Any) -> None:
    runs, expected, ends, losses = still("zero1")
    runs.go(tmp_path / "first", interval=2)
    steps = sorted(saved(tmp_path / "first"))
    assert len(steps) >= 2
    for step in steps:
        again = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "first", again)
        for other in RunDir(again).all_checkpoints():
            if other.step != step:
                shutil.rmtree(RunDir(again).checkpoint(other))
        claim_next(again)
        found = runs.go(again, attempt=2, interval=1)
        assert [f["digest"] for f in found] == [e["digest"] for e in ends], step
        if step < STEPS:
            assert [line["loss"] for line in metrics(again, attempt=2)] == losses[step:], step
        later = {s: c for s, c in saved(again).items() if s > step}
        assert later == {s: expected[s] for s in later}, step
        assert step == STEPS or STEPS in later


def claim_next(run: Path) -> None:
    """What the supervisor does before an attempt's workers start."""
    RunDir(run).attempt(2).path.mkdir(parents=True)


POINTS = ("prepare", "shard", "write", "sync", "sidecar", "part", "manifest", "publish", "published")
_SAMPLE = {("zero1", "shard", 3), ("zero1", "sync", 0), ("zero1", "part", 3), ("zero1", "publish", 3)}
STOPS = [
    pytest.param(layout, point, later, marks=[] if (layout, point, later) in _SAMPLE else pytest.mark.full)
    for layout in ("alone", "zero1")
    for point in POINTS
    for later in (0, 3)
]


@pytest.mark.parametrize(("layout", "point", "later"), STOPS)
def test_a_warned_stop_at_any_point_of_a_save_loses_no_step(
    tmp_path: Path, still: Any, layout: str, point: str, later: int
) -> None:
    """A save of step 2 gets to `point` and stays there until the run is told to stop: at that step, or `later`."""
    runs, expected, ends, losses = still(layout)
    stop = 2 + later
    for end in runs.go(tmp_path, park=point, stop=stop, interval=2):
        assert end["ended"] == [False, stop, stop]
    found = saved(tmp_path)
    assert set(found) <= {2, stop}
    assert all(checkpoint == expected[step] for step, checkpoint in found.items())
    if point == "published" and later:
        assert 2 in found
    claim_next(tmp_path)
    assert [f["digest"] for f in runs.go(tmp_path, attempt=2)] == [e["digest"] for e in ends]
    assert [line["loss"] for line in metrics(tmp_path, attempt=2)] == losses[stop:]
    assert [p.name for p in RunDir(tmp_path).checkpoints.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("layout", ["alone", "zero1"])
def test_a_save_under_way_at_the_end_of_the_run_is_waited_for(tmp_path: Path, still: Any, layout: str) -> None:
    runs, expected, _, _ = still(layout)
    for end in runs.go(tmp_path / "same", park="sync", stop=None, interval=STEPS):
        assert end["ended"] == [True, STEPS, STEPS]
    assert saved(tmp_path / "same") == {STEPS: expected[STEPS]}
    for end in runs.go(tmp_path / "older", park="sync", stop=None, interval=STEPS - 1):
        assert end["ended"] == [True, STEPS, STEPS]
    assert saved(tmp_path / "older") == {step: expected[step] for step in (STEPS - 1, STEPS)}


def test_a_bad_step_is_never_saved_though_a_save_is_under_way(tmp_path: Path, still: Any) -> None:
    """Steps 3 and 4 are bad while step 2 is being saved, and a save would be due at each."""
    runs, expected, _, _ = still("alone")
    (end,) = runs.go(tmp_path, hold=True, spoil=[3, 4], interval=1)
    assert end["ended"] == [True, STEPS, STEPS]
    found = saved(tmp_path)
    assert not {3, 4} & set(found)
    assert {1, STEPS} <= set(found)
    assert found[1] == expected[1]
    skipped = [e["step"] for e in events(tmp_path) if e["event"] == "checkpoint_skipped"]
    assert skipped == [3, 4]
    assert all(checkpoint["state"]["bad_steps"] == 0 for checkpoint in found.values())
