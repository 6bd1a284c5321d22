"""Slurm's host lists: `n[01-03,7],login`, read into names and written from them.

Owns: that notation. Held against `scontrol show hostnames` and `scontrol show hostlist` of 22.05. Stricter than these
with unclosed brackets, empty items and blanks; text behind the last bracket is read, which Slurm 22.05 refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

MOST = 65_536  # hosts in a list; Slurm takes no more in one range

_COMMA = re.compile(r",(?![^\[]*\])")  # not one between brackets
_ITEM = re.compile(r"(?:[^\[\],\s]+|\[[^\[\]\s]+\])+")
_PIECE = re.compile(r"([^\[\]]+)|\[([^\[\]]+)\]")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_NUMBERED = re.compile(r"(.*?)(\d{1,18})", re.ASCII)
_NAME = re.compile(r"[^\[\],\s]+")


def expand(text: str) -> list[str]:
    """The hosts of a list, in its order; the empty list for an empty text.

    Raises:
        ValueError: no host list, or one of more than MOST hosts.
    """
    hosts: list[str] = []
    for item in _COMMA.split(text) if text else ():
        if not _ITEM.fullmatch(item):
            raise ValueError(f"expected a host list like n[01-16],m3; found {item!r} in it")
        names = [""]
        for literal, ranges in _PIECE.findall(item):
            ends = [literal] if literal else list(_numbers(ranges))
            _refuse_too_many(len(names) * len(ends))
            names = [name + end for name in names for end in ends]
        hosts += names
        _refuse_too_many(len(hosts))
    return hosts


def _numbers(ranges: str) -> Iterator[str]:
    """`08-10,12` as 08, 09, 10, 12: the first number of a range says how many digits all have at least."""
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not found or low > high:
            raise ValueError(f"expected numbers and ranges like 01-16 between the brackets; found {part!r}")
        _refuse_too_many(high - low + 1)
        yield from (str(number).zfill(len(found[1])) for number in range(low, high + 1))


def _refuse_too_many(hosts: int) -> None:
    if hosts > MOST:
        raise ValueError(f"expected at most {MOST} hosts")


def compress(hosts: Iterable[str]) -> str:
    """The shortest list of these hosts in this order: names that differ in their last number share brackets.

    Raises:
        ValueError: a name is empty, or holds a bracket, a comma or a blank.
    """
    groups: list[tuple[str, list[tuple[str, str]]]] = []  # prefix, ranges of the number behind it
    for host in hosts:
        if not _NAME.fullmatch(host):
            raise ValueError(f"expected the name of a host; found {host!r}")
        found = _NUMBERED.fullmatch(host)
        if found is None:
            groups.append((host, []))
            continue
        prefix, number = found.groups()
        if not groups or groups[-1][0] != prefix or not groups[-1][1]:
            groups.append((prefix, []))
        ranges = groups[-1][1]
        if ranges and number == str(int(ranges[-1][1]) + 1).zfill(len(ranges[-1][0])):
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ",".join(prefix + _bracketed(ranges) for prefix, ranges in groups)


def _bracketed(ranges: list[tuple[str, str]]) -> str:
    parts = [low if low == high else f"{low}-{high}" for low, high in ranges]
    return parts[0] if len(parts) == 1 and "-" not in parts[0] else f"[{','.join(parts)}]" if parts else ""
