"""Stochastic rounding of float32 to bfloat16, whose random bits depend on global element addresses only.

A value between two neighbours becomes the upper one with a probability equal to its place between them, so that sums
of many small updates come out right on average where rounding to the nearest would lose each of them. The generator is
in philox.py; which parameter has which address is the optimizer's concern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .philox import WORD, philox4x32

_SITES = 1 << 31  # dropout's sites lie below, so that the two never draw the same words
_PER_COUNTER = 8  # 16-bit words from one call of the generator
_CHUNK = 1 << 18  # elements whose words exist at once


@dataclass(frozen=True)
class RoundingAddress:
    """Whose bits: tensor `site` of the run in update `step`, and the place `start` of the local part in its `shape`.

    seed: 0 .. 2^64 - 1. step: 0 .. 2^32 - 1. site: 0 .. 2^31 - 1, one per parameter.
    """

    seed: int
    step: int
    site: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


class StochasticRound(Protocol):
    """The signature of `stochastic_round`, see there."""

    def __call__(
        self, targets: Sequence[Tensor], values: Sequence[Tensor], addresses: Sequence[RoundingAddress]
    ) -> None: ...


def stochastic_round(targets: Sequence[Tensor], values: Sequence[Tensor], addresses: Sequence[RoundingAddress]) -> None:
    """Each target = its value, rounded up or down in magnitude at random; the mean is value. Not differentiable.

    targets: bfloat16, values: float32, pairs of one shape of at least one dimension, any strides. The local element in
    global row r (all leading dimensions taken together) and column c of C gets word c % 8 of the eight 16-bit words of
    Philox's counter (r * ceil(C / 8) + c // 8 as low and high word, step, site + 2^31); it is added to value's bits,
    whose low half is then cut off. Infinity and NaN stay. Raises ValueError on dtypes, shapes and numbers out of range.
    """
    check_stochastic_round(targets, values, addresses)
    for target, value, address in zip(targets, values, addresses, strict=True):
        if value.numel() > 0:
            _round(target, value, address)


def _round(target: Tensor, value: Tensor, address: RoundingAddress) -> None:
    width = value.shape[-1]
    flat_value, rows = value.reshape(-1, width), _rows(value, address)
    rounded = torch.empty_like(flat_value, dtype=target.dtype)
    per_chunk = max(1, _CHUNK // width)
    for first in range(0, rows.numel(), per_chunk):
        chunk = slice(first, first + per_chunk)
        part = flat_value[chunk].contiguous()
        bits = (part.view(torch.int32) + _words(rows[chunk], width, address)) & ~0xFFFF
        # The sum may run over the exponent's end only where there is no number anyway.
        rounded[chunk] = torch.where(part.isfinite(), bits.view(torch.float32), part).to(target.dtype)
    target.copy_(rounded.view(value.shape))


def _rows(value: Tensor, address: RoundingAddress) -> Tensor:
    """Global number of each local row, int64."""
    rows = torch.zeros(1, dtype=torch.int64, device=value.device)
    for length, start, whole in zip(value.shape[:-1], address.start, address.shape, strict=False):
        own = torch.arange(start, start + length, device=value.device)
        rows = (rows.unsqueeze(1) * whole + own).reshape(-1)
    return rows


def _words(rows: Tensor, width: int, address: RoundingAddress) -> Tensor:
    """[rows, width] int32 with values 0 .. 2^16 - 1."""
    start, total = address.start[-1], address.shape[-1]
    first, last = start // _PER_COUNTER, -(-(start + width) // _PER_COUNTER)
    index = rows.unsqueeze(1) * -(-total // _PER_COUNTER) + torch.arange(first, last, device=rows.device)
    step, site = torch.full_like(index, address.step), torch.full_like(index, address.site + _SITES)
    counter = (index & WORD, (index >> 32) & WORD, step, site)
    words = torch.stack(philox4x32(counter, (address.seed & WORD, address.seed >> 32)), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(1)
    skip = start - _PER_COUNTER * first
    return halves[:, skip : skip + width].to(torch.int32)


def check_stochastic_round(
    targets: Sequence[Tensor], values: Sequence[Tensor], addresses: Sequence[RoundingAddress]
) -> None:
    """Raises ValueError, see `stochastic_round`."""
    if not len(targets) == len(values) == len(addresses):
        raise ValueError(
            f"stochastic rounding: {len(values)} values and {len(addresses)} addresses for {len(targets)} targets"
        )
    for target, value, address in zip(targets, values, addresses, strict=True):
        _check(target, value, address)


def _check(target: Tensor, value: Tensor, address: RoundingAddress) -> None:
    if target.dtype != torch.bfloat16 or value.dtype != torch.float32 or target.shape != value.shape or not value.dim():
        raise ValueError(
            f"stochastic rounding: {value.dtype} {tuple(value.shape)} to {target.dtype} {tuple(target.shape)}; "
            "expected float32 to bfloat16, of one shape of at least one dimension"
        )
    for name, number, bits in (("seed", address.seed, 64), ("step", address.step, 32), ("site", address.site, 31)):
        if not 0 <= number < 1 << bits:
            raise ValueError(f"stochastic rounding: {name}={number}, expected 0 to 2^{bits} - 1")
    lies_within = len(address.start) == len(address.shape) == value.dim() and all(
        0 <= start <= whole - length
        for start, length, whole in zip(address.start, value.shape, address.shape, strict=True)
    )
    if not lies_within:
        raise ValueError(
            f"stochastic rounding: {tuple(value.shape)} at {address.start} does not lie in {address.shape}"
        )
