"""What a configuration asks of Slurm, in numbers, and one partition's answer to it.

Owns: Job, and why a partition would refuse it or let it wait for ever. Only what Slurm tells is judged: a limit that
is not visible is no limit here. Which partitions count, and what is only worth a warning, is lints.py's. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..conf.schema import ClusterConfig
from ..conf.slurm_hostlist import expand
from ..conf.slurm_memory import parse_memory
from ..conf.slurm_time import format_time, parse_time
from .site import Association, Hardware, Partition, Qos, Site

_FEATURES = re.compile(r"[\w.-]+(?:[&|,][\w.-]+)*", re.ASCII)

T = TypeVar("T")


@dataclass(frozen=True)
class Limit:
    seconds: int | None  # None: no limit

    def is_over(self, allowed: int | None) -> bool:
        return allowed is not None and (self.seconds is None or self.seconds > allowed)


@dataclass(frozen=True)
class Job:
    """The numbers behind the fields; None where a field is not set or cannot be read (conf's checks say that)."""

    cluster: ClusterConfig
    limit: Limit | None
    memory: int | None  # MiB per node, as cluster.mem says
    by_part: tuple[str, int] | None  # the field that gives memory per CPU or GPU, and what that makes per node, MiB
    tmp: int | None  # MB
    exclude: tuple[str, ...]
    nodelist: tuple[str, ...]
    features: tuple[str, ...]  # all that the constraint names
    needs_all: tuple[str, ...]
    needs_one: tuple[str, ...]


@dataclass(frozen=True)
class Need:
    """Something that each node must have."""

    asked: str  # field=value
    fits: Callable[[Hardware], bool]
    offer: Callable[[Sequence[Hardware]], str]


def job_of(cluster: ClusterConfig) -> Job:
    constraint = cluster.constraint or ""
    words = tuple(re.split(r"[&|,]", constraint)) if _FEATURES.fullmatch(constraint) else ()
    signs = {sign for sign in constraint if sign in "&|,"} if words else set()
    return Job(
        cluster=cluster,
        limit=_read(lambda text: Limit(parse_time(text)), cluster.time),
        memory=_read(parse_memory, cluster.mem) or None,  # 0 stands for all there is
        by_part=_by_part(cluster),
        tmp=_read(parse_memory, cluster.tmp),
        exclude=tuple(_read(expand, cluster.exclude) or ()),
        nodelist=tuple(dict.fromkeys(_read(expand, cluster.nodelist) or ())),
        features=words,
        needs_all=words if "|" not in signs else (),
        needs_one=words if signs == {"|"} else (),
    )


def _by_part(cluster: ClusterConfig) -> tuple[str, int] | None:
    for name, parts in (("mem_per_cpu", cluster.cpus_per_task), ("mem_per_gpu", cluster.gpus_per_node)):
        size = _read(parse_memory, getattr(cluster, name))
        if size:
            return f"cluster.{name}={getattr(cluster, name)}", size * parts
    return None


def _read(reader: Callable[[str], T], text: str | None) -> T | None:
    """None for what is not set or cannot be read."""
    try:
        return reader(text) if text else None
    except ValueError:
        return None


def refusals(job: Job, partition: Partition, site: Site) -> list[str]:
    """Why the job would never run in this partition; empty if nothing speaks against it."""
    return [
        *_admission(job, partition, site),
        *_limits(job, partition, site),
        *_by_qos(job, partition, site),
        *_hardware(job, partition, site),
    ]


def _admission(job: Job, partition: Partition, site: Site) -> Iterator[str]:
    cluster, name = job.cluster, partition.name
    if partition.state in ("DRAIN", "INACTIVE"):
        others = ", ".join(p.name for p in site.partitions if p.state == "UP" and not p.is_hidden) or "none"
        yield (
            f"cluster.partition={cluster.partition}: partition {name} is set to {partition.state} and takes no jobs; "
            f"take one that is up ({others}), or wait until it is"
        )
    if partition.needs_reservation and not cluster.reservation:
        yield f"cluster.reservation=null: partition {name} takes only jobs with a reservation; name yours"
    if cluster.qos and partition.allow_qos is not None and cluster.qos not in partition.allow_qos:
        allowed = ", ".join(partition.allow_qos)
        yield f"cluster.qos={cluster.qos}: partition {name} takes only {allowed}; use one, or another partition"
    elif cluster.qos and partition.allow_qos is None and cluster.qos in partition.deny_qos:
        yield f"cluster.qos={cluster.qos}: partition {name} refuses this one; use another QOS or partition"


def _limits(job: Job, partition: Partition, site: Site) -> Iterator[str]:
    cluster, name, nodes = job.cluster, partition.name, job.cluster.nodes
    longest = partition.max_time
    is_over = job.limit is not None and job.limit.is_over(longest)
    if longest is not None and is_over and not _may_override(job, partition, site, "PartitionTimeLimit"):
        yield f"cluster.time={cluster.time}: partition {name} allows at most {format_time(longest)}; ask for no more"
    if nodes > partition.total_nodes:
        yield f"cluster.nodes={nodes}: partition {name} has {partition.total_nodes}; ask for no more, or take another"
    elif partition.max_nodes is not None and nodes > partition.max_nodes:
        if not _may_override(job, partition, site, "PartitionMaxNodes"):
            yield f"cluster.nodes={nodes}: partition {name} gives a job at most {partition.max_nodes}; ask for no more"
    elif nodes < partition.min_nodes and not _may_override(job, partition, site, "PartitionMinNodes"):
        yield f"cluster.nodes={nodes}: partition {name} gives a job at least {partition.min_nodes}; ask for as many"
    if partition.max_cpus is not None and cluster.cpus_per_task > partition.max_cpus:
        yield (
            f"cluster.cpus_per_task={cluster.cpus_per_task}: partition {name} gives a job at most "
            f"{partition.max_cpus} CPUs of a node; ask for no more"
        )
    if partition.max_memory is not None and job.memory is not None and job.memory > partition.max_memory:
        yield f"cluster.mem={cluster.mem}: partition {name} gives a job at most {partition.max_memory}M of a node"
    if partition.max_memory is not None and _read(parse_memory, cluster.mem) == 0:
        sizes = [h.memory for h in site.hardware_of(partition) or ()]
        if sizes and min(sizes) > partition.max_memory:
            yield (
                f"cluster.mem={cluster.mem}: stands for all memory of a node, and partition {name} gives a job at most "
                f"{partition.max_memory}M; ask for that"
            )


def _may_override(job: Job, partition: Partition, site: Site, flag: str) -> bool:
    """Whether the QOS that the job has, or may get by default, or the partition's has a flag that lifts a limit."""
    accounting = site.inventory.accounting
    if accounting is None:
        return job.cluster.qos is not None and site.has_accounts
    names = {partition.qos, *([job.cluster.qos] if job.cluster.qos else _default_qos(job, accounting.associations))}
    return any(flag in q.flags for q in accounting.qos if q.name in names)


def _default_qos(job: Job, associations: Sequence[Association]) -> Iterator[str]:
    """Of which Slurm may choose for a job that names none: the association's default, its only one, normal."""
    yield "normal"
    for association in associations:
        if job.cluster.account in (None, association.account):
            yield from (association.default_qos, *(association.qos if len(association.qos) == 1 else ()))


def _by_qos(job: Job, partition: Partition, site: Site) -> Iterator[str]:
    """Limits of the partition's QOS and of the job's, where Slurm enforces them; the partition's goes before."""
    if not site.enforces("limits") or site.inventory.accounting is None:
        return
    known = {q.name: q for q in site.inventory.accounting.qos}
    order = [q for q in (known.get(partition.qos or ""), known.get(job.cluster.qos or "")) if q is not None]
    if _may_override(job, partition, site, "OverPartQOS"):
        order = [known[job.cluster.qos]] if job.cluster.qos in known else []
    for q in [q for q in order if q.max_time is not None][:1]:
        if job.limit is not None and job.limit.is_over(q.max_time):
            allowed = format_time(q.max_time or 0)
            yield f"cluster.time={job.cluster.time}: QOS {q.name} allows at most {allowed}; ask for no more"
    wanted = _wanted(job)
    for what, of in (("a job", _per_job), ("a user", _per_user), ("all jobs together", _per_group)):
        seen: set[str] = set()
        for q in order:
            for key, limit in of(q):
                if key not in wanted or key in seen:
                    continue
                seen.add(key)
                field, amount = wanted[key]
                if amount > limit:
                    yield f"{field}: that is {key}={amount} in all, and QOS {q.name} gives {what} {limit}; ask for less"


def _per_job(qos: Qos) -> tuple[tuple[str, int], ...]:
    return qos.max_tres


def _per_user(qos: Qos) -> tuple[tuple[str, int], ...]:
    return qos.max_tres_user


def _per_group(qos: Qos) -> tuple[tuple[str, int], ...]:
    return qos.group_tres


def _wanted(job: Job) -> dict[str, tuple[str, int]]:
    """What the job takes at least, by Slurm's names: (our field, amount)."""
    cluster = job.cluster
    found = {
        "node": (f"cluster.nodes={cluster.nodes}", cluster.nodes),
        "cpu": (f"cluster.cpus_per_task={cluster.cpus_per_task}", cluster.nodes * cluster.cpus_per_task),
    }
    if cluster.gpus_per_node:
        gpus = (f"cluster.gpus_per_node={cluster.gpus_per_node}", cluster.nodes * cluster.gpus_per_node)
        found["gres/gpu"] = gpus
        if cluster.gpu_type:
            found[f"gres/gpu:{cluster.gpu_type}"] = gpus
    if job.memory is not None:
        found["mem"] = (f"cluster.mem={cluster.mem}", cluster.nodes * job.memory)
    return found


def _hardware(job: Job, partition: Partition, site: Site) -> Iterator[str]:
    hardware = site.hardware_of(partition)
    nodes, where = job.cluster.nodes, f"partition {partition.name}"
    if hardware is None or nodes > partition.total_nodes:
        return  # not all of it can be seen; or said already
    yield from _named_nodes(job, partition, hardware)
    left = _count(hardware, job, ())
    if left < nodes:
        excluded = f"cluster.exclude={job.cluster.exclude}"
        yield f"{excluded}: leaves {left} nodes of {where}, less than cluster.nodes={nodes}; exclude fewer"
        return
    wanted = needs(job)
    lacking = [need for need in wanted if _count(hardware, job, [need]) < nodes]
    for need in lacking:
        some = _count(hardware, job, [need])
        has = f"only {some} node{'s fit' if some > 1 else ' fits'}" if some else "no node fits"
        yield f"{need.asked}: {has} in {where} ({need.offer(hardware)}); ask for less, or take another partition"
    if not lacking and _count(hardware, job, wanted) < nodes:
        asked = " ".join(need.asked for need in wanted)
        few = f"less than {nodes} nodes of {where} have" if nodes > 1 else f"no node of {where} has"
        yield f"{asked}: {few} all of it; ask for less, or take another partition"


def _named_nodes(job: Job, partition: Partition, hardware: Sequence[Hardware]) -> Iterator[str]:
    kinds = {name: h for h in hardware for name in h.names}
    named = f"cluster.nodelist={job.cluster.nodelist}"
    outside = [name for name in job.nodelist if name not in kinds]
    if outside:
        yield f"{named}: {', '.join(outside)} is not in partition {partition.name}; name others, or another partition"
        return
    for need in needs(job):
        unfit = [name for name in job.nodelist if not need.fits(kinds[name])]
        if unfit:
            yield f"{need.asked}: {', '.join(unfit)} of {named} does not fit ({need.offer([kinds[unfit[0]]])})"


def fitting(job: Job, hardware: Sequence[Hardware]) -> list[str]:
    """The nodes on which the job could run."""
    excluded = set(job.exclude)
    kinds = [h for h in hardware if all(need.fits(h) for need in needs(job))]
    return [name for h in kinds for name in h.names if name not in excluded]


def _count(hardware: Sequence[Hardware], job: Job, wanted: Sequence[Need]) -> int:
    excluded = set(job.exclude)
    kinds = [h for h in hardware if all(need.fits(h) for need in wanted)]
    return sum(len(set(h.names) - excluded) for h in kinds)


def needs(job: Job) -> list[Need]:
    """What each node must have."""
    cluster, found = job.cluster, []
    cpus, gpus, kind, memory, tmp = cluster.cpus_per_task, cluster.gpus_per_node, cluster.gpu_type, job.memory, job.tmp
    if cpus > 1:
        found.append(Need(f"cluster.cpus_per_task={cpus}", lambda h: h.cpus >= cpus, _offer("CPUs", lambda h: h.cpus)))
    if gpus:
        asked = f"cluster.gpus_per_node={gpus}" + (f" cluster.gpu_type={kind}" if kind else "")
        found.append(Need(asked, lambda h: h.gpu_count(kind) >= gpus, _gpus))
    if memory is not None:
        found.append(
            Need(f"cluster.mem={cluster.mem}", lambda h: h.memory >= memory, _offer("MiB", lambda h: h.memory))
        )
    if job.by_part is not None:
        asked, size = job.by_part
        found.append(
            Need(f"{asked} ({size} MiB in all)", lambda h: h.memory >= size, _offer("MiB", lambda h: h.memory))
        )
    if tmp:
        disk = _offer("MB of local disk", lambda h: h.tmp)
        found.append(Need(f"cluster.tmp={cluster.tmp}", lambda h: h.tmp >= tmp, disk))
    if job.needs_all or job.needs_one:
        asked = f"cluster.constraint={cluster.constraint}"
        found.append(Need(asked, lambda h: _has_features(job, h), _features))
    return found


def _has_features(job: Job, hardware: Hardware) -> bool:
    if job.needs_one:
        return any(name in hardware.features for name in job.needs_one)
    return all(name in hardware.features for name in job.needs_all)


def _offer(unit: str, of: Callable[[Hardware], int]) -> Callable[[Sequence[Hardware]], str]:
    def say(hardware: Sequence[Hardware]) -> str:
        counts: dict[int, int] = {}
        for h in hardware:
            counts[of(h)] = counts.get(of(h), 0) + len(h.names)
        return ", ".join(f"{nodes} with {amount} {unit}" for amount, nodes in sorted(counts.items(), reverse=True))

    return say


def _gpus(hardware: Sequence[Hardware]) -> str:
    counts: dict[str, int] = {}
    for h in hardware:
        words = " and ".join(f"{count} GPUs {kind or 'without a type'}" for kind, count in h.gpus) or "no GPU"
        counts[words] = counts.get(words, 0) + len(h.names)
    return ", ".join(f"{nodes} with {words}" for words, nodes in counts.items())


def _features(hardware: Sequence[Hardware]) -> str:
    return f"the features {', '.join(sorted({f for h in hardware for f in h.features})) or 'none'}"
