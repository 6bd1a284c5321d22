"""Data parallelism: how weights, gradients and optimizer state lie over the ranks that read different samples.

Owns: the interface that the trainer talks to; its implementations are ddp.py, zero1.py, fsdp.py.

Gradients are sums over micro-steps and ranks, in linear.gradient_dtype. They are reduced first over the axis that
params.ParamFacts.reduce_over names, then over `partial_over`: whoever holds the same weight then has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ..box import Box, Replica
from ..linear import GradientSink


class DataParallel(Protocol):
    """One rank's share of the state, by parameter name. A rank without a part of a parameter has no entry for it."""

    @property
    def sink(self) -> GradientSink:
        """Where the backward pass puts weight gradients."""

    @property
    def shards(self) -> Mapping[str, Tensor]:
        """What the optimizer of this rank updates: a parameter, or rows of it. Detached; views where possible."""

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """Of the shards, same shapes; valid from `finish` to the next `begin_step`, and free to be overwritten."""

    def box(self, name: str) -> Box:
        """Where the shard lies in the whole parameter."""

    def replica(self, name: str) -> Replica:
        """Which of the ranks that hold the same shard this one is."""

    def begin_step(self, passes: int) -> None:
        """A new sum of gradients, of so many backward passes: each makes `uses` contributions to a parameter's gradient
        (params.ParamTable.uses). A pipeline mixes the contributions of several passes. Once the last one is in, a
        gradient may be reduced."""

    def finish(self) -> None:
        """Wait until `gradients` holds the sums. Raises PeerLostError."""

    def squared_norm(self) -> Tensor:
        """Sum of squares of this rank's gradients, float64 scalar; summed over all ranks every weight counts once."""

    def publish(self) -> None:
        """The shards have changed: bring them to all that compute with them, before the next forward pass at the
        latest. Raises PeerLostError."""

    def close(self) -> None:
        """Let go of the model."""
