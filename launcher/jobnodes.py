"""Nodes and the next start, from inside a job: which nodes there are, what Slurm holds of them, which to leave out.

Owns: `sinfo` for nodes, and `scontrol update` of a job that waits. One call each, never in a loop; nothing here raises.
Standard library only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..conf.slurm_gpus import listed
from ..conf.slurm_hostlist import expand
from .jobinfo import command

_TRIES, _PAUSE = 4, 0.7  # a job that Slurm is still requeueing may refuse the first update
_OUT = ("down", "drain", "drng", "drained", "fail", "maint", "futr", "unk", "inval", "pow")  # states of `sinfo -o %t`

_PLAIN = re.compile(r"([\w.-]+([&,][\w.-]+)*|[\w.-]+([|][\w.-]+)*)?", re.ASCII)  # constraints that are understood


def hostnames(text: str) -> list[str]:
    """The names in a host list, in order; as it stands where it is none."""
    try:
        return expand(text)
    except ValueError:
        return [text]


@dataclass(frozen=True)
class Node:
    """A node in a partition, as sinfo prints it."""

    name: str
    state: str  # short
    partition: str  # with * if it is the default one
    features: frozenset[str] = frozenset()
    gres: str = ""


def node_states(options: Sequence[str]) -> list[Node] | None:
    """None if Slurm does not answer."""
    done = command(["sinfo", "--noheader", "--Node", *options, "--format=%N %t %P %f %G"])
    if done is None or done.returncode != 0:
        return None
    rows = (line.split() for line in done.stdout.splitlines())
    return [Node(r[0], r[1], r[2], frozenset(r[3].split(",")), r[4]) for r in rows if len(r) == 5]


def down_among(nodes: str) -> tuple[str, ...]:
    """Which nodes of a host list Slurm holds for down."""
    found = node_states([f"--nodes={nodes}"]) or []
    return tuple(dict.fromkeys(n.name for n in found if n.state.startswith("down")))


def usable_nodes(cluster: Mapping[str, Any]) -> int | None:
    """How many nodes a job with this configuration (`cluster`) can get; None if nobody can tell: Slurm does not answer,
    or the job asks for what is not looked at here."""
    partition, constraint = cluster["partition"], cluster.get("constraint") or ""
    if cluster.get("reservation") or cluster.get("gres") or not _PLAIN.fullmatch(constraint):
        return None
    found = node_states([f"--partition={partition}"] if partition else [])
    if found is None:
        return None
    mine = [n for n in found if partition or n.partition.endswith("*")]
    gpus, kind = int(cluster.get("gpus_per_node") or 0), cluster.get("gpu_type")
    fit = [n for n in mine if has_features(n, constraint) and gpus_of(n, kind) >= gpus]
    return len({n.name for n in fit if not n.state.startswith(_OUT)})


def has_features(node: Node, constraint: str) -> bool:
    """Whether it meets a constraint of one kind: features that it must all have (&), or one of them (|)."""
    if not constraint:
        return True
    if "|" in constraint:
        return any(name in node.features for name in constraint.split("|"))
    return all(name in node.features for name in re.split("[&,]", constraint))


def gpus_of(node: Node, kind: str | None = None) -> int:
    """How many GPUs (of a kind) a node has; none where Slurm's words for them cannot be read."""
    try:
        found = listed(node.gres)
    except ValueError:
        return 0
    return sum(gpus.count for gpus in found if kind is None or (gpus.type or "").lower() == kind.lower())


def amend(job_id: str, changes: Mapping[str, str]) -> str | None:
    """Change a job that waits, or that Slurm is about to start again. Returns an error, None if it was heard."""
    if not changes:
        return None
    error = ""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE)
        done = command(["scontrol", "update", f"jobid={job_id}", *(f"{k}={v}" for k, v in changes.items())])
        if done is not None and done.returncode == 0:
            return None
        error = "no answer" if done is None else " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return error


def changes_for(exclude: str | None, delay: float) -> dict[str, str]:
    """What `amend` takes. `exclude`: the whole list of excluded nodes ("" for none), None leaves it as it is."""
    changes = {} if exclude is None else {"ExcNodeList": exclude}
    return changes | ({"StartTime": f"now+{round(delay)}"} if delay >= 1 else {})
