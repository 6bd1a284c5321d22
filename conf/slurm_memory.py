"""Slurm's sizes of memory and disk: what sbatch takes for --mem, --mem-per-cpu, --mem-per-gpu and --tmp, and what
Slurm shows.

Owns: reading them. Held against sbatch 22.05.
"""

from __future__ import annotations

import re

FORMS = "an integer with K, M, G or T (MiB without one)"

_SIZE = re.compile(r"(\d{1,15})(?:([KMGT])B?)?", re.IGNORECASE | re.ASCII)
_SHOWN = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)([KMGTP]?)", re.ASCII)
_MOST = 2**53  # MiB; Slurm keeps flags in the high bits of the number, and turns more than 2^62 into something else


def parse_memory(text: str) -> int:
    """MiB, kibibytes rounded up as Slurm does.

    Raises:
        ValueError: `text` has none of the FORMS.
    """
    found = _SIZE.fullmatch(text)
    if found:
        number, unit = int(found[1]), (found[2] or "M").upper()
        size = -(-number // 1024) if unit == "K" else number * 1024 ** "MGT".index(unit)
        if size <= _MOST:
            return size
    raise ValueError(f"expected {FORMS}")


def shown_memory(text: str) -> int:
    """MiB, rounded down, of a size as Slurm shows it in TRES: `8000M`, `1.50T`, `2P`; MiB without a unit.

    Raises:
        ValueError: it is none.
    """
    found = _SHOWN.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r}: no size; expected a number with K, M, G, T or P")
    return int(float(found[1]) * 1024.0 ** ("KMGTP".index(found[2] or "M") - 1))
