"""A box: where a local tensor lies in its logical (unsharded) tensor. The unit of checkpoints and resharding.

And a replica: which of those that hold the same box a rank is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """Half-open region `start[i] : start[i] + shape[i]` of a logical tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.start) == len(self.shape)

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def rows(self, first: int, count: int) -> Box:
        """The part of this box with `count` rows (dim 0) from its own row `first` on."""
        assert first >= 0
        assert first + count <= self.shape[0]
        return Box((self.start[0] + first, *self.start[1:]), (count, *self.shape[1:]))

    def intersect(self, other: Box) -> Box | None:
        """The common region, None if there is none."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(e - s for e, s in zip(ends, start, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor that holds `outer`."""
        return tuple(slice(a - o, a - o + n) for a, n, o in zip(self.start, self.shape, outer.start, strict=True))


@dataclass(frozen=True)
class Replica:
    """Number `index` of `count` ranks that hold the same box. `axes` names them: entries with equal axes have the same
    holders."""

    axes: tuple[str, ...] = ()
    index: int = 0
    count: int = 1


ALONE = Replica()
