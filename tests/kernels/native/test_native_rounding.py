"""csrc/rounding.cu on the CPU: the bits of kernels/rounding.py."""

import math

import pytest
import torch
from stoker.kernels import RoundingAddress
from stoker.kernels.reference import stochastic_round as reference
from torch.library import opcheck


@pytest.fixture
def stochastic_round(emulated):
    from stoker.kernels.native.rounding import stochastic_round

    return stochastic_round


def address(shape, start=None, seed=3, step=1, site=5):
    return RoundingAddress(seed, step, site, start or (0,) * len(shape), tuple(shape))


def both(function, values, addresses):
    ours, theirs = ([torch.empty_like(v, dtype=torch.bfloat16) for v in values] for _ in range(2))
    function(ours, values, addresses)
    reference(theirs, values, addresses)
    return ours, theirs


CUTS = [  # whole, start, local
    ((4096,), (0,), (4096,)),
    ((4097,), (13,), (1003,)),  # a row that begins within a group
    ((40, 64), (0, 0), (40, 64)),
    ((9, 33), (2, 0), (7, 33)),  # rows shorter than whole groups
    ((9, 64), (2, 16), (5, 24)),  # columns cut at a group
    ((9, 64), (2, 12), (5, 20)),  # at half a group
    ((5, 6, 19), (1, 2, 3), (3, 3, 12)),
    ((5, 6, 3, 8), (1, 2, 1, 0), (3, 3, 2, 8)),
    ((3, 4, 2, 5, 16), (1, 2, 0, 1, 0), (2, 2, 2, 3, 16)),  # a whole dimension among cut ones
    ((1000, 1), (7, 0), (90, 1)),
    ((2, 8), (1, 0), (0, 8)),
]


def test_the_bits_of_the_reference_for_every_cut(stochastic_round):
    values = [torch.randn(local) for _, _, local in CUTS]
    places = [address(whole, start, seed=2**64 - 1 - i, site=i) for i, (whole, start, _) in enumerate(CUTS)]
    ours, theirs = both(stochastic_round, values, places)
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), CUTS[k]


def test_more_tensors_than_one_launch_takes_unaligned_and_strided(stochastic_round):
    values = [torch.randn(2 + i % 7, 1 + 5 * i % 40) for i in range(90)]
    values += [torch.randn(30, 64).t(), torch.randn(33)[1:]]
    ours, theirs = both(stochastic_round, values, [address(v.shape, site=i) for i, v in enumerate(values)])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_rows_past_two_to_the_32_have_their_own_words(stochastic_round):
    whole, start = (2**40, 64), (2**35 + 3, 0)
    ours, theirs = both(stochastic_round, [torch.randn(4, 64)], [address(whole, start)])
    assert torch.equal(ours[0], theirs[0])


def test_numbers_that_are_exact_and_those_that_are_none_stay(stochastic_round):
    value = torch.tensor([0.0, -0.0, 1.5, -3.0, math.inf, -math.inf, math.nan, 3.4e38])
    ours, theirs = both(stochastic_round, [value], [address((8,))])
    torch.testing.assert_close(ours[0].float()[:7], value[:7], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0, equal_nan=True)
    assert bool(torch.signbit(ours[0][1]))


def test_opcheck_and_compile(stochastic_round):
    target, value = torch.zeros(3, 8, dtype=torch.bfloat16), torch.randn(3, 8)
    opcheck(torch.ops.stoker.stochastic_round, ([target], [value], [1, 2, 3, 2, 0, 0, 3, 8]))

    def run(t, v):
        stochastic_round([t], [v], [address((3, 8))])

    torch.compile(run, fullgraph=True, backend="aot_eager")(target, value)
    wanted = torch.empty_like(target)
    reference([wanted], [value], [address((3, 8))])
    assert torch.equal(target, wanted)


def test_mistakes_are_named(stochastic_round):
    half, one = torch.ones(3, dtype=torch.bfloat16), torch.ones(3)
    stochastic_round([], [], [])
    for arguments, message in (
        (([torch.ones(3)], [one], [address((3,))]), "to torch.float32"),
        (([half], [one], [address((2,))]), "does not lie in"),
        (([half], [one], [address((3,), step=2**32)]), "step=4294967296"),
        (([half], [one], [address((3,), site=2**31)]), "site=2147483648"),
        (([half], [one], [address((3,), seed=2**64)]), "seed=18446744073709551616"),
        (([half], [one], []), "0 addresses for 1 targets"),
        (([half], [torch.ones(4)], [address((3,))]), r"\(4,\) to torch.bfloat16 \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            stochastic_round(*arguments)
    five = torch.ones(1, 1, 1, 1, 4)
    with pytest.raises(ValueError, match="more than three of its leading dimensions; or choose"):
        stochastic_round([five.bfloat16()], [five], [address((2, 2, 2, 2, 4))])
