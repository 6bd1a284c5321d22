"""Stochastic rounding: to a neighbour, right on average, and the same however a tensor is cut."""

from __future__ import annotations

import math

import pytest
import torch
from stoker.kernels import RoundingAddress
from stoker.kernels.reference import adamw, stochastic_round
from torch import Tensor


def address(shape: tuple[int, ...], start: tuple[int, ...] | None = None, step: int = 1, site: int = 5, seed: int = 3):
    return RoundingAddress(seed, step, site, start or (0,) * len(shape), shape)


def rounded(value: Tensor, where: RoundingAddress) -> Tensor:
    target = torch.empty_like(value, dtype=torch.bfloat16)
    stochastic_round([target], [value], [where])
    return target


def test_every_value_becomes_one_of_its_two_neighbours() -> None:
    value = torch.cat([torch.randn(4000) * 10.0**e for e in (-30, -3, 0, 20)])
    found = rounded(value, address((16000,))).float()
    below = (value.view(torch.int32) & ~0xFFFF).view(torch.float32)
    above = ((value.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    assert bool(((found == below) | (found == above)).all())
    assert 0.45 < float((found == above).float().mean()) < 0.55


@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.9])
def test_the_mean_is_the_value(place: float) -> None:
    n = 200_000
    step = 2.0**-7  # between neighbours from 1 on
    found = rounded(torch.full((n,), 1 + place * step), address((n,)))
    share = float((found.double() - 1).mean()) / step
    deviation = math.sqrt(place * (1 - place) / n)
    assert share == pytest.approx(place, abs=4 * deviation + 2**-16)


def test_numbers_that_are_exact_and_those_that_are_none_stay() -> None:
    value = torch.tensor([0.0, -0.0, 1.5, -3.0, math.inf, -math.inf, math.nan])
    found = rounded(value, address((7,)))
    torch.testing.assert_close(found.float(), value, rtol=0, atol=0, equal_nan=True)
    assert bool(torch.signbit(found[1]))


def test_the_bits_do_not_depend_on_how_a_tensor_is_cut() -> None:
    value = torch.randn(3, 21, 19)
    whole = rounded(value, address(value.shape))
    for start, size in (((0, 0, 0), (3, 21, 10)), ((1, 4, 7), (2, 5, 12)), ((2, 20, 18), (1, 1, 1))):
        box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        assert torch.equal(rounded(value[box], address(value.shape, start)), whole[box])
    assert torch.equal(rounded(value.transpose(0, 1).contiguous().transpose(0, 1), address(value.shape)), whole)
    large = torch.randn(1030, 300)  # more than one chunk
    assert torch.equal(
        rounded(large[900:, 5:], address(large.shape, (900, 5))), rounded(large, address(large.shape))[900:, 5:]
    )


@pytest.mark.parametrize("change", [{"step": 2}, {"site": 6}, {"seed": 4}])
def test_step_parameter_and_seed_each_give_other_bits(change: dict[str, int]) -> None:
    value = torch.randn(4096)
    same = rounded(value, address((4096,))) == rounded(value, address((4096,), **change))
    assert 0.4 < float(same.float().mean()) < 0.75


@pytest.mark.parametrize(
    ("target", "value", "where", "message"),
    [
        (torch.empty(3), torch.ones(3), address((3,)), "to torch.float32"),
        (torch.empty(3, dtype=torch.bfloat16), torch.ones(3), address((2,)), "does not lie in"),
        (torch.empty(3, dtype=torch.bfloat16), torch.ones(3), address((3,), step=2**32), "step=4294967296"),
        (torch.empty(3, dtype=torch.bfloat16), torch.ones(3), address((3,), site=2**31), "site=2147483648"),
    ],
)
def test_what_does_not_fit_is_refused(target: Tensor, value: Tensor, where: RoundingAddress, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stochastic_round([target], [value], [where])


def test_small_updates_of_adamw_add_up_without_masters() -> None:
    """100 steps of 1e-4 from 1: rounding to the nearest would leave 1."""
    shape = (64, 32)
    param, avg, avg_sq = torch.ones(shape, dtype=torch.bfloat16), torch.zeros(shape), torch.zeros(shape)
    for step in range(1, 101):
        gradient = torch.ones(shape)
        adamw(
            [param],
            [gradient],
            [avg],
            [avg_sq],
            None,
            1e-4,
            0.9,
            0.95,
            1e-8,
            0.0,
            step,
            1.0,
            [address(shape, None, step)],
        )
    assert float(param.double().mean()) == pytest.approx(0.99, abs=4e-4)
    assert param.dtype == torch.bfloat16


def test_adamw_refuses_masters_beside_rounding_and_wide_params() -> None:
    half, one = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    hyper = (1e-3, 0.9, 0.95, 1e-8, 0.0, 1, 1.0)
    with pytest.raises(ValueError, match="leave rounding=None"):
        adamw([half], [one], [one], [one], [one], *hyper, [address((2,))])
    with pytest.raises(ValueError, match=r"params\[0\] is torch.float32"):
        adamw([one], [one], [one], [one], None, *hyper, [address((2,))])
