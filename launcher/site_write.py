"""A cluster profile from what was learnt: YAML for the group `cluster`, each value with the reason beside it.

Owns: its text, and which partition and nodes it is for. Pure; writing the file is site_verb.py's.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..conf.slurm_time import format_time
from .lints_preemption import preemption
from .site import Hardware, Partition, Site
from .site_probe import Machine

_LONGEST = 86400  # seconds; longer jobs wait longer


def choose(site: Site, name: str | None) -> Partition:
    """The partition that the profile is for: the one named, else the default one, unless GPUs are elsewhere.

    Raises:
        ValueError: there is none of that name.
    """
    known = {p.name: p for p in site.partitions}
    if name is not None:
        if name not in known:
            raise ValueError(f"--partition {name}: there is none here; known: {', '.join(known)}")
        return known[name]
    usable = [p for p in site.partitions if p.state == "UP" and not p.is_hidden and not p.needs_reservation]
    usable = usable or list(site.partitions)
    default = [p for p in usable if p.is_default] or usable[:1]
    with_gpus = [p for p in usable if _gpus(site, p)]
    if _gpus(site, default[0]) or not with_gpus:
        return default[0]
    return max(with_gpus, key=lambda p: _gpus(site, p))


def _gpus(site: Site, partition: Partition) -> int:
    return sum(h.gpu_count() * len(h.names) for h in site.hardware_of(partition) or ())


def profile(site: Site, partition: Partition, machine: Machine, name: str) -> str:
    """The text of `cluster/NAME.yaml`."""
    hardware = max(site.hardware_of(partition) or (), key=lambda h: (h.gpu_count(), len(h.names)), default=None)
    lines = [
        "# @package _global_",
        f"# Cluster {_said(site, 'ClusterName')}, Slurm {_said(site, 'SLURM_VERSION')}: what `stoker site` found.",
        "# Look it through and change what you know better. The command line wins over it:",
        f"#   stoker launch --config-dir DIR cluster={name} cluster.nodes=4 ...    (this is DIR/cluster/{name}.yaml)",
        "cluster:",
        *(f"  {line}" for line in _cluster(site, partition, hardware)),
        "",
        "resilience:",
        *(f"  {line}" for line in _resilience(site, partition)),
        "",
        *_containers(site, machine),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _said(site: Site, setting: str) -> str:
    return site.settings.get(setting, "?")


def _cluster(site: Site, partition: Partition, hardware: Hardware | None) -> Iterator[str]:
    others = ", ".join(p.name for p in site.partitions if p.name != partition.name and not p.is_hidden)
    yield "kind: slurm"
    yield f"partition: {_quoted(partition.name)}" + (f"  # there are also: {others}" if others else "")
    yield f"nodes: {partition.min_nodes or 1}  # at most {_most_nodes(partition)} here"
    gpus = hardware.gpu_count() if hardware else 0
    kinds = {kind for h in site.hardware_of(partition) or () for kind, _ in h.gpus}
    yield f"gpus_per_node: {gpus}" + ("" if hardware else "  # the nodes cannot be seen from here: fill in")
    if gpus and len(kinds) > 1 and hardware is not None:
        yield f"gpu_type: {_quoted(hardware.gpus[0][0])}  # there are: {', '.join(sorted(k for k in kinds if k))}"
    if gpus and "cons_tres" not in _said(site, "SelectType"):
        yield f"gpu_request: gres  # {_said(site, 'SelectType')} knows no --gpus-per-node"
    yield f"procs_per_node: {gpus or 1}" + ("  # one per GPU" if gpus else "")
    if hardware is not None:
        cpus = min(hardware.cpus, partition.max_cpus or hardware.cpus)
        yield f"cpus_per_task: {cpus}  # for all workers of a node together; a node has {hardware.cpus}"
        threads = max(1, min(16, cpus // (gpus or 1)))
        yield f"omp_threads: {threads}  # of each worker"
    if partition.max_memory is not None:
        yield f"mem: {partition.max_memory}M  # as much as the partition gives"
    else:
        yield 'mem: "0"  # all memory of each node' + (f": {hardware.memory} MiB" if hardware else "")
    limit = _longest(site, partition)
    shown = "no limit" if partition.max_time is None else format_time(partition.max_time)
    yield f"time: {_quoted(format_time(limit))}  # the partition allows {shown}; shorter jobs start sooner"
    yield "# exclusive: true  # share no node with other jobs"
    yield from _account(site)


def _most_nodes(partition: Partition) -> int:
    return min(partition.total_nodes, partition.max_nodes if partition.max_nodes is not None else partition.total_nodes)


def _longest(site: Site, partition: Partition) -> int:
    qos = {q.name: q for q in site.inventory.accounting.qos} if site.inventory.accounting else {}
    by_qos = qos[partition.qos].max_time if partition.qos in qos else None
    return min(limit for limit in (partition.max_time, by_qos, _LONGEST) if limit is not None)


def _account(site: Site) -> Iterator[str]:
    accounting = site.inventory.accounting
    accounts = list(dict.fromkeys(a.account for a in accounting.associations)) if accounting else []
    if len(accounts) > 1:
        yield f"# account: {accounts[0]}  # yours: {', '.join(accounts)}; without it your default one is charged"
    qos = list(dict.fromkeys(q for a in accounting.associations for q in a.qos)) if accounting else []
    if len(qos) > 1:
        yield f"# qos: {qos[0]}  # yours: {', '.join(qos)}"


def _resilience(site: Site, partition: Partition) -> Iterator[str]:
    found = preemption(partition, None, site)
    if found is not None and "CANCEL" in found[0]:
        yield "continuation: chain  # preempted jobs are cancelled here, not requeued"
    else:
        yield "# continuation: chain  # if the site forbids requeue"
    # The warning may come half a minute early, and half of the time should be left to train.
    warning = min(120, max(0, _longest(site, partition) // 2 - 30))
    yield f"warning: {warning}  # seconds before the time limit; three steps and a save must fit"


def _containers(site: Site, machine: Machine) -> Iterator[str]:
    runtime = "pyxis" if site.inventory.has_pyxis else None
    if runtime is None and machine.commands.keys() & {"apptainer", "singularity"}:
        runtime = "apptainer"
    if runtime is not None:
        yield "# container:"
        yield f"#   runtime: {runtime}"
        yield "#   image: /path/of/image" + (".sqsh" if runtime == "pyxis" else ".sif")


def _quoted(text: str) -> str:
    """As YAML reads it back, whatever it is (a time is a number to YAML)."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
