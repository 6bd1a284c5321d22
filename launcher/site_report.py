"""What `stoker site` says: the site in a page, and what follows from it for a run.

Owns: that text. Pure: a Site and Machines in, lines out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..conf.slurm_hostlist import compress
from ..conf.slurm_time import format_time
from .lints_preemption import SHORT_GRACE, preemption
from .site import Hardware, Partition, Qos, Site, number_of_seconds
from .site_probe import RUNTIMES, Machine

_HEAD = ("partition", "state", "nodes", "longest", "default", "preemption", "per node")
_SHOWN = 8  # nodes out of service, QOS


def report(site: Site, here: Machine, node: Machine | None = None) -> str:
    lines = [*_title(site), "", *_partitions(site), "", *_settings(site), "", *_machine(here, "this machine")]
    if site.inventory.has_pyxis is not None:
        lines.append(f"  pyxis        {'srun knows --container-image' if site.inventory.has_pyxis else 'no'}")
    if node is not None:
        lines += ["", *_machine(node, "a node")]
    lines += ["", "what follows for stoker:", *(f"- {line}" for line in consequences(site, here, node))]
    return "\n".join(lines)


def _title(site: Site) -> Iterator[str]:
    version, name = site.settings.get("SLURM_VERSION", "?"), site.settings.get("ClusterName", "?")
    yield f"Slurm {version}, cluster {name}, controller {site.settings.get('SlurmctldHost[0]', '?')}"
    if site.age:
        yield f"nodes and accounts as of {site.age / 60:.0f} minutes ago (--refresh asks anew); the rest as of now"


def _partitions(site: Site) -> Iterator[str]:
    rows = [_HEAD, *(_row(p, site) for p in site.partitions)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    away = list(site.out_of_service.items())
    for name, (state, reason) in away[:_SHOWN]:
        yield f"out of service: {name} {state}" + (f": {reason}" if reason not in ("", "none") else "")
    if len(away) > _SHOWN:
        yield f"out of service: {len(away) - _SHOWN} more: {compress(sorted(n for n, _ in away[_SHOWN:]))}"


def _row(partition: Partition, site: Site) -> tuple[str, ...]:
    low, high = partition.min_nodes, partition.max_nodes
    per_job = f" ({low or 1}-{high if high is not None else partition.total_nodes} a job)" if low or high else ""
    found = preemption(partition, None, site)
    hardware = site.hardware_of(partition)
    return (
        partition.name + ("*" if partition.is_default else ""),
        partition.state.lower() + (", hidden" if partition.is_hidden else ""),
        f"{partition.total_nodes}{per_job}",
        "unlimited" if partition.max_time is None else format_time(partition.max_time),
        "-" if partition.default_time is None else format_time(partition.default_time),
        "-" if found is None else f"{found[0]}, {found[1]} s",
        "not all visible" if hardware is None else _nodes(hardware),
    )


def _nodes(hardware: Sequence[Hardware]) -> str:
    counts: dict[str, int] = {}
    for h in hardware:
        counts[_kind(h)] = counts.get(_kind(h), 0) + len(h.names)
    return "; ".join(f"{count} x {kind}" for kind, count in counts.items()) or "-"


def _kind(hardware: Hardware) -> str:
    gpus = [f"{count} GPU {kind}".rstrip() for kind, count in hardware.gpus]
    features = [f"[{','.join(hardware.features)}]"] if hardware.features else []
    return " ".join([f"{hardware.cpus} CPU", f"{hardware.memory / 1024:.0f} GiB", *gpus, *features])


def _settings(site: Site) -> Iterator[str]:
    def setting(name: str) -> str:
        return site.settings.get(name, "?")

    mode, wait = setting("PreemptMode"), setting("KillWait")
    yield f"preemption     {setting('PreemptType')}, PreemptMode={mode}, KillWait={wait}"
    yield f"requeue        JobRequeue={setting('JobRequeue')}"
    yield f"arrays         MaxArraySize={setting('MaxArraySize')} (the largest index is one less)"
    yield f"accounting     {_accounting(site)}"
    if site.inventory.accounting is not None:
        qos = [_qos(q) for q in site.inventory.accounting.qos]
        yield f"QOS            {', '.join(qos[:_SHOWN])}{', ...' if len(qos) > _SHOWN else ''}"
    yield f"topology       {setting('TopologyPlugin')}"
    yield f"hidden         PrivateData={setting('PrivateData')}"
    plugins = [
        f"{n}={setting(n)}" for n in ("JobSubmitPlugins", "CliFilterPlugins") if setting(n) not in ("?", "(null)")
    ]
    if plugins:
        yield f"submission     {', '.join(plugins)}: the site looks at every job, and may change or refuse it"


def _accounting(site: Site) -> str:
    if not site.has_accounts:
        return f"none ({site.settings.get('AccountingStorageType', '?')})"
    accounting = site.inventory.accounting
    enforced = site.settings.get("AccountingStorageEnforce", "none")
    if accounting is None:
        return f"slurmdbd, which does not answer; enforced: {enforced}"
    yours = ", ".join(dict.fromkeys(a.account for a in accounting.associations)) or "none"
    return f"slurmdbd; enforced: {enforced}; your accounts: {yours}"


def _qos(qos: Qos) -> str:
    limits = [format_time(qos.max_time)] if qos.max_time is not None else []
    limits += [f"{key}={limit} a job" for key, limit in qos.max_tres]
    limits += [f"{key}={limit} a user" for key, limit in qos.max_tres_user]
    return qos.name + (f" ({', '.join(limits)})" if limits else "")


def _machine(machine: Machine, what: str) -> Iterator[str]:
    yield f"{what}: {machine.host}, Linux {machine.kernel}, python3 {machine.python or 'not there'}"
    commands = [c for c in ("scontrol", "sbatch", "srun") if c in machine.commands]
    yield f"  Slurm        {', '.join(commands) or 'no commands'}"
    yield f"  containers   {', '.join(c for c in RUNTIMES if c in machine.commands) or 'none on the PATH'}"
    if machine.gpus:
        yield f"  GPUs         {len(machine.gpus)}: {', '.join(dict.fromkeys(machine.gpus))}"
    ports = [f"{d.name}/{d.port} {d.layer} {d.state} {d.rate}".strip() for d in machine.devices]
    yield f"  RDMA         {'; '.join(ports) or 'no devices'}" + (f"; memlock {machine.memlock}" if ports else "")
    yield f"  local disk   {', '.join(f'{d} ({size // 1024} GiB free)' for d, size in machine.disks) or 'none'}"
    if machine.skew is not None:
        yield f"  clock        {f'{machine.skew:+.0f} s from here' if machine.skew else 'as here, to a second or so'}"


def consequences(site: Site, here: Machine, node: Machine | None = None) -> list[str]:
    """What a person should do or know, one sentence or two each."""
    return [*_of_preemption(site), *_of_submission(site), *_of_sight(site), *_of_machines(site, here, node)]


def _of_preemption(site: Site) -> Iterator[str]:
    wait = number_of_seconds(site.settings.get("KillWait", "")) or 0
    modes: dict[str, list[str]] = {}
    short = []
    for partition in site.partitions:
        found = preemption(partition, None, site)
        if found is not None:
            modes.setdefault(found[0], []).append(partition.name)
            if found[1] < SHORT_GRACE and "SUSPEND" not in found[0]:
                short.append(f"{partition.name} ({found[1]} s)")
    for mode, names in modes.items():
        where = f"in {_list(names)}"
        if "CANCEL" in mode:
            yield f"preempted jobs are cancelled {where}: use resilience.continuation=chain there"
        elif "REQUEUE" in mode:
            yield f"preempted jobs are requeued {where}: resilience.continuation=requeue (the default) goes on alone"
        elif "SUSPEND" in mode:
            yield f"preempted jobs are stopped where they stand {where}, and go on later"
    if short:
        yield (
            f"grace is short in {_list(short)}, then {wait} s until everything is killed: it may be too little for a "
            "checkpoint, so keep checkpoint.interval small there"
        )
    if not modes:
        yield "no partition shows preemption; time limits and broken nodes remain"
    if site.settings.get("JobRequeue") == "0":
        yield "JobRequeue=0: stoker's jobs ask for requeue by themselves; if the site refuses, use continuation=chain"
    if "preempt_send_user_signal" in site.settings.get("SlurmctldParameters", ""):
        yield "preempt_send_user_signal: a preemption is announced by the job's own warning signal"


def _list(words: Sequence[str]) -> str:
    return ", ".join(words[:_SHOWN]) + (f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else "")


def _of_submission(site: Site) -> Iterator[str]:
    if not any(p.is_default for p in site.partitions):
        yield "there is no default partition: set cluster.partition"
    if site.settings.get("EnforcePartLimits", "").upper() == "NO":
        yield (
            "EnforcePartLimits=NO: Slurm takes jobs that exceed a partition's limits and lets them wait for ever; "
            "stoker refuses them"
        )
    if "cons_tres" not in site.settings.get("SelectType", "cons_tres"):
        yield f"{site.settings['SelectType']} knows no --gpus-per-node: set cluster.gpu_request=gres"
    accounting = site.inventory.accounting
    accounts = list(dict.fromkeys(a.account for a in accounting.associations)) if accounting else []
    if len(accounts) > 1:
        yield f"you have several accounts: cluster.account chooses ({', '.join(accounts)})"
    if accounting and any(a.max_submit is not None and a.max_submit < 2 for a in accounting.associations):
        yield "MaxSubmitJobs=1 for you: a chain, which keeps a second job waiting, is not possible"
    if not site.has_accounts:
        age = number_of_seconds(site.settings.get("MinJobAge", "")) or 300
        yield f"no accounts are kept: Slurm forgets an ended job after {age} s; how a run ended stands in its directory"
    kinds = {kind for h in site.inventory.hardware for kind, _ in h.gpus}
    if len(kinds) > 1:
        yield f"there are several types of GPU: cluster.gpu_type chooses ({', '.join(sorted(filter(None, kinds)))})"
    plugin = site.settings.get("TopologyPlugin", "")
    if "tree" in plugin or "block" in plugin:
        yield f"{plugin}: cluster.switches keeps a job on few switches; ranks are ordered by them"


def _of_sight(site: Site) -> Iterator[str]:
    unseen = [p.name for p in site.partitions if site.hardware_of(p) is None]
    if unseen:
        yield f"not all nodes of {', '.join(unseen)} can be seen: what nodes have is not held against a launch there"
    private = site.settings.get("PrivateData", "none")
    if private not in ("none", "(null)", ""):
        yield f"PrivateData={private} hides what is not yours; what is not visible is not judged"


def _of_machines(site: Site, here: Machine, node: Machine | None) -> Iterator[str]:
    machine, where = (here, "here; --probe looks on a node") if node is None else (node, "on the node")
    if site.inventory.has_pyxis:
        yield "containers: container.runtime=pyxis"
    if "apptainer" in machine.commands or "singularity" in machine.commands:
        yield f"containers: container.runtime=apptainer ({where})"
    down = [f"{d.name}/{d.port}" for d in machine.devices if d.state not in ("ACTIVE", "")]
    if down:
        yield f"RDMA ports that are not active ({where}): {', '.join(down)}"
    if machine.devices and machine.memlock not in ("unlimited", "?"):
        yield f"locked memory is limited to {machine.memlock} KiB ({where}): RDMA needs `unlimited`; ask the site"
    if node is None:
        return
    if "scontrol" not in node.commands:
        yield "no scontrol on the node: a run cannot requeue itself there, and a chain needs sbatch; ask the site"
    if node.skew:
        side = "ahead of" if node.skew > 0 else "behind"
        yield f"the node's clock is {abs(node.skew):.0f} s {side} this machine's: tell the site"
    if node.python is None:
        yield "no python3 on the node: set cluster.python to one that it has"
