"""How a tensor is divided into slices, and which of them a box meets.

Owns: that search, and its answers: hundreds of tensors of a model are divided alike, and a rank's boxes in them are
alike too. Does not own: where the slices lie (index.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..box import Box
from .columns import Column

Meeting = tuple[Column, list[tuple[Box, Box]]]


@dataclass(frozen=True, eq=False)
class Regions:
    """One region per slice."""

    starts: Column  # [dims, slices]
    shapes: Column  # [dims, slices]
    _answers: dict[Box, Meeting] = field(default_factory=dict)

    @cached_property
    def ends(self) -> list[int]:
        """Of each dim, the element behind the last one of any slice. Raises ValueError: a slice is none."""
        ends = self.starts + self.shapes
        if (self.starts < 0).any() or (self.shapes < 0).any() or (ends < self.starts).any():
            raise ValueError("a slice of negative size or place")
        largest: list[int] = ends.max(axis=1, initial=0).tolist()
        return largest

    def meeting(self, box: Box) -> Meeting:
        """Numbers of the slices that have elements of `box`; of each, its region and what the two have in common."""
        answer = self._answers.get(box)
        if answer is None:
            answer = self._answers[box] = self._meeting(box)
        return answer

    def _meeting(self, box: Box) -> Meeting:
        if box.numel == 0:
            return np.zeros(0, np.int64), []
        low, size = (np.array(a, np.int64).reshape(-1, 1) for a in (box.start, box.shape))
        first = np.maximum(self.starts, low)
        count = np.minimum(self.starts + self.shapes, low + size) - first
        hit = np.flatnonzero((count > 0).all(axis=0))
        rows = zip(*(a[:, hit].T.tolist() for a in (self.starts, self.shapes, first, count)), strict=True)
        return hit, [(Box(tuple(start), tuple(shape)), Box(tuple(a), tuple(n))) for start, shape, a, n in rows]
