"""The engine: forward and backward passes of one optimizer step, in which order and on which stages.

Owns: the interface that the trainer talks to, and the engine without a pipeline, which accumulates gradients over
micro-steps. Does not own: where gradients go (parallel/data.py), batches, or the step around them (loop.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..launcher.run.heartbeat import Phase
from .data.dataset import Batch
from .grid import Grid
from .linear import WeightGradients
from .metrics import Clock
from .model import Decoder, DropoutKey, Sums
from .parallel.data import DataParallel
from .pulse import Pulse

NextBatch = Callable[[], Batch]


class Engine(Protocol):
    """Sums are float64 tensors [loss in nats, counted targets]; over all ranks every target counts once."""

    def forward_backward(
        self, next_batch: NextBatch, micro_steps: int, scale: float, dropout: DropoutKey | None
    ) -> Tensor:
        """All passes of one step; the sink gets the gradients of scale x objective. Raises PeerLostError."""

    def evaluate(self, batch: Batch) -> Tensor:
        """Forward only, without dropout. Every rank is to call it equally often. Raises PeerLostError."""


class Accumulation:
    """The whole model on this rank (and those it shares layers with): one micro-step after the other."""

    def __init__(
        self,
        model: Decoder,
        queue: WeightGradients,
        data_parallel: DataParallel,
        grid: Grid,
        pulse: Pulse,
        clock: Clock,
    ) -> None:
        self._model, self._queue, self._data_parallel = model, queue, data_parallel
        self._pulse, self._clock, self._device = pulse, clock, grid.device
        # Ranks of the tensor axis see the same targets.
        self._counts = grid.tensor.rank == 0

    def forward_backward(
        self, next_batch: NextBatch, micro_steps: int, scale: float, dropout: DropoutKey | None
    ) -> Tensor:
        """See Engine."""
        pulse, clock = self._pulse, self._clock
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        for micro in range(micro_steps):
            pulse.enter(Phase.DATA, micro)
            with clock.measure("data"):
                batch = next_batch()
            pulse.enter(Phase.STEP, micro)
            with clock.measure("forward_backward"):
                self._data_parallel.begin_micro_step(is_last=micro == micro_steps - 1)
                with clock.trace("forward"):
                    sums = self._model(batch, scale, dropout)
                with clock.trace("backward"):
                    sums.objective.backward()
                    self._queue.drain()
                totals += self._counted(sums)
        return totals

    def evaluate(self, batch: Batch) -> Tensor:
        """See Engine."""
        return self._counted(self._model(batch))

    def _counted(self, sums: Sums) -> Tensor:
        totals = torch.stack([sums.loss.double(), sums.tokens.double()])
        return totals if self._counts else torch.zeros_like(totals)
