"""Which window of which data set is sample i: closed formulas, no index files, no state but a number.

Owns keyed permutations, the order of windows over epochs, and the mixing of data sets. It opens no file. All is pure,
a function of seed and sample number: resumed anywhere, on any number of ranks, a run goes on with its next sample.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

_ROUNDS = 6
_MASK = (1 << 64) - 1
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SCALAR_BELOW = 12  # this few numbers are permuted faster by plain Python integers than by numpy
_WEIGHT_UNIT = 1 << 30
_MAX_BLEND_BLOCK = 1 << 20


def derive_keys(*parts: str | int) -> tuple[int, ...]:
    """Round keys (64 bit) that depend on every part, by BLAKE2b over their JSON; part order and type matter."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(_ROUNDS))


@dataclass(frozen=True)
class Permutation:
    """A keyed permutation of [0, size), evaluated at single points; size up to 2^62.

    A generalised Feistel network on [0, a) x [0, b) with a = ceil(sqrt(size)), b = ceil(size / a): each round adds a
    hash of one half to the other half, modulo its range. Values outside [0, size), fewer than a of a * b, are walked on
    along their cycle until they fall inside (Black and Rogaway 2002). The hash is SplitMix64's finaliser: well mixed,
    not cryptographic.
    """

    size: int
    keys: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 1 << 62:
            raise ValueError(f"cannot permute {self.size} items, expected 1 to 2^62")
        assert len(self.keys) == _ROUNDS

    @functools.cached_property
    def _sides(self) -> tuple[int, int]:
        a = math.isqrt(self.size - 1) + 1
        return a, -(-self.size // a)

    def at(self, i: int) -> int:
        """Where item i goes. Raises ValueError outside [0, size)."""
        if not 0 <= i < self.size:
            raise ValueError(f"item {i} of a permutation of {self.size}")
        a, b = self._sides
        while True:
            left, right = divmod(i, b)
            for r in range(0, _ROUNDS, 2):
                left = (left + _scaled_hash(right, self.keys[r], a)) % a
                right = (right + _scaled_hash(left, self.keys[r + 1], b)) % b
            i = left * b + right
            if i < self.size:
                return i

    def take(self, items: Int64s) -> Int64s:
        """The same for an int64 array [n]."""
        if len(items) < _SCALAR_BELOW:
            return np.array([self.at(i) for i in items.tolist()], np.int64)
        if items.min() < 0 or items.max() >= self.size:
            raise ValueError(f"items {items.min()} to {items.max()} of a permutation of {self.size}")
        out = self._pass(items.astype(np.uint64))
        while (outside := np.flatnonzero(out >= self.size)).size:
            out[outside] = self._pass(out[outside])
        return out.astype(np.int64)

    def _pass(self, items: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        a, b = (np.uint64(side) for side in self._sides)
        left = items // b
        right = items - left * b
        for r in range(0, _ROUNDS, 2):
            left += _scaled_hashes(right, self.keys[r], a)
            left -= a * (left >= a)
            right += _scaled_hashes(left, self.keys[r + 1], b)
            right -= b * (right >= b)
        return left * b + right


def _scaled_hash(value: int, key: int, limit: int) -> int:
    """A number in [0, limit) that depends on value and key; limit below 2^32."""
    z = (value + key) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return (((z ^ (z >> 31)) >> 32) * limit) >> 32


def _scaled_hashes(values: npt.NDArray[np.uint64], key: int, limit: np.uint64) -> npt.NDArray[np.uint64]:
    z = values + np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    z >>= np.uint64(32)
    z *= limit
    z >>= np.uint64(32)
    return z


def window_count(tokens: int, sequence_length: int) -> int:
    """Windows of sequence_length + 1 tokens in a stream of tokens, each starting sequence_length after the last."""
    return max(0, (tokens - 1) // sequence_length)


@dataclass(frozen=True)
class WindowOrder:
    """The endless order in which a data set's windows are visited: every window once per epoch, each epoch differently.

    With run > 1, runs of that many neighbouring windows stay together (one large read each); the windows left over at
    the end of the data set, fewer than run, then come last in their epoch.
    """

    windows: int
    seed: int
    name: str
    run: int = 1

    def __post_init__(self) -> None:
        if self.windows < 1 or not 1 <= self.run <= self.windows:
            raise ValueError(
                f"data set {self.name!r}: {self.windows} windows in runs of {self.run}: expected 1 <= run <= windows"
            )

    def take(self, samples: Int64s) -> Int64s:
        """Window numbers int64 [n] of sample numbers int64 [n] >= 0 (counted over all epochs)."""
        epochs, within = np.divmod(samples, self.windows)
        out = np.empty_like(within)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            out[chosen] = self._take_within(epoch, within[chosen])
        return out

    def _take_within(self, epoch: int, within: Int64s) -> Int64s:
        order = _epoch_order(self.windows // self.run, self.seed, epoch, self.name)
        if self.run == 1:
            return order.take(within)
        runs, offsets = np.divmod(within, self.run)
        full = runs < order.size
        out = within.copy()
        out[full] = order.take(runs[full]) * self.run + offsets[full]
        return out


@functools.lru_cache(maxsize=256)
def _epoch_order(size: int, seed: int, epoch: int, name: str) -> Permutation:
    return Permutation(size, derive_keys("windows", seed, epoch, name))


@dataclass(frozen=True)
class Blend:
    """The endless mixture of several data sets in given proportions.

    Samples come in blocks of B. Before block k, set j has given floor(w_j k B) samples, plus one for those with the
    largest remainders so that the sum is exactly k B; within a block a keyed permutation mixes them. Each gives its own
    samples in their order 0, 1, 2, ..., so that at any point none is repeated and none is left out.
    """

    units: tuple[int, ...]  # weights in units of 2^-30, summing to 2^30
    block: int
    seed: int

    @classmethod
    def of(cls, weights: Sequence[float], seed: int) -> Blend:
        """From weights of any scale. Raises ValueError for one not positive, or less than a millionth of all."""
        for j, weight in enumerate(weights):
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(
                    f"data.sources[{j}].weight = {weight}: expected a positive number (leave the data set out instead)"
                )
        total = math.fsum(weights)
        exact = [weight / total * _WEIGHT_UNIT for weight in weights]
        units = _largest_remainder([int(x) for x in exact], [x - int(x) for x in exact], _WEIGHT_UNIT)
        block = 1024
        while min(units) * block < _WEIGHT_UNIT:  # every data set in every block, or its count could go backwards
            block *= 2
            if block > _MAX_BLEND_BLOCK:
                j = units.index(min(units))
                raise ValueError(f"data.sources[{j}].weight = {weights[j]}: less than a millionth of the sum {total}")
        return cls(tuple(units), block, seed)

    def given_before(self, block: int) -> list[int]:
        """How many samples of each data set lie before this block; they sum to block * self.block."""
        scaled = [unit * block * self.block for unit in self.units]
        return _largest_remainder(
            [x // _WEIGHT_UNIT for x in scaled], [x % _WEIGHT_UNIT for x in scaled], block * self.block
        )

    def take(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """For sample numbers int64 [n]: data set int64 [n], and sample number within that data set int64 [n]."""
        blocks, within = np.divmod(samples, self.block)
        source, local = np.empty_like(within), np.empty_like(within)
        for k in np.unique(blocks).tolist():
            chosen = blocks == k
            sources, locals_ = _blend_block(self, k)
            source[chosen], local[chosen] = sources[within[chosen]], locals_[within[chosen]]
        return source, local


@functools.lru_cache(maxsize=2)
def _blend_block(blend: Blend, k: int) -> tuple[Int64s, Int64s]:
    """Data set and its sample number for all samples of block k, each int64 [block]: 1,024, with tiny weights 2^20."""
    before, after = np.array(blend.given_before(k)), np.array(blend.given_before(k + 1))
    place = Permutation(blend.block, derive_keys("blend", blend.seed, k)).take(np.arange(blend.block))
    source = np.searchsorted(np.cumsum(after - before), place, side="right")
    local = np.empty_like(source)
    for j, first in enumerate(before.tolist()):
        own = np.flatnonzero(source == j)
        local[own] = first + np.arange(len(own))
    return source, local


def _largest_remainder(floors: Sequence[int], remainders: Sequence[float], total: int) -> list[int]:
    """Floors, with one added to those of the largest remainders (the first of equals) so that they sum to total."""
    out = list(floors)
    for j in sorted(range(len(out)), key=lambda j: (-remainders[j], j))[: total - sum(out)]:
        out[j] += 1
    assert sum(out) == total
    return out
