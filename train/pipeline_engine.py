"""The engine with a pipeline: a step's micro-batches through stages that lie on several ranks.

Owns: handing batches to the schedule, sums of the last stage, and what heartbeat and metrics are told. Does not own:
the schedule (parallel/pipeline.py), the stages' mathematics (model/).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..conf.pipeline import micro_steps_problem, stages_per_rank
from ..conf.schema import Config
from ..launcher.run.heartbeat import Phase
from .data.dataset import Batch
from .data.loader import Share
from .engine import NextBatch, counted
from .grid import Grid
from .linear import WeightGradients
from .metrics import Clock
from .model import Decoder, DropoutKey, Sums
from .parallel.pipeline import Activation, LocalStage, Pipeline
from .plan.schedule import Durations, order_of, simulate
from .pulse import Pulse


class Pipelined:
    """An Engine (engine.py)."""

    def __init__(
        self,
        config: Config,
        grid: Grid,
        stages: Sequence[Decoder],
        queue: WeightGradients,
        dtype: torch.dtype,
        pulse: Pulse,
        clock: Clock,
    ) -> None:
        """Raises ValueError: the number of micro-batches does not go with the schedule."""
        parallel, train = config.parallel, config.train
        chunks = stages_per_rank(parallel)
        self._grid, self._pulse, self._clock = grid, pulse, clock
        self._micro_steps = Share(train.global_batch, train.micro_batch, grid.data.rank, grid.data.size).micro_steps
        # Enough to keep all stages at work for most of the time; their activations are held at once.
        self.at_once = min(self._micro_steps, 4 * grid.pipeline.size)
        problem = micro_steps_problem(parallel.pipeline_schedule, grid.pipeline.size, chunks, self._micro_steps)
        if problem is not None:
            raise ValueError(
                f"parallel.pipeline_schedule={parallel.pipeline_schedule}: a step has {self._micro_steps} "
                f"micro-batches per rank, and {problem}"
            )
        self._scale = 1.0
        self._dropout: DropoutKey | None = None
        self._numbers = _numbers(parallel.pipeline_schedule, grid.pipeline.size, chunks, self._micro_steps)
        self._pipeline: Pipeline[Batch, Sums] = Pipeline(
            parallel.pipeline_schedule,
            [LocalStage(stage.stage, stage, self._runner(stage), queue) for stage in stages],
            grid.pipeline.size * chunks,
            self._micro_steps,
            Activation((_tokens(config, grid), config.model.hidden_size), dtype),
            grid.pipeline,
            self._before,
        )
        self.bubble: float | None = None

    def forward_backward(
        self, next_batch: NextBatch, micro_steps: int, scale: float, dropout: DropoutKey | None
    ) -> Tensor:
        """See Engine."""
        assert micro_steps == self._micro_steps, f"{micro_steps} micro-steps in a pipeline for {self._micro_steps}"
        batches = []
        for micro in range(micro_steps):
            self._pulse.enter(Phase.DATA, micro)
            with self._clock.measure("data"):
                batches.append(next_batch())
        self._scale, self._dropout = scale, dropout
        with self._clock.measure("forward_backward"):
            began = time.perf_counter()
            results = self._pipeline.forward_backward(batches)
            if self._grid.device.type == "cpu":  # elsewhere the host only hands out work
                self.bubble = 1.0 - self._pipeline.busy_seconds / (time.perf_counter() - began)
            self._pulse.reach(_STRIDE * len(self._numbers))
            return counted(results, self._grid)

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """See Engine."""
        self._scale, self._dropout = 1.0, None
        return counted(self._pipeline.forward(batches), self._grid)

    def _runner(self, stage: Decoder) -> Callable[[Tensor | None, Batch], Tensor | Sums]:
        def run(x_TD: Tensor | None, batch: Batch) -> Tensor | Sums:
            return stage(batch, self._scale, self._dropout, x_TD)

        return run

    def _before(self, kind: str, stage: int, micro: int) -> None:
        self._pulse.enter(Phase.STEP, micro)
        self._pulse.reach(_STRIDE * self._numbers[f"{stage}{kind}{micro}"])


_STRIDE = 1 << 16  # more than the collectives within one forward or backward pass of a stage


def _numbers(schedule: str, pipeline: int, chunks: int, micro_steps: int) -> dict[str, int]:
    """A number for each piece of work of the step, on all ranks the same, larger than those of whatever it waits for:
    in a hang the rank with the smallest is the one for which all others wait, directly or not."""
    timeline = simulate(order_of(schedule, pipeline, chunks, micro_steps), Durations.even(pipeline * chunks))
    spans = sorted((span.start, str(span.action)) for spans in timeline.ranks for span in spans)
    return {action: number for number, (_, action) in enumerate(spans)}


def _tokens(config: Config, grid: Grid) -> int:
    """Of a micro-batch in the residual stream, on this rank."""
    tokens = config.train.micro_batch * config.data.seq_len // grid.context.size
    return tokens // grid.tensor.size if config.parallel.sequence else tokens
