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
        ValueError, TypeError, OverflowError: these runs are none, or have another number of values.
    """
    if len(runs) == 1:  # most are
        [[begin, by, count]] = runs
        if count == size and type(begin) is type(by) is int:
            return np.arange(size, dtype=np.int64) * by + begin
    return from_columns(np.array(runs, np.int64), size)


def from_columns(runs: Column, size: int) -> Column:
    """The same of runs that are numbers already, in any shape. Raises ValueError."""
    first, step, counts = runs.reshape(-1, 3).T
    if (counts < 1).any() or (counts > size).any() or counts.sum() != size:  # that sum does not overflow
        raise ValueError(f"runs of other than {size} values")
    place = np.arange(size, dtype=np.int64) - np.repeat(counts.cumsum() - counts, counts)  # within its run
    return np.repeat(first, counts) + np.repeat(step, counts) * place
