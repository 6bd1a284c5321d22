"""When a run saves: beside its steps, one at a time, postponed and never dropped; and what a stop waits for."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import events, make_context, metrics, tiny_config
from stoker.launcher.run.heartbeat import Control, Save, Segment
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.manifest import read_manifest
from stoker.launcher.run.verification import verify
from stoker.train import saving as saving_module
from stoker.train.grid import Membership, form, single
from stoker.train.loop import Ended, Trainer
from stoker.train.pulse import Pulse
from stoker.train.state import persist_job
from stoker.train.state.persist_remote import LOST

PATIENCE = 60.0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Closed, writers wait before a shard is finished."""
    opened = threading.Event()
    finish = persist_job._Shard.finish

    def wait(self: Any) -> None:
        assert opened.wait(PATIENCE)
        finish(self)

    monkeypatch.setattr(persist_job._Shard, "finish", wait)
    yield opened
    opened.set()


def saved_steps(run: Path) -> list[int]:
    return sorted(name.step for name in RunDir(run).all_checkpoints())


def said(run: Path, *kinds: str) -> list[dict[str, Any]]:
    path = RunDir(run).attempt(1).events("test")
    return [e for e in events(run) if e["event"] in kinds] if path.exists() else []


def stopping_at(step: int, save: Save = Save.BOTH) -> Pulse:
    segment = Segment.create("test")
    segment.write_control(Control(1, step, True, save))
    return Pulse(segment, 1)


def build(run: Path, data: Path, steps: int, pulse: Pulse | None = None, **checkpoint: Any) -> Trainer:
    config = tiny_config(data, steps=steps, checkpoint={"keep": 99, **checkpoint})
    return Trainer.build(config, single(), make_context(run, pulse=pulse))


def open_when_abandoned(trainer: Trainer, gate: threading.Event) -> None:
    checkpointer, abandon = trainer.saving.checkpointer, trainer.saving.checkpointer.abandon

    def abandoned() -> None:
        abandon()
        gate.set()

    checkpointer.abandon = abandoned  # type: ignore[method-assign]


def steps_until(trainer: Trainer, condition: Callable[[], bool]) -> None:
    """Train on, as a run does while a writer is at work."""
    for _ in range(2000):
        if condition():
            return
        trainer.step()
    raise AssertionError("never")


def test_a_save_in_flight_delays_the_next_one_which_is_told_once_and_made(
    tmp_path: Path, tiny_data: Path, gate: threading.Event
) -> None:
    trainer = build(tmp_path, tiny_data, 5000, interval=2, at_end=False)
    for _ in range(7):
        trainer.step()
    assert trainer.saving.checkpointer.in_flight == 2
    assert said(tmp_path, "checkpoint_late") == [{"event": "checkpoint_late", "step": 4, "behind": 2}]
    assert saved_steps(tmp_path) == []
    gate.set()
    steps_until(trainer, lambda: trainer.saving.saved_step == 2)
    begun = trainer.saving.checkpointer.in_flight
    assert begun == trainer.progress.step  # at the very boundary at which the one before had ended
    trainer.saving.finish()
    trainer.close()
    assert saved_steps(tmp_path) == [2, begun]
    first, second = said(tmp_path, "checkpoint_saved")
    assert (first["step"], second["step"]) == (2, begun)
    fields = {"event", "step", "seconds", "stall_seconds", "wait_seconds", "bytes", "slowest_rank", "slowest_seconds"}
    assert first.keys() == fields
    assert first["seconds"] >= first["stall_seconds"] > 0
    verify(RunDir(tmp_path).checkpoint(CheckpointName(begun, 1)))


def test_without_asynchronous_saves_each_is_made_at_its_step(tmp_path: Path, tiny_data: Path) -> None:
    trainer = build(tmp_path, tiny_data, 6, interval=2, asynchronous=False)
    assert trainer.run() == Ended(True, 6, 6)
    trainer.close()
    assert saved_steps(tmp_path) == [2, 4, 6]
    assert said(tmp_path, "checkpoint_late") == []


def test_a_stop_waits_for_the_save_of_its_own_step(tmp_path: Path, tiny_data: Path, gate: threading.Event) -> None:
    trainer = build(tmp_path, tiny_data, 99, stopping_at(4), interval=4)
    threading.Timer(0.2, gate.set).start()
    assert trainer.run() == Ended(False, 4, 4)
    trainer.close()
    assert saved_steps(tmp_path) == [4]
    assert len(said(tmp_path, "checkpoint_saved")) == 1


def test_a_stop_with_time_for_both_finishes_an_older_save_first_and_removes_nothing(
    tmp_path: Path, tiny_data: Path, gate: threading.Event
) -> None:
    trainer = build(tmp_path, tiny_data, 99, stopping_at(5), interval=3, keep=1)
    threading.Timer(0.2, gate.set).start()
    assert trainer.run() == Ended(False, 5, 5)
    trainer.close()
    assert [event["step"] for event in said(tmp_path, "checkpoint_saved")] == [3, 5]
    assert saved_steps(tmp_path) == [3, 5]
    for step in (3, 5):
        verify(RunDir(tmp_path).checkpoint(CheckpointName(step, 1)))


def test_before_a_stop_nothing_is_removed_for_the_save_in_flight(
    tmp_path: Path, tiny_data: Path, gate: threading.Event
) -> None:
    trainer = build(tmp_path, tiny_data, 99, interval=2, keep=1)
    gate.set()
    for _ in range(2):
        trainer.step()
    trainer.saving.finish()
    gate.clear()
    for _ in range(2):
        trainer.step()
    threading.Timer(0.2, gate.set).start()
    trainer.saving.finish(is_urgent=True)
    trainer.close()
    assert saved_steps(tmp_path) == [2, 4]


def test_a_stop_that_is_cut_short_leaves_the_older_save_that_was_in_flight(
    tmp_path: Path, tiny_data: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed as soon as its own save has begun."""
    trainer = build(tmp_path, tiny_data, 99, stopping_at(5), interval=3)
    begin = trainer.saving.checkpointer.begin

    def end_at_the_last_one(step: int, *rest: Any, **more: Any) -> bool:
        if step == 5:
            raise KeyboardInterrupt
        return begin(step, *rest, **more)

    monkeypatch.setattr(trainer.saving.checkpointer, "begin", end_at_the_last_one)
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    trainer.close()
    assert saved_steps(tmp_path) == [3]


def test_a_stop_with_time_for_its_own_save_alone_gives_up_an_older_one(
    tmp_path: Path, tiny_data: Path, gate: threading.Event
) -> None:
    trainer = build(tmp_path, tiny_data, 99, stopping_at(5, Save.OWN), interval=3)
    open_when_abandoned(trainer, gate)
    assert trainer.run() == Ended(False, 5, 5)
    trainer.close()
    assert saved_steps(tmp_path) == [5]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000005-a0001"]
    (abandoned,) = said(tmp_path, "checkpoint_abandoned")
    assert (abandoned["step"], abandoned["for_step"]) == (3, 5)
    verify(RunDir(tmp_path).checkpoint(CheckpointName(5, 1)))


@pytest.mark.parametrize("save", Save)
def test_a_stop_that_cannot_save_waits_for_the_older_one(
    tmp_path: Path, tiny_data: Path, gate: threading.Event, save: Save
) -> None:
    trainer = build(tmp_path, tiny_data, 99, stopping_at(5, save), interval=3)
    if save is not Save.UNDER_WAY:  # after a bad step nothing is saved
        ffn = trainer.model.blocks["1"].ffn  # type: ignore[index,union-attr]
        ffn.register_forward_hook(lambda _, __, out: out * float("nan") if trainer.progress.step == 4 else out)
    threading.Timer(0.2, gate.set).start()
    assert trainer.run() == Ended(False, 5, 3)
    trainer.close()
    assert saved_steps(tmp_path) == [3]


@pytest.mark.parametrize(("error", "saved"), [(LOST, [5]), ("No space left on device", [])])
def test_the_last_save_is_made_again_if_all_that_failed_was_the_writer(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch, error: str, saved: list[int]
) -> None:
    finish = persist_job._Shard.finish

    def refuse(self: Any) -> None:
        monkeypatch.setattr(persist_job._Shard, "finish", finish)
        raise OSError(None, error)

    monkeypatch.setattr(persist_job._Shard, "finish", refuse)
    trainer = build(tmp_path, tiny_data, 99, stopping_at(5), interval=99)
    assert trainer.run() == Ended(False, 5, saved[0] if saved else None)
    trainer.close()
    assert saved_steps(tmp_path) == saved
    assert len(said(tmp_path, "checkpoint_failed")) == 1


def test_the_end_waits_for_the_older_one_and_saves_the_last_step(
    tmp_path: Path, tiny_data: Path, gate: threading.Event
) -> None:
    trainer = build(tmp_path, tiny_data, 5, interval=3)
    threading.Timer(0.2, gate.set).start()
    assert trainer.run() == Ended(True, 5, 5)
    trainer.close()
    assert saved_steps(tmp_path) == [3, 5]


def test_a_save_that_takes_too_long_has_failed_and_the_run_goes_on(
    tmp_path: Path, tiny_data: Path, gate: threading.Event
) -> None:
    config = tiny_config(tiny_data, steps=5000, checkpoint={"interval": 2}, resilience={"save_timeout": 0.1})
    trainer = Trainer.build(config, single(), make_context(tmp_path))
    steps_until(trainer, lambda: bool(said(tmp_path, "checkpoint_failed")))
    failed = said(tmp_path, "checkpoint_failed")[0]
    assert failed["step"] == 2
    assert failed["error"].endswith(": not done within resilience.save_timeout=0.1 seconds")
    gate.set()
    trainer.close()


def test_a_trainer_that_ends_early_leaves_no_half_of_a_checkpoint(
    tmp_path: Path, tiny_data: Path, gate: threading.Event
) -> None:
    trainer = build(tmp_path, tiny_data, 99, interval=2)
    for _ in range(3):
        trainer.step()
    open_when_abandoned(trainer, gate)
    trainer.close()
    # The folder itself may not have been made yet.
    assert list((tmp_path / "checkpoints").glob("*")) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("stoker-pack")]


def test_a_closed_trainer_keeps_no_tensor_alive(tmp_path: Path, tiny_data: Path) -> None:
    trainer = build(tmp_path, tiny_data, 99, interval=2)
    for _ in range(3):
        trainer.step()
    trainer.close()
    gc.collect()
    gc.disable()  # what is freed now is freed at once, not some time
    try:
        moments = [weakref.ref(t) for t in trainer.optimizer.state()["exp_avg"].values()]
        weight = weakref.ref(trainer.model.norm)
        del trainer
        assert {ref() for ref in (weight, *moments)} == {None}
    finally:
        gc.enable()


def test_the_last_validation_is_in_the_checkpoint_and_outlives_a_restart(tmp_path: Path, tiny_data: Path) -> None:
    def run(steps: int, attempt: int) -> Trainer:
        config = tiny_config(
            tiny_data,
            steps=steps,
            checkpoint={"interval": 1, "keep": 99, "asynchronous": False},
            train={"eval_interval": 3 if attempt == 1 else 0, "eval_batches": 1},
        )
        trainer = Trainer.build(config, single(), make_context(tmp_path, attempt=attempt))
        trainer.run()
        trainer.close()
        return trainer

    run(5, 1)
    run(6, 2)
    measured = {line["step"]: line["eval_loss"] for line in metrics(tmp_path) if "eval_loss" in line}
    state = lambda step, attempt: read_manifest(  # noqa: E731
        RunDir(tmp_path).checkpoint(CheckpointName(step, attempt))
    ).state["validation"]
    assert state(2, 1) is None
    assert state(3, 1) == state(5, 1) == state(6, 2) == {"step": 3, "loss": measured[3]}


# ---- on two ranks


def save_by_the_clock(member: Membership, run: str, prefix: str) -> list[int]:
    """Rank 1's clock is an hour ahead; it is not asked."""
    clock = saving_module.time.monotonic
    skew = 3600.0 * member.rank
    saving_module.time.monotonic = lambda: clock() + skew  # type: ignore[assignment]
    config = tiny_config(prefix, steps=6, checkpoint={"minutes": 30, "keep": 99, "at_end": False})
    config.train.micro_batch = 2
    trainer = Trainer.build(config, form(member, timeout=60), make_context(run))
    for step in range(1, 7):
        if step in (3, 5):
            skew += 1900.0
        if step == 4:
            trainer.saving.finish()  # nothing else is in its way at step 5
        trainer.step()
    trainer.saving.finish()
    trainer.close()
    return saved_steps(Path(run))


def test_saves_by_the_minute_go_by_rank_0s_clock_on_all_ranks(
    tmp_path: Path, tiny_data: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    assert run_ranks(2, save_by_the_clock, run=str(tmp_path), prefix=str(tiny_data)) == [[3, 5], [3, 5]]


def fail_on_one_rank(member: Membership, run: str, prefix: str) -> list[Any]:
    """Rank 1's disk refuses the first save."""
    if member.rank == 1:
        create = persist_job._Shard.finish

        def refuse(self: Any) -> None:
            persist_job._Shard.finish = create  # type: ignore[method-assign]
            raise OSError(28, "No space left on device", "shard")

        persist_job._Shard.finish = refuse  # type: ignore[method-assign]
    config = tiny_config(prefix, steps=400, checkpoint={"interval": 2, "keep": 99, "at_end": False})
    config.train.micro_batch = 2
    trainer = Trainer.build(config, form(member, timeout=60), make_context(run))
    steps_until(trainer, lambda: trainer.saving.saved_step is not None)
    result = [trainer.saving.saved_step, trainer.progress.step]
    trainer.close()
    return result


def test_a_failure_on_one_rank_is_known_to_all_at_one_boundary_and_the_next_save_is_made(
    tmp_path: Path, tiny_data: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    first, second = run_ranks(2, fail_on_one_rank, run=str(tmp_path), prefix=str(tiny_data))
    assert first == second
    (failed,) = said(tmp_path, "checkpoint_failed")
    assert failed["step"] == 2
    assert "rank 1 on " in failed["error"]
    assert failed["error"].endswith("shard: No space left on device")
    assert saved_steps(tmp_path)[0] == first[0] > 2
