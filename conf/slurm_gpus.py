"""GPUs in Slurm's words: what options ask for, and what nodes and jobs are shown to have.

Owns: reading `[TYPE:]COUNT` of --gpus and its like, and the GPUs among generic resources (`gpu:h100:8(S:0-1)`, TRES).
Forms: sbatch, scontrol and sinfo of 22.05 to 25.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OUTER_COMMA = re.compile(r",(?![^(]*\))")  # not one between parentheses, as in gpu:2(IDX:0,3)
_DETAIL = re.compile(r"\([^()]*\)$")
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})([KMG]?)", re.IGNORECASE | re.ASCII)
_NOTHING = ("", "(null)", "N/A", "none")


@dataclass(frozen=True)
class Gpus:
    count: int
    type: str | None = None  # as the site names it


def asked(option: str) -> tuple[Gpus, ...]:
    """The value of --gpus-per-node and its like: `8`, `h100:8`, `a100:4,h100:4`; a type alone is one GPU of it.

    Raises:
        ValueError: it is none.
    """
    return tuple(_gpus(item, option) for item in option.split(","))


def listed(resources: str) -> tuple[Gpus, ...]:
    """The GPUs in a list of generic resources or of TRES; everything else in it is passed over.

    Of TRES both the sum and each type are listed (`gres/gpu=8,gres/gpu:h100=8`): those with a type come with one.

    Raises:
        ValueError: a GPU among them cannot be read.
    """
    return tuple(_gpus(item, resources) for item in _gpu_items(resources))


def _gpu_items(resources: str) -> Iterator[str]:
    for item in _OUTER_COMMA.split(resources) if resources not in _NOTHING else ():
        word = _DETAIL.sub("", re.sub(r"^gres[:/]", "", item.strip()))
        name, separator, rest = word.partition(":")
        if name == "gpu":
            # A node without types may show (null) for one.
            yield rest.removeprefix("(null):").removeprefix("no_consume:").replace("=", ":") if separator else "1"
        elif name.startswith("gpu="):
            yield name.removeprefix("gpu=")


def _gpus(text: str, whole: str) -> Gpus:
    kind, _, number = text.rpartition(":")
    found = _COUNT.fullmatch(number)
    if found is None and ":" not in text and number:
        kind, found = number, _COUNT.fullmatch("1")
    if found is None or not (_TYPE.fullmatch(kind) if kind else ":" not in text):
        raise ValueError(f"{whole!r}: no GPUs; expected a count, or a type and a count like h100:8")
    return Gpus(int(found[1]) * 1024 ** " KMG".index(found[2].upper() or " "), kind or None)
