"""What a site's Slurm allows: its partitions and its configuration, as scontrol shows them.

Owns: those two calls and their parsers. Holding a run against them is lints.py's. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..conf.slurm_time import parse_time
from .slurm import call


@dataclass(frozen=True)
class Partition:
    name: str
    is_default: bool
    is_up: bool
    max_time: int | None  # seconds; None = no limit
    default_time: int | None  # seconds; None = none set (then max_time counts) or no limit
    total_nodes: int
    max_nodes: int | None  # per job; None = no limit
    preempt_mode: str


def partitions() -> list[Partition]:
    """The partitions this user can see; empty if Slurm does not say."""
    reply = call(["scontrol", "show", "partition", "--oneliner"])
    return parse_partitions(reply.out) if reply.code == 0 else []


def configuration() -> dict[str, str]:
    """Slurm's configuration as scontrol shows it; empty if Slurm does not say."""
    reply = call(["scontrol", "show", "config"])
    return parse_configuration(reply.out) if reply.code == 0 else {}


def _pairs(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def parse_partitions(text: str) -> list[Partition]:
    """From `scontrol show partition --oneliner`."""
    return [_partition(fields) for fields in map(_pairs, text.splitlines()) if "PartitionName" in fields]


def _partition(fields: dict[str, str]) -> Partition:
    max_nodes = fields.get("MaxNodes", "UNLIMITED")
    default_time = fields.get("DefaultTime", "NONE")
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        is_up=fields.get("State", "UP") == "UP",
        max_time=parse_time(fields.get("MaxTime", "UNLIMITED")),
        default_time=None if default_time == "NONE" else parse_time(default_time),
        total_nodes=int(fields.get("TotalNodes", "0")),
        max_nodes=int(max_nodes) if max_nodes.isdigit() else None,
        preempt_mode=fields.get("PreemptMode", ""),
    )


def parse_configuration(text: str) -> dict[str, str]:
    """From `scontrol show config`: `Key   = value` lines."""
    found = (line.split("=", 1) for line in text.splitlines() if " = " in line)
    return {key.strip(): value.strip() for key, value in found}
