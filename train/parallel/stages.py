"""Pipeline stages: which layers a stage has.

Owns: the description of a stage. Does not own: running them (pipeline.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageSpec:
    """A slice of the model. The first stage has the embedding too, the last one norm, output projection and loss."""

    index: int
    layers: tuple[int, ...]
    is_first: bool
    is_last: bool


def whole(num_layers: int) -> StageSpec:
    """All of the model in one stage."""
    return StageSpec(0, tuple(range(num_layers)), True, True)
