"""What the live Slurm would not do as the configuration wishes, found before submission.

Owns: holding cluster.* and resilience.* against partitions and slurm.conf. Pure but for `live`, which asks Slurm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..conf.checks_cluster import CHECK_INTERVAL
from ..conf.schema import Config, Continuation
from ..conf.slurm_time import format_time, parse_time
from . import site, slurm
from .errors import environment_error
from .site import Partition


@dataclass(frozen=True)
class Findings:
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def live(config: Config) -> Findings:
    """Ask this machine's Slurm.

    Raises:
        UserError: there are no Slurm commands here.
    """
    if not slurm.is_available():
        raise environment_error(
            "no Slurm here (sbatch not found): use cluster=local, or run this where Slurm's commands are"
        )
    partitions = site.partitions()
    if not partitions:
        return Findings(warnings=["Slurm does not say which partitions it has (scontrol show partition); going on"])
    return lint(config, partitions, site.configuration())


def lint(config: Config, partitions: Sequence[Partition], settings: Mapping[str, str]) -> Findings:
    """Errors are what sbatch would refuse or leave waiting for ever; warnings are what will not work as hoped."""
    found = Findings()
    chosen = _chosen(config, partitions, found)
    if chosen:
        _size(config, chosen, found)
        _time(config, chosen, found)
    _requeue(config, chosen, settings, found)
    return found


def _chosen(config: Config, partitions: Sequence[Partition], found: Findings) -> list[Partition]:
    """The partitions the job may go to: sbatch takes a list."""
    known = {p.name: p for p in partitions}
    wanted = config.cluster.partition
    if not wanted:
        default = [p for p in partitions if p.is_default]
        if not default:
            found.errors.append(
                f"cluster.partition=null: this Slurm has no default partition; choose one of {', '.join(known)}"
            )
        return default
    names = [name.strip() for name in wanted.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        found.errors.append(
            f"cluster.partition={wanted}: there is no partition {', '.join(unknown)} here; known: {', '.join(known)}"
        )
    for name in names:
        if name in known and not known[name].is_up:
            found.warnings.append(f"cluster.partition={wanted}: partition {name} is not up; the job will wait")
    return [known[name] for name in names if name in known]


def _size(config: Config, chosen: Sequence[Partition], found: Findings) -> None:
    nodes = config.cluster.nodes
    limits = [min(p.total_nodes, p.max_nodes if p.max_nodes is not None else p.total_nodes) for p in chosen]
    if nodes > max(limits):
        offers = ", ".join(f"{p.name} {n}" for p, n in zip(chosen, limits, strict=True))
        found.errors.append(f"cluster.nodes={nodes}: more than a job can get here ({offers} nodes)")


def _time(config: Config, chosen: Sequence[Partition], found: Findings) -> None:
    limits = [p.max_time for p in chosen]
    highest = None if None in limits else max(n for n in limits if n is not None)
    if config.cluster.time:
        try:
            asked = parse_time(config.cluster.time)
        except ValueError:
            return  # conf.checks has said so
        if highest is not None and (asked is None or asked > highest):
            names = ", ".join(p.name for p in chosen)
            found.errors.append(
                f"cluster.time={config.cluster.time}: more than {names} allows ({format_time(highest)})"
            )
        return
    # Not asked for: the partition's default counts, which conf.checks cannot know.
    defaults = [p.default_time if p.default_time is not None else p.max_time for p in chosen]
    limit = None if None in defaults else min(n for n in defaults if n is not None)
    early = config.resilience.warning + CHECK_INTERVAL
    if limit is not None and early >= limit:
        found.errors.append(
            f"cluster.time=null: the partition's default is {format_time(limit)}, and the warning may come {early} s "
            "before that (resilience.warning), so before the run starts; ask for more time"
        )


def _requeue(config: Config, chosen: Sequence[Partition], settings: Mapping[str, str], found: Findings) -> None:
    if config.resilience.continuation is not Continuation.requeue:
        return
    for partition in chosen:
        mode = partition.preempt_mode or settings.get("PreemptMode", "")
        if "CANCEL" in mode.upper():
            found.warnings.append(
                f"partition {partition.name} has PreemptMode={mode}: a preempted job is cancelled there, not requeued; "
                "`stoker resume` would go on with it"
            )
    if settings.get("JobRequeue") == "0":
        found.warnings.append(
            "this Slurm has JobRequeue=0: jobs are not requeued unless they ask for it, as this one does; "
            "if the site forbids it all the same, `stoker resume` goes on with an ended run"
        )
