"""The engine: forward and backward passes of one optimizer step, in which order and on which stages.

Owns: the interface that the trainer talks to, and the engine without a pipeline, which accumulates gradients over
micro-steps; that with one is pipeline_engine.py. Does not own: where gradients go (parallel/data.py), batches, or the
step around them (loop.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..launcher.run.heartbeat import Phase
from .comm import lost_peers
from .data.dataset import Batch
from .grid import Grid
from .linear import WeightGradients
from .metrics import Clock
from .model import Decoder, DropoutKey, Sums
from .pulse import Pulse

NextBatch = Callable[[], Batch]


class Engine(Protocol):
    """Sums are float64 tensors [loss in nats, counted targets]; over all ranks every target counts once.

    at_once: how many batches `evaluate` takes best. bubble: part of the last step's passes in which this rank waited
    for others of its pipeline; None without one, or where the host does not see it.
    """

    at_once: int
    bubble: float | None

    def forward_backward(
        self, next_batch: NextBatch, micro_steps: int, scale: float, dropout: DropoutKey | None
    ) -> Tensor:
        """All passes of one step; the sink gets the gradients of scale x objective. Raises PeerLostError."""

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Forward only, without dropout, all in one sum. Every rank is to call it with equally many. Raises
        PeerLostError."""


class Accumulation:
    """The whole model on this rank (and those it shares layers with): one micro-step after the other."""

    at_once = 1
    bubble: float | None = None

    def __init__(
        self,
        model: Decoder,
        queue: WeightGradients,
        grid: Grid,
        pulse: Pulse,
        clock: Clock,
    ) -> None:
        self._model, self._queue, self._grid = model, queue, grid
        self._pulse, self._clock = pulse, clock

    def forward_backward(
        self, next_batch: NextBatch, micro_steps: int, scale: float, dropout: DropoutKey | None
    ) -> Tensor:
        """See Engine."""
        pulse, clock = self._pulse, self._clock
        totals = torch.zeros(2, dtype=torch.float64, device=self._grid.device)
        for micro in range(micro_steps):
            pulse.enter(Phase.DATA, micro)
            with clock.measure("data"):
                batch = next_batch()
            pulse.enter(Phase.STEP, micro)
            with clock.measure("forward_backward"):
                with lost_peers():  # collectives of a compiled graph come to no Communicator
                    with clock.trace("forward"):
                        sums = self._model(batch, scale, dropout)
                    with clock.trace("backward"):
                        sums.objective.backward()
                        self._queue.drain()
                totals += counted([sums], self._grid)
        return totals

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """See Engine."""
        with lost_peers():
            sums = [self._model(batch) for batch in batches]
        return counted(sums, self._grid)


def counted(sums: Iterable[Sums], grid: Grid) -> Tensor:
    """Their totals as of Engine, [2]: ranks of the tensor axis see the same targets."""
    totals = torch.zeros(2, dtype=torch.float64, device=grid.device)
    for each in sums if grid.tensor.rank == 0 else ():
        totals += torch.stack([each.loss.double(), each.tokens.double()])
    return totals
