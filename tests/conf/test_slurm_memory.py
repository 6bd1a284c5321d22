"""Sizes of memory, held against what sbatch and scontrol of 22.05 made of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stoker.conf.slurm_memory import parse_memory, shown_memory

TAKEN = {
    "0": 0,
    "0K": 0,
    "1": 1,
    "007M": 7,
    "1000": 1000,
    "1K": 1,
    "1024K": 1,
    "1025K": 2,
    "1kb": 1,
    "4G": 4096,
    "4GB": 4096,
    "4gb": 4096,
    "1T": 1024 * 1024,
    "99999999T": 99999999 * 1024 * 1024,
}
REFUSED = ["", "G", "1.5G", "-1", "1 G", "1G ", "1MiB", "1P", "1B", "1GBX", "1Gx", "18446744073709551615", "\u0661"]
# What sbatch lets through: a sign, a blank in front, and numbers that overflow into its flags.
ALSO_REFUSED = ["+5", " 1G", "9223372036854775807", "9223372036854775807K", "9999999999T"]


@pytest.mark.parametrize("text", TAKEN)
def test_a_size_is_what_slurm_makes_of_it(text: str) -> None:
    assert parse_memory(text) == TAKEN[text]


@pytest.mark.parametrize("text", [*REFUSED, *ALSO_REFUSED])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected an integer with K, M, G or T"):
        parse_memory(text)


KIB = {"": 1024, "K": 1, "M": 1024, "G": 1024**2, "T": 1024**3}  # of one unit
units = st.sampled_from(
    ["", *(spelling for u in "KMGT" for spelling in (u, u.lower(), u + "B", u + "b", u.lower() + "b"))]
)


@given(st.integers(0, 8_000_000), st.sampled_from(["", "0", "00"]), units)
def test_a_well_formed_size_is_the_number_of_its_units_rounded_up(number: int, zeros: str, unit: str) -> None:
    kib = number * KIB[unit[:1].upper()]
    assert parse_memory(f"{zeros}{number}{unit}") == (kib + 1023) // 1024


@given(
    st.integers(0, 8_000_000), units, st.sampled_from(["{}.5{}", "-{}{}", "{} {}", "{}{} ", "{}{}x", "{}{}iB", "{}P{}"])
)
def test_one_slip_spoils_a_size(number: int, unit: str, form: str) -> None:
    with pytest.raises(ValueError, match="expected an integer with K, M, G or T"):
        parse_memory(form.format(number, unit))


@given(st.text())
def test_no_text_does_worse_than_be_refused(text: str) -> None:
    try:
        assert 0 <= parse_memory(text) <= 2**53
    except ValueError:
        return


def test_what_slurm_shows_may_have_a_fraction() -> None:
    shown = {"8000M": 8000, "8000": 8000, "2048K": 2, "1.50G": 1536, "1.50T": 1536 * 1024, "2P": 2 * 1024**3, "0": 0}
    assert {text: shown_memory(text) for text in shown} == shown
    for text in ("", "G", "1B", "1,5G", "-1", "1.G", "1g"):
        with pytest.raises(ValueError, match="no size"):
            shown_memory(text)
