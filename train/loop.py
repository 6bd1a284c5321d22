"""The trainer: what one optimizer step is, and what happens between steps.

Owns: the order of a step, the moment at which persistent state changes (`_commit`), what a checkpoint holds and when
one is made. Does not own: the model, the data's order, files, or what follows when a run ends or loses a rank.

Persistent state (weights, optimizer state, step, consumed samples) changes only after the last collective of a step,
so any two ranks are at most one step apart, and a peer lost before that leaves the state as it was. What has changed is
then brought to the ranks that compute with it (`publish`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import torch

from ..conf.schema import Config
from ..kernels import Ops, table
from ..launcher.run.heartbeat import Phase
from .assemble import (
    build_data_parallel,
    build_engine,
    build_optimizer,
    build_stages,
    join,
    param_dtype,
    stages_of,
    table_of,
)
from .comm import lost_peers
from .context import RunContext
from .data.build import DataSpec, TrainingData, build_data
from .data.dataset import Batch
from .device import memory_gib, set_determinism
from .errors import BadInputError, DivergedError, StorageError
from .evaluate import evaluate
from .flops import flops_per_token, peak_flops
from .grid import Grid
from .init import initialize
from .kernels import choose_ops
from .linear import WeightGradients
from .metrics import Clock, RoutingFigures, StepLog, StepMetrics, append
from .model import DropoutKey
from .parallel.context import cut_rows
from .parallel.stages import describe
from .profile import StepProfile
from .progress import Progress, Totals
from .routing import Routing
from .saving import Saving
from .schedule import LearningRate
from .state.entry import Entry

BAD_STEPS = 5  # so many in a row, and the run has diverged


@dataclass(frozen=True)
class Ended:
    """How `Trainer.run` came to its end: with all steps done, or at a stop step."""

    finished: bool
    step: int
    saved_step: int | None


class Trainer:
    """One rank's trainer in one generation. Build, run, close; then another may be built in the same process."""

    def __init__(self, config: Config, grid: Grid, context: RunContext, ops: Ops) -> None:
        """Use `build`."""
        self.config, self.grid, self.context, self.ops = config, grid, context, ops
        self.queue, self.clock = WeightGradients(weight_gradient=ops.weight_gradient), Clock()
        whole_table, specs = table_of(config, grid), stages_of(config, grid)
        self.table = whole_table.part(specs)
        stages = build_stages(config, grid, ops, self.queue, self.table, specs)
        self.model = join(stages)
        self.table.check(self.model, grid)
        initialize(self.model, self.table, grid, config.seed)
        self.data_parallel = build_data_parallel(config, grid, ops, self.table, self.model)
        self.queue.sink = self.data_parallel.sink
        self.optimizer = build_optimizer(config, grid, ops, self.table, self.data_parallel)
        self.routing = Routing(self.model, config.model, self.table, grid)
        self.engine = build_engine(config, grid, stages, self.queue, context.pulse, self.clock)
        self.schedule = LearningRate.of(config.optim, config.train.steps)
        self.progress = Progress()
        self.saving = Saving(config, grid, context, self.clock, self._snapshot)
        self.profile: StepProfile | None = None
        self.data: TrainingData | None = None
        self._is_first = True
        self._routing_figures: RoutingFigures | None = None
        self._log = StepLog(config.train.steps)
        # Gradients are sums; this constant only keeps them in a comfortable range. The exact token count comes later.
        self._scale = 1.0 / (config.train.global_batch * config.data.seq_len)
        self._numel = whole_table.numel
        self._flops = flops_per_token(config.model, whole_table, config.data.seq_len)
        peak = peak_flops(grid.device, param_dtype(config))
        self._peak = None if peak is None else peak * grid.world_size

    @classmethod
    def build(cls, config: Config, grid: Grid, context: RunContext) -> Trainer:
        """Build model, optimizer and data, and go on from the newest valid checkpoint, if there is one. Collective.

        Raises:
            BadInputError: settings, data or tokenizer do not fit together, or the data changed since the checkpoint.
            PeerLostError: another rank is gone.
        """
        try:
            set_determinism(config.precision.deterministic)
            trainer = cls(config, grid, context, choose_ops(config.kernels, grid, config.precision.params))
            trainer._restore_and_open()
            trainer.profile = StepProfile.of(config.profile, grid, context, trainer.progress.step)
            trainer._announce()
        except (ValueError, FileNotFoundError) as e:
            raise BadInputError(str(e)) from e
        return trainer

    def run(self) -> Ended:
        """Train to the last step, or to the stop step that the pulse names.

        Raises:
            PeerLostError: another rank is gone; the state is void, and the next pass restores.
            DivergedError: too many bad steps in a row.
            StorageError: the final checkpoint could not be saved. (Others are tried again at the next interval.)
            BadInputError: the data is damaged.
        """
        pulse, steps = self.context.pulse, self.config.train.steps
        while self.progress.step < steps:
            stop = pulse.boundary(self.progress.step)
            if stop is not None:
                self.saving.stop(self.progress.step, bool(self.progress.bad_steps), stop.save)
                return Ended(False, self.progress.step, self.saving.saved_step)
            self.step()
        if self.config.checkpoint.at_end:
            self._save_last()
        self.saving.finish()
        pulse.enter(Phase.DONE)
        return Ended(True, self.progress.step, self.saving.saved_step)

    def close(self) -> None:
        """End threads, close files. Safe after an error, and twice."""
        self.saving.close()
        self.queue.clear()
        self.data_parallel.close()
        if self.profile is not None:
            self.profile.close()
            self.profile = None
        if self.data is not None:
            self.data.close()
            self.data = None

    def entries(self) -> list[Entry]:
        """The tensors of the persistent state, as this rank holds them."""
        share, kinds = self.data_parallel, {"model": self.data_parallel.shards}
        kinds |= {f"optim/{kind}": tensors for kind, tensors in self.optimizer.state().items()}
        entries = [
            Entry(f"{kind}/{name}", tensor.detach(), self.table[name].shape, share.box(name), share.replica(name))
            for kind, tensors in kinds.items()
            for name, tensor in tensors.items()
        ]
        return [*entries, *self.routing.entries()]

    def _announce(self) -> None:
        """What this trainer is, on rank 0's log."""
        if self.grid.rank == 0:
            assert self.data is not None
            print(
                f"{self._numel:,} parameters in {param_dtype(self.config)}, {self.grid.data.size} data-parallel ranks, "
                f"{self.data.train.micro_steps} micro-steps per step, from step {self.progress.step}"
            )
            if self.grid.pipeline.size > 1:
                print(describe(self.config))
            print(table(self.ops.choices))

    # One step.

    def step(self) -> None:
        """One optimizer step, and what is due after it: validation, metrics, a checkpoint. Raises as `run`."""
        if self.profile is None:
            self._step()
            return
        self.profile.before(self.progress.step + 1, self.clock)
        self._step()
        if self.profile.after(self.progress.step, self.clock):
            self.profile = None

    def _step(self) -> None:
        assert self.data is not None
        began = time.perf_counter()
        dropout = DropoutKey(self.config.seed, self.progress.step) if self.config.model.dropout else None
        micro_steps = self.data.train.micro_steps
        self.data_parallel.begin_step(micro_steps)
        self.routing.begin_step()
        with lost_peers():  # collectives in compiled graphs have no other place where their errors are told
            totals = self.engine.forward_backward(self._next_batch, micro_steps, self._scale, dropout)
        with self.clock.measure("communication"):
            self.data_parallel.finish()
        with self.clock.measure("optimizer"):
            square, saves = self.data_parallel.squared_norm().reshape(1), self.saving.numbers()
            numbers = torch.cat([totals, square, saves, self.routing.sums()])
            self.grid.world.all_reduce(numbers)
            numbers = torch.cat([numbers[:6], self.routing.figures(numbers[6:])])
        # The one place in a step that waits for the device: whether to update is decided by these numbers. What a GPU
        # is still busy with then is the backward pass.
        with self.clock.measure("forward_backward"):
            loss, tokens, norm, done, failed, due, *routing = numbers.tolist()
        step_totals = Totals(loss, int(tokens), sqrt(norm) if norm >= 0 else norm)
        self.saving.settle()
        with self.clock.measure("optimizer"):
            rate = self.schedule.rate(self.progress.step + 1)
            self._commit(step_totals, rate)
            self.data_parallel.publish()
        self._routing_figures = RoutingFigures.of(routing, step_totals.tokens)
        self._after_step(step_totals, rate, time.perf_counter() - began)
        self.saving.boundary(self.progress.step, bool(self.progress.bad_steps), (done, failed, due))

    def _next_batch(self) -> Batch:
        assert self.data is not None
        try:
            return next(self.data.train).to(self.grid.device)
        except ValueError as e:
            raise BadInputError(str(e)) from e

    def _commit(self, totals: Totals, rate: float) -> None:
        """Change the persistent state; all collectives that this step still needs come before the first change."""
        progress = self.progress
        if totals.problem is None:
            exact = 1.0 / (self._scale * totals.tokens)
            norm = totals.grad_norm * exact
            limit = self.config.optim.clip_norm
            clip = min(1.0, limit / norm) if limit > 0 and norm > 0 else 1.0
            self.optimizer.step(self.data_parallel.gradients, rate, progress.updates + 1, exact * clip)
            self.routing.commit()
            progress.updates += 1
            progress.bad_steps = 0
        else:
            progress.bad_steps += 1
        progress.step += 1
        progress.consumed_samples += self.config.train.global_batch
        progress.consumed_tokens += totals.tokens

    # Between steps.

    def _after_step(self, totals: Totals, rate: float, seconds: float) -> None:
        progress, train = self.progress, self.config.train
        if self._is_first:
            self._report("first_step", step=progress.step)
            self.saving.prepare()
            self._is_first = False
        eval_loss = None
        if train.eval_interval and progress.step % train.eval_interval == 0:
            eval_loss = self._evaluate()
        if self.grid.rank == 0:
            self._write_metrics(totals, rate, seconds, eval_loss)
        if totals.problem is not None:
            self._bad_step(totals.problem)

    def _bad_step(self, problem: str) -> None:
        progress = self.progress
        self._report("bad_step", step=progress.step, reason=problem, in_a_row=progress.bad_steps)
        if progress.bad_steps >= BAD_STEPS:
            self.saving.finish()
            raise DivergedError(
                f"step {progress.step}: {problem}, for the {progress.bad_steps}th step in a row; the newest checkpoint "
                "is from before. Lower optim.lr, lengthen optim.warmup_steps, or look at the data of these steps"
            )

    def _evaluate(self) -> float | None:
        assert self.data is not None
        if self.data.validation is None:
            return None
        began = time.perf_counter()
        loss = evaluate(self.engine, self.data.validation, self.grid, self.context.pulse)
        seconds = round(time.perf_counter() - began, 3)
        self._report("eval", step=self.progress.step, loss=loss if isfinite(loss) else None, seconds=seconds)
        self.progress.validation = {"step": self.progress.step, "loss": loss} if isfinite(loss) else None
        return loss

    def _report(self, event: str, **fields: Any) -> None:
        """Once for all ranks."""
        if self.grid.rank == 0:
            self.context.report(event, **fields)

    def _write_metrics(self, totals: Totals, rate: float, seconds: float, eval_loss: float | None) -> None:
        mean = 1.0 / totals.tokens if totals.tokens else float("nan")
        speed = totals.tokens / seconds
        metrics = StepMetrics(
            step=self.progress.step,
            loss=totals.loss * mean,
            lr=rate,
            grad_norm=totals.grad_norm / self._scale * mean,
            tokens=totals.tokens,
            consumed_samples=self.progress.consumed_samples,
            step_seconds=seconds,
            mfu=None if self._peak is None else self._flops * speed / self._peak,
            memory_gib=memory_gib(self.grid.device),
            parts=self.clock.take(),
            eval_loss=eval_loss,
            bubble=self.engine.bubble,
            routing=self._routing_figures,
        )
        append(self.context.attempt.metrics(self.context.generation), metrics)
        self._log.step(metrics)

    # Checkpoints.

    def _snapshot(self) -> tuple[int, list[Entry], dict[str, Any]]:
        assert self.data is not None
        return self.progress.step, self.entries(), self.progress.to_state(self.config, self.data.fingerprints)

    def _save_last(self) -> None:
        is_bad = bool(self.progress.bad_steps)
        problem = self.saving.now(self.progress.step, is_bad, is_urgent=False)
        if problem is not None:
            kind = DivergedError if is_bad else StorageError
            raise kind(f"the run is done, but its last state is not saved: {problem}")

    def _restore_and_open(self) -> None:
        """Weights and progress from the newest checkpoint, then the data from where it stood."""
        restored = self.saving.checkpointer.restore(self.entries())
        fingerprints = None
        if restored is not None:
            self.data_parallel.publish()
            fingerprints = restored.manifest.state["data"]
            self.progress, changed = Progress.from_state(restored.manifest.state, self.config)
            self.saving.saved_step = self.progress.step
            if changed:
                self._report("settings_changed", step=self.progress.step, changes=changed)
        elif self.config.model.init_from is not None:
            self._load_initial(self.config.model.init_from)
        self.data = _open_data(self.config, self.grid, self.progress.consumed_samples, fingerprints)

    def _load_initial(self, chosen: str) -> None:
        from .initial import load_initial  # a run that goes on has no use for it

        loaded = load_initial(chosen, self.config.model, self.grid, self.entries())
        self.data_parallel.publish()
        self._report("initial_weights", source=chosen, differences=list(loaded.notes))


def _open_data(config: Config, grid: Grid, consumed_samples: int, fingerprints: Any) -> TrainingData:
    data, train = config.data, config.train
    has_eval = train.eval_interval > 0
    return build_data(
        [DataSpec(s.prefix, s.weight, s.name) for s in data.sources],
        sequence_length=data.seq_len,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        seed=config.seed,
        dp_rank=grid.data.rank,
        dp_size=grid.data.size,
        consumed_samples=consumed_samples,
        vocab_size=config.model.vocab_size,
        tokenizer=None if data.tokenizer is None else Path(data.tokenizer),
        validation_tokens=data.validation_tokens,
        validation_samples=train.eval_batches * train.global_batch if has_eval else None,
        mask_documents=data.mask_documents,
        reset_positions=data.reset_positions,
        shuffle_block=data.shuffle_block,
        prefetch=data.prefetch,
        stored_fingerprints=fingerprints,
        cut=partial(cut_rows, method=config.parallel.context_method, rank=grid.context.rank, size=grid.context.size),
    )
