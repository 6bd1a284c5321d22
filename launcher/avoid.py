"""Which nodes a run's next job is not to get: those that the configuration excludes, and those learnt to be bad.

Owns: putting the findings (run/badnodes.py), the wishes of the configuration and the size of the partition together.
Used for launch and resume, for requeues and for successors alike. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import jobnodes
from .run import badnodes
from .run.badnodes import Finding
from .run.files import read_json
from .run.layout import RunDir


def run_id(run: RunDir) -> str:
    try:
        return str(read_json(run.run)["id"])
    except (OSError, ValueError, KeyError):
        return run.path.name


def findings(run: RunDir, config: Mapping[str, Any]) -> dict[str, Finding]:
    """What is known against nodes and holds for this run."""
    if not config.get("resilience", {}).get("avoid_bad_nodes", True):
        return {}
    return badnodes.known(badnodes.directory_of(run), run_id(run))


def avoided(run: RunDir, config: Mapping[str, Any]) -> list[str]:
    """The bad nodes that the job can do without; asks Slurm how many there are, if there are bad ones at all."""
    found, cluster = findings(run, config), config["cluster"]
    if not found:
        return []
    usable = jobnodes.usable_nodes(cluster)
    own = len(jobnodes.hostnames(cluster["exclude"] or ""))
    asked_for = jobnodes.hostnames(cluster["nodelist"] or "")
    return badnodes.to_avoid(found, asked_for, cluster["nodes"], None if usable is None else max(0, usable - own))


def exclusion(run: RunDir, config: Mapping[str, Any]) -> str:
    """The whole list of nodes to exclude, as sbatch takes it; empty if there is nothing to exclude."""
    own = config["cluster"].get("exclude")
    return ",".join([*([own] if own else []), *avoided(run, config)])


def options(run: RunDir, config: Mapping[str, Any]) -> list[str]:
    """sbatch's for the next submission: none where no bad node is known, the script has the configuration's own."""
    wanted = exclusion(run, config) if findings(run, config) else ""
    return [f"--exclude={wanted}"] if wanted else []
