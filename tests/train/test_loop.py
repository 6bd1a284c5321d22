"""The trainer on one rank: repeatable to the bit, across stops and restores, and honest about bad steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import digest, events, make_context, make_data, metrics, tiny_config, train
from stoker.conf.schema import DataSource, ParamDtype, QkNorm
from stoker.launcher.run.heartbeat import Control, Save, Segment
from stoker.launcher.run.layout import RunDir
from stoker.train.data.dataset import Batch
from stoker.train.errors import BadInputError, DivergedError, StorageError
from stoker.train.grid import single
from stoker.train.loop import Ended, Trainer
from stoker.train.model import DropoutKey, Sums, whole_model
from stoker.train.pulse import Pulse
from stoker.train.state.checkpointer import Checkpointer
from torch import nn

EVERYTHING = {
    "model": {"tied_embeddings": True, "qk_norm": QkNorm.head, "dropout": 0.1, "z_loss": 1e-4},
    "precision": {"params": ParamDtype.bfloat16},
    "data": {"mask_documents": True, "reset_positions": True},
}


def stopping_pulse(step: int, save: Save, generation: int = 1) -> Pulse:
    """The agent has committed a stop before it starts."""
    segment = Segment.create("test")
    segment.write_control(Control(generation, step, True, save))
    return Pulse(segment, generation)


def losses(run: Path, attempt: int = 1) -> list[float]:
    return [line["loss"] for line in metrics(run, attempt)]


def saved_steps(run: Path) -> list[int]:
    return sorted(name.step for name in RunDir(run).all_checkpoints())


# ---- determinism and resuming


def test_the_same_run_has_the_same_bits(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tiny_data, steps=8, **EVERYTHING)
    first, _ = train(tmp_path / "a", config)
    second, _ = train(tmp_path / "b", config)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert digest(first) == digest(second)
    other, _ = train(tmp_path / "c", replace(config, seed=8))
    assert digest(other) != digest(first)


def test_it_learns_and_every_step_has_a_line(tmp_path: Path, tiny_data: Path) -> None:
    _, ended = train(tmp_path, tiny_config(tiny_data, steps=30))
    lines = metrics(tmp_path)
    assert ended == Ended(finished=True, step=30, saved_step=30)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert [line["consumed_samples"] for line in lines] == list(range(8, 241, 8))
    assert {line["tokens"] for line in lines} == {8 * 32}
    assert lines[0]["loss"] == pytest.approx(4.16, abs=0.1)  # log(64)
    assert lines[-1]["loss"] < 2.0
    assert lines[0]["lr"] == 0.005
    assert lines[-1]["lr"] == 0.001


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_stopped_with_a_save_and_resumed_it_has_the_same_bits(
    tmp_path: Path, tiny_data: Path, options: dict[str, Any], stop: int
) -> None:
    config = tiny_config(tiny_data, steps=8, **options)
    whole, _ = train(tmp_path / "whole", config)
    run = tmp_path / "stopped"
    _, ended = train(run, config, pulse=stopping_pulse(stop, Save.BOTH))
    assert ended == Ended(finished=False, step=stop, saved_step=stop)
    resumed, ended = train(run, config, attempt=2)
    assert ended == Ended(finished=True, step=8, saved_step=8)
    assert losses(run) + losses(run, attempt=2) == losses(tmp_path / "whole")
    assert digest(resumed) == digest(whole)


def test_stopped_without_a_save_it_goes_back_to_the_last_checkpoint(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tiny_data, steps=8, checkpoint={"interval": 3})
    whole, _ = train(tmp_path / "whole", config)
    run = tmp_path / "stopped"
    _, ended = train(run, config, pulse=stopping_pulse(5, Save.UNDER_WAY))
    assert ended == Ended(finished=False, step=5, saved_step=3)
    resumed, _ = train(run, config, attempt=2)
    assert [line["step"] for line in metrics(run, 2)] == [4, 5, 6, 7, 8]
    assert losses(run, 2) == losses(tmp_path / "whole")[3:]
    assert digest(resumed) == digest(whole)


def test_resume_of_a_resume_in_a_later_epoch(tmp_path: Path) -> None:
    make_data(tmp_path / "short", tokens=2_300)  # 63 samples for training: epoch 1 begins in step 8
    config = tiny_config(tmp_path / "short", steps=20, data={"validation_tokens": 200})
    whole, _ = train(tmp_path / "whole", config)
    run = tmp_path / "stopped"
    train(run, config, pulse=stopping_pulse(9, Save.BOTH))
    train(run, config, attempt=2, pulse=stopping_pulse(13, Save.BOTH))
    resumed, _ = train(run, config, attempt=3)
    assert losses(run) + losses(run, 2) + losses(run, 3) == losses(tmp_path / "whole")
    assert digest(resumed) == digest(whole)


def test_a_finished_run_started_again_is_finished(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tiny_data, steps=3)
    first, _ = train(tmp_path, config)
    again, ended = train(tmp_path, config, attempt=2)
    assert ended == Ended(finished=True, step=3, saved_step=3)
    assert digest(again) == digest(first)
    assert saved_steps(tmp_path) == [3]


def test_checkpoints_are_made_at_the_interval_and_the_end_and_pruned(tmp_path: Path, tiny_data: Path) -> None:
    common = {"interval": 2, "asynchronous": False}
    train(tmp_path / "a", tiny_config(tiny_data, steps=7, checkpoint={**common, "keep": 2}))
    assert saved_steps(tmp_path / "a") == [6, 7]
    train(tmp_path / "b", tiny_config(tiny_data, steps=7, checkpoint={**common, "keep": 9, "at_end": False}))
    assert saved_steps(tmp_path / "b") == [2, 4, 6]


def test_a_second_trainer_in_the_same_process_goes_on(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tiny_data, steps=6)
    whole, _ = train(tmp_path / "whole", config)
    run = tmp_path / "run"
    train(run, config, pulse=stopping_pulse(3, Save.BOTH))
    resumed, ended = train(run, config, generation=2)  # the same attempt
    assert ended.finished
    assert digest(resumed) == digest(whole)
    assert [line["step"] for line in metrics(run, 1, generation=2)] == [4, 5, 6]
    assert not [t for t in threading.enumerate() if t.name == "stoker-data"]


# ---- sums


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_losses_do_not_depend_on_how_a_batch_is_cut(tmp_path: Path, tiny_data: Path, micro_batch: int) -> None:
    train(tmp_path / "a", tiny_config(tiny_data, steps=15))
    train(tmp_path / "b", tiny_config(tiny_data, steps=15, train={"micro_batch": micro_batch}))
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), abs=1e-5)
    assert {line["tokens"] for line in metrics(tmp_path / "b")} == {8 * 32}


def spy_on_updates(trainer: Trainer) -> list[tuple[int, float]]:
    """(number, norm of the gradient that was applied) of each update, as they come."""
    seen: list[tuple[int, float]] = []
    take = trainer.optimizer.step

    def spy(gradients: dict[str, torch.Tensor], rate: float, update: int, grad_scale: float) -> None:
        squares = sum(float(g.double().square().sum()) for g in gradients.values())
        seen.append((update, grad_scale * squares**0.5))
        take(gradients, rate, update, grad_scale)

    trainer.optimizer.step = spy  # type: ignore[method-assign]
    return seen


def mask_half(batch: Batch) -> Batch:
    targets = batch.targets.clone()
    targets[:, ::2] = -100
    return replace(batch, targets=targets)


@pytest.mark.parametrize("clip_norm", [0.0, 0.01])
def test_updates_use_the_mean_over_targets_that_count_and_clip_it(
    tmp_path: Path, tiny_data: Path, clip_norm: float
) -> None:
    config = tiny_config(tiny_data, steps=1, optim={"clip_norm": clip_norm})
    trainer = Trainer.build(config, single(), make_context(tmp_path))
    seen: list[Batch] = []
    trainer.model.register_forward_pre_hook(lambda _, args: (seen.append(mask_half(args[0])), (seen[-1], *args[1:]))[1])
    assert trainer.queue.weight_gradient is trainer.ops.weight_gradient
    plain = whole_model(config.model, trainer.ops)
    plain.load_state_dict(trainer.model.state_dict())
    updates = spy_on_updates(trainer)
    trainer.run()
    trainer.close()
    sum(plain(batch).objective / (4 * 32) for batch in seen).backward()  # 8 rows, of which half the targets count
    norm = float(torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm())
    assert metrics(tmp_path)[0]["tokens"] == 4 * 32
    assert metrics(tmp_path)[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert updates == [(1, pytest.approx(clip_norm or norm, rel=1e-4))]


def test_every_step_drops_other_features(tmp_path: Path, tiny_data: Path) -> None:
    trainer = Trainer.build(tiny_config(tiny_data, steps=3, model={"dropout": 0.1}), single(), make_context(tmp_path))
    keys: list[Any] = []
    trainer.model.register_forward_pre_hook(lambda _, args: keys.append(args[2]))
    trainer.run()
    trainer.close()
    assert keys == [DropoutKey(7, 0)] * 2 + [DropoutKey(7, 1)] * 2 + [DropoutKey(7, 2)] * 2


def test_validation_is_the_mean_over_held_out_tokens(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tiny_data, steps=4, train={"eval_interval": 2, "eval_batches": 3})
    train(tmp_path, config)
    found = {line["step"]: line["eval_loss"] for line in metrics(tmp_path) if "eval_loss" in line}
    assert list(found) == [2, 4]
    again = Trainer.build(config, single(), make_context(tmp_path, attempt=2))
    assert again.data is not None
    assert again.data.validation is not None
    sums = [again.model(batch) for batch in again.data.validation]
    again.close()
    assert sum(int(s.tokens) for s in sums) == 3 * 8 * 32
    assert found[4] == pytest.approx(sum(float(s.loss) for s in sums) / (3 * 8 * 32), rel=1e-6)
    assert [e["step"] for e in events(tmp_path) if e["event"] == "eval"] == [2, 4]


# ---- bad steps


def poison(trainer: Trainer, steps: set[int], module: nn.Module, what: Callable[[Any], Any]) -> None:
    """Change what a module returns in these steps (counted from 1)."""
    module.register_forward_hook(lambda _, __, out: what(out) if trainer.progress.step + 1 in steps else out)


def nan_loss(trainer: Trainer, steps: set[int]) -> None:
    poison(trainer, steps, trainer.model.blocks["1"].ffn, lambda out: out * float("nan"))


def infinite_gradient(trainer: Trainer, steps: set[int]) -> None:
    poison(trainer, steps, trainer.model, lambda s: Sums(s.objective * float("inf"), s.loss, s.tokens))


@pytest.mark.parametrize(
    ("poisoned", "reason", "loss_is_known"),
    [(nan_loss, "the loss is not finite", False), (infinite_gradient, "the gradient is not finite", True)],
)
def test_a_bad_step_changes_no_weight_and_is_never_saved(
    tmp_path: Path, tiny_data: Path, poisoned: Callable[[Trainer, set[int]], None], reason: str, loss_is_known: bool
) -> None:
    config = tiny_config(tiny_data, steps=6, checkpoint={"interval": 3})
    trainer = Trainer.build(config, single(), make_context(tmp_path))
    updates = spy_on_updates(trainer)
    poisoned(trainer, {3})
    for _ in range(2):
        trainer.step()
    before = digest(trainer)
    trainer.step()
    assert digest(trainer) == before
    assert (trainer.progress.step, trainer.progress.updates, trainer.progress.consumed_samples) == (3, 2, 24)
    assert saved_steps(tmp_path) == []
    assert [e for e in events(tmp_path) if e["event"] == "bad_step"] == [
        {"event": "bad_step", "step": 3, "reason": reason, "in_a_row": 1}
    ]
    assert events(tmp_path)[-1] == {"event": "checkpoint_skipped", "step": 3, "reason": "the step was bad"}
    assert (metrics(tmp_path)[2]["loss"] is not None) == loss_is_known
    assert metrics(tmp_path)[2]["grad_norm"] is None
    assert trainer.run() == Ended(finished=True, step=6, saved_step=6)
    trainer.close()
    assert digest(trainer) != before
    assert [number for number, _ in updates] == [1, 2, 3, 4, 5]  # what the bias correction goes by
    assert trainer.progress.bad_steps == 0


def test_five_bad_steps_in_a_row_end_the_run(tmp_path: Path, tiny_data: Path) -> None:
    trainer = Trainer.build(tiny_config(tiny_data, steps=20), single(), make_context(tmp_path))
    nan_loss(trainer, {2, 3, 4, 5, 8, 9, 10, 11, 12})
    with pytest.raises(DivergedError, match="step 12: the loss is not finite, for the 5th step in a row"):
        trainer.run()
    trainer.close()
    assert len(metrics(tmp_path)) == 12
    assert saved_steps(tmp_path) == []
    assert DivergedError.cause.value == "diverged"


def test_a_run_whose_last_step_is_bad_has_diverged(tmp_path: Path, tiny_data: Path) -> None:
    trainer = Trainer.build(tiny_config(tiny_data, steps=3), single(), make_context(tmp_path))
    nan_loss(trainer, {3})
    with pytest.raises(DivergedError, match="step 3 was bad"):
        trainer.run()
    trainer.close()


def test_a_step_without_targets_is_skipped(tmp_path: Path, tiny_data: Path) -> None:
    trainer = Trainer.build(tiny_config(tiny_data, steps=2), single(), make_context(tmp_path))
    poison(trainer, {1}, trainer.model, lambda s: Sums(s.objective * 0, s.loss * 0, s.tokens * 0))
    before = digest(trainer)
    trainer.step()
    trainer.close()
    assert digest(trainer) == before
    assert metrics(tmp_path)[0]["loss"] is None
    assert events(tmp_path)[-1]["reason"] == "no target counts in this batch"


# ---- failures of storage and input


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_a_save_that_fails_does_not_end_the_run_unless_it_is_the_last(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch, is_asynchronous: bool
) -> None:
    tried: list[int] = []
    begin, advance = Checkpointer.begin, Checkpointer.advance

    def begun(self: Checkpointer, step: int, *args: Any, **rest: Any) -> bool:
        tried.append(step)
        return begin(self, step, *args, **rest)

    def failing(self: Checkpointer, done: int, failed: int) -> Any:
        if self._save is not None and self._save.name.step in (2, 6):
            self._save.problem, failed = "no space left", 1
        return advance(self, done, failed)

    monkeypatch.setattr(Checkpointer, "begin", begun)
    monkeypatch.setattr(Checkpointer, "advance", failing)
    config = tiny_config(tiny_data, steps=6, checkpoint={"interval": 2, "asynchronous": is_asynchronous})
    with pytest.raises(StorageError, match=r"its last state is not saved: .*: no space left"):
        train(tmp_path, config)
    assert (tried[0], tried[-1]) == (2, 6)  # when the others began is a matter of speed, if they run beside the steps
    assert is_asynchronous or (tried, saved_steps(tmp_path)) == ([2, 4, 6, 6], [4])
    assert 6 not in saved_steps(tmp_path)
    assert len(metrics(tmp_path)) == 6


def test_data_that_changed_is_refused(tmp_path: Path) -> None:
    make_data(tmp_path / "x", seed=1)
    config = tiny_config(tmp_path / "x", steps=4)
    train(tmp_path / "run", config, pulse=stopping_pulse(2, Save.BOTH))
    make_data(tmp_path / "x", seed=2)
    with pytest.raises(BadInputError, match="the data is not what the checkpoint was trained on"):
        train(tmp_path / "run", config, attempt=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 9}, "seed = 9, but the checkpoint was made with seed 7"),
        ({"model": {"num_layers": 3}}, "does not fit this model"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, tiny_data: Path, change: dict[str, Any], message: str
) -> None:
    config = tiny_config(tiny_data, steps=4)
    train(tmp_path, config, pulse=stopping_pulse(2, Save.BOTH))
    seed = change.pop("seed", config.seed)
    with pytest.raises(BadInputError, match=message):
        train(tmp_path, replace(tiny_config(tiny_data, steps=4, **change), seed=seed), attempt=2)


def test_settings_that_changed_since_the_checkpoint_are_named(tmp_path: Path, tiny_data: Path) -> None:
    train(tmp_path, tiny_config(tiny_data, steps=4), pulse=stopping_pulse(2, Save.BOTH))
    train(tmp_path, tiny_config(tiny_data, steps=6, optim={"lr": 5e-3}), attempt=2)
    (event,) = [e for e in events(tmp_path, attempt=2) if e["event"] == "settings_changed"]
    assert event["changes"] == ["optim.lr: 0.01 -> 0.005", "train.steps: 4 -> 6"]


def test_token_ids_beyond_the_model_are_refused(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tiny_data, steps=2, model={"vocab_size": 50})
    with pytest.raises(BadInputError, match=r"outside model.vocab_size = 50"):
        train(tmp_path, config)
    assert BadInputError.cause.value == "bad_config"


def test_missing_data_and_bad_kernels_are_one_clear_message(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tiny_data)
    config.data = replace(config.data, sources=[DataSource(str(tmp_path / "nowhere"))])
    with pytest.raises(BadInputError, match="nowhere"):
        train(tmp_path / "a", config)
    with pytest.raises(
        BadInputError, match=r"kernels.default=referenc: unknown implementation, did you mean reference"
    ):
        train(tmp_path / "b", tiny_config(tiny_data, kernels={"default": "referenc"}))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_losses_on_a_gpu_are_those_of_the_cpu(tmp_path: Path, tiny_data: Path, options: dict[str, Any]) -> None:
    config = tiny_config(tiny_data, steps=8, **options)
    train(tmp_path / "cpu", config)
    trainer, _ = train(tmp_path / "gpu", config, single(torch.device("cuda", 0)))
    assert trainer.model.norm.is_cuda
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=5e-3)
    train(tmp_path / "again", config, single(torch.device("cuda", 0)))
    assert losses(tmp_path / "again") == losses(tmp_path / "gpu")


def test_importing_the_trainer_sets_no_global_switch_and_building_it_does(tmp_path: Path, tiny_data: Path) -> None:
    torch.set_deterministic_debug_mode("default")
    train(tmp_path / "a", tiny_config(tiny_data, steps=1))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    train(tmp_path / "b", tiny_config(tiny_data, steps=1, precision={"deterministic": False}))
    assert not torch.are_deterministic_algorithms_enabled()
