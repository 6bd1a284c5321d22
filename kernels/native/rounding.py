"""Stochastic rounding by csrc/rounding.cu: the op's signature over the raw op. Import after `library.load`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..rounding import RoundingAddress, check_stochastic_round
from .library import fake, raw_without_gradient, refuse
from .multi_tensor import mutated

_stochastic_round = raw_without_gradient("stochastic_round")


def stochastic_round(targets: Sequence[Tensor], values: Sequence[Tensor], addresses: Sequence[RoundingAddress]) -> None:
    """See stoker.kernels.rounding; the same bits. Parts may be cut in at most three of their leading dimensions."""
    if not targets:
        return check_stochastic_round(targets, values, addresses)
    try:
        flat = flat_addresses(addresses, targets)
        _stochastic_round(targets, values, flat)
    except RuntimeError as error:
        refuse("stochastic_round", error, lambda: check_stochastic_round(targets, values, addresses))
    mutated(targets)


def flat_addresses(addresses: Sequence[RoundingAddress] | None, tensors: Sequence[Tensor]) -> list[int]:
    """What the raw ops take: seed as a signed number, step, site and the number of dimensions, starts, lengths.

    Raises RuntimeError where that loses something; the op's own check says what.
    """
    if addresses is None:
        return []
    if len(addresses) != len(tensors):
        raise RuntimeError("one address per tensor")
    flat = []
    for a in addresses:
        if not 0 <= a.seed < 1 << 64 or len(a.start) != len(a.shape):
            raise RuntimeError("a seed has 64 bits, a start as many numbers as the shape")
        flat += [a.seed - (a.seed >> 63 << 64), a.step, a.site, len(a.shape), *a.start, *a.shape]
    return flat


@fake("stochastic_round")
def _(targets: list[Tensor], values: list[Tensor], addresses: list[int]) -> None:
    return None
