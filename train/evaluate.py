"""Validation: the token-weighted loss of held-out batches over all ranks, the same for any layout."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

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
    coming, micro = iter(batches), 0
    with torch.no_grad():
        while some := [batch.to(grid.device) for batch in islice(coming, engine.at_once)]:
            pulse.enter(Phase.EVAL, micro)
            totals += engine.evaluate(some)
            micro += len(some)
    loss, tokens = grid.world.all_reduce(totals).tolist()
    return loss / tokens if tokens else float("nan")
