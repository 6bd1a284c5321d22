"""Philox4x32-10, the counter-based generator behind dropout: random numbers as a pure function of their address.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), constants of its section 4.
"""

from __future__ import annotations

from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Counter = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Counter, key: tuple[int, int]) -> Counter:
    """Four 32-bit random words for each counter of four 32-bit words.

    counter: four int64 tensors of one shape with values 0 .. 2^32 - 1, word 0 first. key: two such numbers.
    Returns four int64 tensors of that shape with values 0 .. 2^32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 wraps modulo 2^64, so all 64 bits of the unsigned product are there; only the sign has to be masked off.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) & WORD) ^ c1 ^ k0, ((product0 >> 32) & WORD) ^ c3 ^ k1
        c1, c3 = product1 & WORD, product0 & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3
