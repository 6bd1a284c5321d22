"""What the live Slurm would not do as the configuration wishes, found before submission.

Owns: which findings stop a launch and which are only said. Errors are what sbatch would refuse or leave waiting for
ever; warnings what will not work as hoped. One partition's answer is lints_job.py's. Pure but for `live`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..conf.checks_cluster import CHECK_INTERVAL
from ..conf.schema import Config, ContainerRuntime, Continuation
from ..conf.slurm_time import format_time
from . import lints_preemption, site_ask, slurm
from .errors import environment_error
from .lints_job import Job, fitting, job_of, refusals
from .site import Association, Partition, Site, parse_licenses

_LICENSE = re.compile(r"([\w.@-]+)(?:[:=](\d+))?", re.ASCII)
_LICENSES = re.compile(rf"{_LICENSE.pattern}(?:,{_LICENSE.pattern})*", re.ASCII)
FRESH = 60.0  # seconds; an error must not come from what was true longer ago
_MOST_NAMES = 5  # of nodes in a message


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
    site = site_ask.ask()
    found = _hold(config, site)
    if found.errors and site is not None and site.age > FRESH:
        found = _hold(config, site_ask.ask(refresh=True))
    return found


def _hold(config: Config, site: Site | None) -> Findings:
    if site is None:
        return Findings(warnings=["Slurm does not say which partitions it has (scontrol show partition); going on"])
    found = lint(config, site)
    _reservation(config, site, found)
    _licenses(config, found)
    return found


def lint(config: Config, site: Site, which: Callable[[str], str | None] = shutil.which) -> Findings:
    """Hold a configuration against a site."""
    found, job = Findings(), job_of(config.cluster)
    chosen = _chosen(config, site, found)
    if chosen:
        answers = [refusals(job, partition, site) for partition in chosen]
        if all(answers):  # sbatch takes the job if one of its partitions would
            found.errors.extend(dict.fromkeys(line for answer in answers for line in answer))
        else:
            _waiting(job, [p for p, a in zip(chosen, answers, strict=True) if not a], site, found)
        _default_time(config, chosen, found)
    _names(job, site, found)
    _accounts(config, chosen, site, found)
    found.warnings.extend(lints_preemption.warnings(config, chosen, site))
    _container(config, site, which, found)
    _probed(config, chosen, site, found)
    return found


def _chosen(config: Config, site: Site, found: Findings) -> list[Partition]:
    """The partitions the job may go to: sbatch takes a list."""
    known = {p.name: p for p in site.partitions}
    shown = ", ".join(p.name for p in site.partitions if not p.is_hidden)
    wanted = config.cluster.partition
    if not wanted:
        default = [p for p in site.partitions if p.is_default]
        if not default:
            found.errors.append(f"cluster.partition=null: this Slurm has no default partition; choose one of {shown}")
        return default
    names = [name.strip() for name in wanted.split(",") if name.strip()]  # an empty one conf.checks refuses
    unknown = [name for name in names if name not in known]
    if unknown:
        found.errors.append(
            f"cluster.partition={wanted}: there is no partition {', '.join(unknown)} here; known: {shown}"
        )
    down = [name for name in names if name in known and known[name].state == "DOWN"]
    if len(down) == len(names):  # else the job starts in another one
        for name in down:
            found.warnings.append(f"cluster.partition={wanted}: partition {name} is down; jobs wait until it is up")
    return [known[name] for name in names if name in known]


def _default_time(config: Config, chosen: Sequence[Partition], found: Findings) -> None:
    """Not asked for: the partition's default counts, which conf.checks cannot know."""
    if config.cluster.time:
        return
    defaults = [p.default_time if p.default_time is not None else p.max_time for p in chosen]
    limit = None if None in defaults else min(n for n in defaults if n is not None)
    early = config.resilience.warning + CHECK_INTERVAL
    if limit is not None and early >= limit:
        found.errors.append(
            f"cluster.time=null: the partition's default is {format_time(limit)}, and the warning may come {early} s "
            "before that (resilience.warning), so before the run starts; ask for more time"
        )


def _waiting(job: Job, chosen: Sequence[Partition], site: Site, found: Findings) -> None:
    """Whether enough of the nodes that fit are in service, in any of the partitions."""
    best: tuple[int, list[str]] | None = None
    for partition in chosen:
        hardware = site.hardware_of(partition)
        if hardware is None:
            return
        names = fitting(job, hardware)
        away = [name for name in names if name in site.out_of_service]
        if best is None or len(names) - len(away) > best[0]:
            best = len(names) - len(away), away
    if best is not None and best[0] < job.cluster.nodes:
        found.warnings.append(
            f"cluster.nodes={job.cluster.nodes}: {best[0]} of the nodes that fit are in service now; the job waits for "
            f"the others ({_named(best[1], site)})"
        )
    away = [name for name in job.nodelist if name in site.out_of_service]
    if away:
        found.warnings.append(
            f"cluster.nodelist={job.cluster.nodelist}: the job waits for nodes out of service ({_named(away, site)})"
        )


def _named(nodes: Sequence[str], site: Site) -> str:
    shown = [f"{n} {': '.join(w for w in site.out_of_service[n] if w and w != 'none')}" for n in nodes[:_MOST_NAMES]]
    return "; ".join([*shown, *(["..."] if len(nodes) > _MOST_NAMES else [])])


def _names(job: Job, site: Site, found: Findings) -> None:
    """Nodes and features that there are not, wherever the job goes."""
    if not site.sees_all_nodes:
        return
    known = {name for h in site.inventory.hardware for name in h.names}
    for name, nodes in (("exclude", job.exclude), ("nodelist", job.nodelist)):
        unknown = [node for node in nodes if node not in known]
        if unknown:
            found.errors.append(
                f"cluster.{name}={getattr(job.cluster, name)}: there is no node {', '.join(unknown[:_MOST_NAMES])} "
                "here; `sinfo -N` lists them"
            )
    features = {name for h in site.inventory.hardware for name in h.features}
    lacking = [name for name in job.features if name not in features]
    if lacking and site.settings.get("NodeFeaturesPlugins", "(null)") == "(null)":
        found.errors.append(
            f"cluster.constraint={job.cluster.constraint}: no node has the feature {', '.join(lacking)}; "
            f"there are: {', '.join(sorted(features)) or 'none'}"
        )


def _accounts(config: Config, chosen: Sequence[Partition], site: Site, found: Findings) -> None:
    cluster, accounting = config.cluster, site.inventory.accounting
    given = [name for name in ("account", "qos") if getattr(cluster, name)]
    if given and not site.has_accounts and "AccountingStorageType" in site.settings:
        found.warnings.extend(
            f"cluster.{n}={getattr(cluster, n)}: no effect, this Slurm has no accounts" for n in given
        )
    for partition in chosen:
        allowed = partition.allow_accounts
        if cluster.account and allowed is not None and cluster.account not in allowed:
            # Newer Slurm takes accounts below these, too; the tree of accounts is not visible here.
            found.warnings.append(
                f"cluster.account={cluster.account}: partition {partition.name} takes only {', '.join(allowed)}; "
                "if yours is not below one of them, the job waits for ever"
            )
    if accounting is None or not accounting.associations:
        return
    mine = _mine(cluster.account, accounting.associations)
    if cluster.account and not mine and site.enforces("associations"):
        accounts = ", ".join(dict.fromkeys(a.account for a in accounting.associations))
        found.errors.append(f"cluster.account={cluster.account}: you may not charge it; yours: {accounts}")
    if cluster.qos and site.enforces("qos"):
        names = [q.name for q in accounting.qos]
        allowed_qos = list(dict.fromkeys(name for a in mine for name in a.qos))
        if cluster.qos not in names:
            found.errors.append(f"cluster.qos={cluster.qos}: there is no such QOS here; known: {', '.join(names)}")
        elif mine and all(a.qos for a in mine) and cluster.qos not in allowed_qos:
            found.errors.append(f"cluster.qos={cluster.qos}: you may not use it; yours: {', '.join(allowed_qos)}")


def _mine(account: str | None, associations: Sequence[Association]) -> list[Association]:
    return [a for a in associations if account is None or a.account == account.lower()]


def _container(config: Config, site: Site, which: Callable[[str], str | None], found: Findings) -> None:
    """Said, not refused: nodes may have what this machine has not."""
    runtime = config.container.runtime
    if runtime is ContainerRuntime.pyxis and site.inventory.has_pyxis is False:
        found.warnings.append(
            "container.runtime=pyxis: srun here knows no --container-image; if it is so on the nodes, too, nothing "
            "starts: ask the site, or take container.runtime=apptainer (`stoker site --probe` looks on a node)"
        )
    is_there = which("apptainer") or which("singularity")
    if runtime is ContainerRuntime.apptainer and not is_there and not config.cluster.modules:
        found.warnings.append(
            "container.runtime=apptainer: neither apptainer nor singularity is on the PATH here; if it is so on the "
            "nodes, too, name their module in cluster.modules (`stoker site --probe` looks on a node)"
        )


# On the node of the supervisor, and what is not to be had without it.
_NEEDED = {
    Continuation.requeue: ("scontrol", "ask to be requeued"),
    Continuation.chain: ("sbatch", "submit its successor"),
}


def _probed(config: Config, chosen: Sequence[Partition], site: Site, found: Findings) -> None:
    """What `stoker site --probe` did not see on the nodes."""
    way, runtime = config.resilience.continuation, config.container.runtime
    for partition in chosen:
        seen = site.probes.get(partition.name)
        if seen is None:
            continue
        where = f"{seen.host} of partition {partition.name}, on which `stoker site --probe` looked"
        command, purpose = _NEEDED.get(way, ("", ""))
        if command and command not in seen.commands:
            found.warnings.append(
                f"resilience.continuation={way.value}: there is no {command} on {where}; the run cannot {purpose} "
                "there: ask the site to install it"
            )
        has_apptainer = {"apptainer", "singularity"} & set(seen.commands)
        if runtime is ContainerRuntime.apptainer and not has_apptainer and not config.cluster.modules:
            found.warnings.append(
                f"container.runtime=apptainer: there is neither apptainer nor singularity on {where}; "
                "name their module in cluster.modules"
            )


def _reservation(config: Config, site: Site, found: Findings) -> None:
    wanted = config.cluster.reservation
    if not wanted or "reservations" in site.settings.get("PrivateData", ""):
        return
    for name in dict.fromkeys(part.strip() for part in wanted.split(",")):  # sbatch takes a list
        reply = site_ask.reservation(name) if name else None
        if reply is not None and reply.code != 0 and "not found" in reply.out + reply.err:
            found.errors.append(
                f"cluster.reservation={wanted}: there is no reservation {name}; `scontrol show reservation` lists them"
            )


def _licenses(config: Config, found: Findings) -> None:
    wanted = config.cluster.licenses
    if not wanted:
        return
    reply = site_ask.licenses()
    if reply.code == 0:
        found.errors.extend(license_problems(wanted, parse_licenses(reply.out)))


def license_problems(wanted: str, totals: Mapping[str, int]) -> list[str]:
    """What cannot be had of `NAME:COUNT,...`."""
    problems = []
    for name, count in _LICENSE.findall(wanted) if _LICENSES.fullmatch(wanted) else ():
        if name not in totals:
            known = ", ".join(totals) or "none"
            problems.append(f"cluster.licenses={wanted}: there is no license {name} here; known: {known}")
        elif int(count or 1) > totals[name]:
            problems.append(f"cluster.licenses={wanted}: there are {totals[name]} of {name} in all; ask for no more")
    return problems
