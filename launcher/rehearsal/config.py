"""From a ClusterSpec to the text of Slurm's configuration files, for Slurm 22.05 to 25.05. Pure: text in, text out.

Sources: the slurm.conf, gres.conf, cgroup.conf and slurmdbd.conf manual pages of those versions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from .spec import ClusterSpec, Layout, node_range

NETWORK = "10.217.0"
CONTROLLER_ADDRESS = f"{NETWORK}.1"
PORTS_NEEDED = 2 + 120


@dataclass(frozen=True)
class Site:
    """What config needs to know of the machine: names, Slurm's version (year, month) and the first of our ports."""

    layout: Layout
    hostname: str
    user: str
    version: tuple[int, int]
    first_port: int


def cluster_name(layout: Layout) -> str:
    """A name of its own for each directory, in what Slurm allows (lower case, no dots)."""
    return "stoker_" + hashlib.sha256(str(layout.root).encode()).hexdigest()[:8]


def node_address(spec: ClusterSpec, node: str) -> str:
    return f"{NETWORK}.{10 + spec.node_number(node)}" if spec.isolate else "127.0.0.1"


def controller_address(spec: ClusterSpec) -> str:
    return CONTROLLER_ADDRESS if spec.isolate else "127.0.0.1"


def controller_port(site: Site) -> int:
    return site.first_port


def database_port(site: Site) -> int:
    return site.first_port + 1


def node_port(spec: ClusterSpec, site: Site, node: str) -> int:
    return site.first_port + 1 + spec.node_number(node)


def slurm_conf(spec: ClusterSpec, site: Site) -> str:
    """slurm.conf. Lines of spec.settings take the place of the generated lines with the same key."""
    lines = [
        *_identity(spec, site),
        *_authentication(spec, site),
        *_files(site.layout),
        *_plugins(spec),
        *_timing(spec),
        *_scheduling(spec),
        *_accounting(spec, site),
        *_nodes(spec, site),
        *_partitions(spec),
    ]
    replaced = {line.split("=", 1)[0].lower() for line in spec.settings}
    kept = [line for line in lines if line.split("=", 1)[0].lower() not in replaced]
    return "\n".join([*kept, *spec.settings]) + "\n"


def _identity(spec: ClusterSpec, site: Site) -> list[str]:
    return [
        f"ClusterName={cluster_name(site.layout)}",
        f"SlurmctldHost={site.hostname}({controller_address(spec)})",
        f"SlurmctldPort={controller_port(site)}",
        f"SlurmUser={site.user}",
        f"SlurmdUser={site.user}",
    ]


def _authentication(spec: ClusterSpec, site: Site) -> list[str]:
    # cred_expire is also how long Slurm lets a requeued job wait before it may start again (120 s by default).
    lines = ["AuthType=auth/munge", f"AuthInfo=socket={site.layout.munge_socket},cred_expire={spec.cred_expire}"]
    return [*lines, "CredType=cred/munge"] if site.version < (23, 0) else lines


def _files(layout: Layout) -> list[str]:
    return [
        f"StateSaveLocation={layout.state}",
        f"SlurmdSpoolDir={layout.spool}/%n",
        f"SlurmctldPidFile={layout.run}/slurmctld.pid",
        f"SlurmdPidFile={layout.run}/slurmd-%n.pid",
        f"SlurmctldLogFile={layout.log}/slurmctld.log",
        f"SlurmdLogFile={layout.log}/slurmd-%n.log",
        "SlurmctldDebug=verbose",
        "SlurmdDebug=verbose",
    ]


def _plugins(spec: ClusterSpec) -> list[str]:
    return [
        *(["TopologyPlugin=topology/tree"] if spec.topology else []),
        # No cgroups: they need rights that containers and ordinary users lack.
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=10",
        # Nodes have the CPUs and memory we say, not the machine's.
        "SlurmdParameters=config_overrides",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "DefMemPerCPU=100",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "MailProg=/bin/true",
    ]


def _timing(spec: ClusterSpec) -> list[str]:
    return [
        # A node that was DOWN because it did not answer comes back by itself; one set down by hand does not.
        "ReturnToService=1",
        "SlurmctldTimeout=30",
        f"SlurmdTimeout={spec.slurmd_timeout}",
        f"MessageTimeout={spec.message_timeout}",
        "TCPTimeout=2",
        f"KillWait={spec.kill_wait}",
        f"UnkillableStepTimeout={max(60, 5 * spec.message_timeout)}",
        "InactiveLimit=0",
        "MinJobAge=300",
        "BatchStartTimeout=10",
    ]


def _scheduling(spec: ClusterSpec) -> list[str]:
    parameters = "bf_interval=2,sched_interval=2,sched_min_interval=100000,batch_sched_delay=0"
    lines = [
        "SchedulerType=sched/backfill",
        f"SchedulerParameters={parameters}",
        f"JobRequeue={int(spec.job_requeue)}",
        "MaxArraySize=10001",
        "PreemptType=preempt/partition_prio",
        f"PreemptMode={spec.preempt_mode}",
    ]
    if spec.send_user_signal:
        # The signal that a job asked for with --signal also announces a preemption, in place of SIGTERM.
        lines.append("SlurmctldParameters=preempt_send_user_signal")
    return lines


def _accounting(spec: ClusterSpec, site: Site) -> list[str]:
    if not spec.database:
        return ["AccountingStorageType=accounting_storage/none"]
    lines = [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={controller_address(spec)}",
        f"AccountingStoragePort={database_port(site)}",
        # The connection to slurmdbd finds munge by this line, not by AuthInfo.
        f"AccountingStoragePass={site.layout.munge_socket}",
    ]
    return [*lines, "AccountingStorageTRES=gres/gpu"] if spec.gpus else lines


def _nodes(spec: ClusterSpec, site: Site) -> list[str]:
    lines = ["GresTypes=gpu"] if spec.gpus else []
    kind = f"{spec.gpu_type}:" if spec.gpu_type else ""
    gres = f" Gres=gpu:{kind}{spec.gpus}" if spec.gpus else ""
    further = f" {spec.node_options}" if spec.node_options else ""
    for node in spec.node_names():
        lines.append(
            f"NodeName={node} NodeHostname={node if spec.isolate else site.hostname}"
            f" NodeAddr={node_address(spec, node)} Port={node_port(spec, site, node)} Sockets=1"
            f" CoresPerSocket={spec.cpus} ThreadsPerCore=1 RealMemory={spec.memory}{gres}{further} State=UNKNOWN"
        )
    return lines


def _partitions(spec: ClusterSpec) -> list[str]:
    everywhere = f"Nodes={node_range(spec)} State=UP"
    victim = f"{everywhere} PriorityTier=10 PreemptMode={spec.preempt_mode}"
    return [
        f"PartitionName=main {victim} Default=YES MaxTime=INFINITE GraceTime={spec.grace_time}",
        f"PartitionName=grace0 {victim} MaxTime=INFINITE GraceTime=0",
        f"PartitionName=short {victim} MaxTime={spec.short_minutes} GraceTime={spec.grace_time}",
        f"PartitionName=urgent {everywhere} PriorityTier=100 PreemptMode=OFF MaxTime=INFINITE",
    ]


def topology_conf(spec: ClusterSpec) -> str:
    return "".join(f"{line}\n" for line in spec.topology)


def gres_conf(spec: ClusterSpec, layout: Layout) -> str:
    """gres.conf. Slurm 22.05 counts only GPUs that have a character device; links to /dev/null are ones."""
    if not spec.gpus:
        return "AutoDetect=off\n"
    devices = "gpu0" if spec.gpus == 1 else f"gpu[0-{spec.gpus - 1}]"
    kind = f" Type={spec.gpu_type}" if spec.gpu_type else ""
    return (
        "AutoDetect=off\n"
        f"NodeName={node_range(spec)} Name=gpu{kind} Count={spec.gpus} File={layout.devices}/{devices}"
        " Flags=nvidia_gpu_env\n"
    )


def cgroup_conf(version: tuple[int, int]) -> str:
    """cgroup.conf that keeps cgroups out of it. 23.x has no "disabled" and needs a plugin named; 22.05 wants a line."""
    if version < (23, 0):
        return "CgroupAutomount=no\n"
    plugin = "cgroup/v1" if version < (24, 0) else "disabled"
    return f"CgroupPlugin={plugin}\nIgnoreSystemd=yes\n"


def slurmdbd_conf(spec: ClusterSpec, site: Site) -> str:
    """slurmdbd.conf. The database is reached by a socket in a private directory: there is no password."""
    layout = site.layout
    return "\n".join(
        [
            f"DbdHost={site.hostname}",
            f"DbdAddr={controller_address(spec)}",
            f"DbdPort={database_port(site)}",
            f"SlurmUser={site.user}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={layout.munge_socket},cred_expire={spec.cred_expire}",
            f"LogFile={layout.log}/slurmdbd.log",
            f"PidFile={layout.run}/slurmdbd.pid",
            "DebugLevel=info",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            f"StorageUser={site.user}",
            "StorageLoc=slurm_acct_db",
            "",
        ]
    )


def hosts(spec: ClusterSpec, hostname: str) -> str:
    """/etc/hosts as the isolated nodes see it."""
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{controller_address(spec)} {hostname}"]
    lines += [f"{node_address(spec, node)} {node}" for node in spec.node_names()]
    return "\n".join(lines) + "\n"


def nsswitch_conf(machine: str) -> str:
    """The machine's nsswitch.conf with host names from files only: there is no DNS server in an isolated cluster, and
    a program that looks an address up (torch does, at start) would wait ten seconds for one."""
    lines = [line for line in machine.splitlines() if not line.lstrip().startswith("hosts:")]
    return "\n".join([*lines, "hosts: files"]) + "\n"
