"""Columns of whole numbers become short runs, and come back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stoker.train.state.columns import from_runs, to_runs


@pytest.mark.parametrize(
    ("values", "runs"),
    [
        ([], []),
        ([7], [[7, 0, 1]]),
        ([7, 7, 7], [[7, 0, 3]]),
        ([0, 8, 16, 24], [[0, 8, 4]]),
        ([0, 8, 16, 0, 8, 16], [[0, 8, 3], [0, 8, 3]]),
        ([5, 9, 9, 9], [[5, 4, 2], [9, 0, 2]]),
        ([3, 2, 1], [[3, -1, 3]]),
    ],
)
def test_progressions_are_runs(values: list[int], runs: list[list[int]]) -> None:
    assert to_runs(np.array(values, np.int64)) == runs
    assert from_runs(runs, len(values)).tolist() == values


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3) | st.integers(-(2**40), 2**40)))
def test_any_column_comes_back(values: list[int]) -> None:
    runs = to_runs(np.array(values, np.int64))
    assert from_runs(runs, len(values)).tolist() == values


@pytest.mark.parametrize("runs", [[[0, 1, 2]], [[0, 1, 4], [0, 1, -1]], [[0, 1]], 3, [[0, 1, "x"]]])
def test_what_is_no_column_of_that_size_is_refused(runs: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        from_runs(runs, 3)
