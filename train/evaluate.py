"""Validation: the token-weighted loss of held-out batches over all ranks, the same for any layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..launcher.run.heartbeat import Phase
from .data.dataset import Batch
from .engine import Engine
from .grid import Grid
from .pulse import Pulse


def evaluate(engine: Engine, batches: Iterable[Batch], grid: Grid, pulse: Pulse) -> float:
    """Cross-entropy per counted target, nats; nan if no target counts.

    `batches` must yield equally many on every rank; those that only fill up have all targets ignored.
    Raises PeerLostError.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=grid.device)
    with torch.no_grad():
        for micro, batch in enumerate(batches):
            pulse.enter(Phase.EVAL, micro)
            totals += engine.evaluate(batch.to(grid.device))
    loss, tokens = grid.world.all_reduce(totals).tolist()
    return loss / tokens if tokens else float("nan")
