"""Validation: the token-weighted loss of held-out batches over all ranks, the same for any data-parallel size."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..launcher.run.heartbeat import Phase
from .data.dataset import Batch
from .grid import Grid
from .model import Decoder
from .pulse import Pulse


def evaluate(model: Decoder, batches: Iterable[Batch], grid: Grid, pulse: Pulse) -> float:
    """Cross-entropy per counted target, nats; nan if no target counts.

    `batches` must yield equally many on every rank; those that only fill up have all targets ignored.
    Raises PeerLostError.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=grid.device)
    with torch.no_grad():
        for micro, batch in enumerate(batches):
            pulse.enter(Phase.EVAL, micro)
            sums = model(batch.to(grid.device))
            totals += torch.stack([sums.loss.double(), sums.tokens.double()])
    loss, tokens = grid.data.all_reduce(totals).tolist()
    return loss / tokens if tokens else float("nan")
