"""Nodes and the next start, from inside a job: which nodes there are, what Slurm holds of them, which to leave out.

Owns: `sinfo` for nodes, and `scontrol update` of a job that waits. One call each, never in a loop; nothing here raises.
Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ..conf.slurm_hostlist import expand
from .jobinfo import command

_TRIES, _PAUSE = 4, 0.7  # a job that Slurm is still requeueing may refuse the first update
_OUT = ("down", "drain", "drng", "drained", "fail", "maint", "futr", "unk", "inval", "pow")  # states of `sinfo -o %t`


def hostnames(text: str) -> list[str]:
    """The names in a host list, in order; as it stands where it is none."""
    try:
        return expand(text)
    except ValueError:
        return [text]


def node_states(options: Sequence[str]) -> list[tuple[str, str, str]] | None:
    """(node, short state, partition) as sinfo prints them; None if Slurm does not answer."""
    done = command(["sinfo", "--noheader", "--Node", *options, "--format=%N %t %P"])
    if done is None or done.returncode != 0:
        return None
    rows = (line.split() for line in done.stdout.splitlines())
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def down_among(nodes: str) -> tuple[str, ...]:
    """Which nodes of a host list Slurm holds for down."""
    found = node_states([f"--nodes={nodes}"]) or []
    return tuple(dict.fromkeys(node for node, state, _ in found if state.startswith("down")))


def usable_nodes(partition: str | None) -> int | None:
    """How many nodes of a partition (None: the default one) jobs can get; None if Slurm does not answer."""
    found = node_states([f"--partition={partition}"] if partition else [])
    if found is None:
        return None
    mine = [(node, state) for node, state, name in found if partition or name.endswith("*")]
    return len({node for node, state in mine if not state.startswith(_OUT)})


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
