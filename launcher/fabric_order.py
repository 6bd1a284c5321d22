"""Rank order by topology: nodes of one leaf switch get neighbouring ranks.

Owns: what Slurm says of a node's place, and the sort key. Does not own: forming (policy_basics.py). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

ADDRESS, PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"


def place_of(environ: Mapping[str, str], node: str) -> tuple[str, ...]:
    """Switches (or blocks) above a node from the top down, as Slurm tells a task; () where it has no topology.

    Both topology/tree and topology/block set ADDRESS to `TOP.LEAF.NODE` and PATTERN to the kinds, `switch.switch.node`
    (srun's manual page, "OUTPUT ENVIRONMENT VARIABLES"). A node's own name may hold dots as well.
    """
    address = environ.get(ADDRESS, "")
    if address.endswith("." + node):
        above = address[: -len(node) - 1]
        return tuple(above.split("."))
    levels = environ.get(PATTERN, "").count(".")
    return tuple(address.split(".", levels)[:levels]) if address.count(".") >= levels else ()


def rank_key(place: tuple[str, ...], node: str) -> tuple[object, ...]:
    """Sort key of a node: switch by switch from the top, then by name; of the nodes alone, not of who came first."""
    return tuple(natural(switch) for switch in place), natural(node)


def natural(name: str) -> tuple[object, ...]:
    """Sort key for names: n2 before n10."""
    parts: list[object] = []
    digits = ""
    for c in name + "\0":
        if c.isdecimal():
            digits += c
            continue
        if digits:
            parts += [1, int(digits), digits]
            digits = ""
        parts += [0, ord(c), c]
    return tuple(parts)
