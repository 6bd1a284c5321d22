"""What goes into a forward pass and comes out of it, besides activations.

Shapes: B rows, S positions, T tokens of the residual stream that this rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .rotary import Rotation

if TYPE_CHECKING:
    from ..data.dataset import Batch

IGNORE = -100  # target that counts in no loss


class Sums(NamedTuple):
    """What a forward pass returns: sums over the batch's counted targets, never means."""

    objective: Tensor  # scalar, differentiable: scale x (cross-entropy + z-loss)
    loss: Tensor  # scalar, detached: cross-entropy in nats
    tokens: Tensor  # scalar int64: how many targets count


@dataclass(frozen=True)
class DropoutKey:
    """With the sample's number and the site, all that decides which features are dropped."""

    seed: int
    step: int


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Which row of the micro-batch each token of the stream is of, and whether it only fills up."""

    sequence_T: Tensor  # int64, number of the row
    is_real_T: Tensor | None  # bool, False where a token only fills up; None: all are real
    sequences: int  # rows of the micro-batch
    length: int  # tokens of a whole row, wherever they are


@dataclass(frozen=True)
class ForwardPass:
    """What every block of one forward pass shares."""

    batch: Batch
    rotations: Sequence[Rotation]  # per kind of layer, see rotary.py
    dropout: DropoutKey | None
    numbers_T: Tensor | None  # number of each token of the stream in the whole run, for dropout
    rows: TokenRows | None  # for mixtures of experts
    scale: float  # factor of the auxiliary terms, as of the loss
