"""Tensor parallelism: the axis over which heads, feed-forward features and vocabulary are cut (Shoeybi et al. 2019).

Owns: what a layer must know of the axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..comm import Communicator


@dataclass(frozen=True)
class TensorAxis:
    """sequence: between the layers each rank holds only its part of the tokens (Korthikanti et al. 2022)."""

    comm: Communicator
    sequence: bool = False

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def cuts_tokens(self) -> bool:
        """Whether the residual stream is cut."""
        return self.sequence and self.comm.size > 1
