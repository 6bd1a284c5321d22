"""Columns of whole numbers, kept as runs: a thousand equal shards take as much room in the index as one.

Owns: that coding, on plain values. Ranks hold slices of equal size at regular places, so that a column of an index is
a few arithmetic progressions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]
Runs = list[list[int]]  # [first, step, count] each


def to_runs(values: Column) -> Runs:
    """As few progressions as going from left to right gives."""
    steps = np.diff(values)
    changes = np.flatnonzero(np.diff(steps)) + 1  # where a step differs from the one before
    runs, i = [], 0
    while i < len(values):
        if i + 1 == len(values):
            runs.append([int(values[i]), 0, 1])
            break
        after = int(np.searchsorted(changes, i, "right"))
        last = int(changes[after]) if after < len(changes) else len(steps)
        runs.append([int(values[i]), int(steps[i]), last - i + 1])
        i = last + 1
    return runs


def from_runs(runs: Sequence[Sequence[int]], size: int) -> Column:
    """The column of `size` values.

    Raises:
        ValueError, TypeError: these runs are none, or have another number of values.
    """
    if sum(count for _, _, count in runs) != size or any(count < 1 for _, _, count in runs):
        raise ValueError(f"runs of other than {size} values")
    parts = [
        np.full(count, first, np.int64) if step == 0 else first + step * np.arange(count, dtype=np.int64)
        for first, step, count in runs
    ]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])
