"""The bare loop of bare.py."""

from __future__ import annotations

import numpy as np
from bare import BareLoop, initial_weights
from clock import BATCH, Clock, tokens


def batches(rows: np.ndarray):
    while True:
        yield from np.split(rows, len(rows) // BATCH)


clock = Clock()
clock.watch()
data = batches(tokens().numpy())
loop = BareLoop(initial_weights(), lambda: next(data))
while True:
    loop.step()
