"""What a site's Slurm is, as values, and the parsers of what its commands print about it.

Owns: Site and its parts. Asking is site_ask.py's, keeping the slow part is site_cache.py's, holding a run against it is
lints.py's. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..conf.slurm_gpus import listed
from ..conf.slurm_memory import shown_memory
from ..conf.slurm_time import parse_elapsed, parse_time
from .slurm_text import records

_NOTHING = {"", "(null)", "N/A", "ALL", "NONE", "UNLIMITED"}
SEPARATOR = "\x1f"  # between the cells that we ask sinfo for; no node's name or reason has it


@dataclass(frozen=True)
class Partition:
    """A line of slurm.conf, as far as it decides what a run gets. None: Slurm sets no limit, or everybody may."""

    name: str
    is_default: bool = False
    state: str = "UP"  # or DOWN (jobs wait), DRAIN and INACTIVE (jobs are refused)
    is_hidden: bool = False
    max_time: int | None = None  # seconds
    default_time: int | None = None  # seconds; None: max_time counts
    total_nodes: int = 0
    min_nodes: int = 0  # per job
    max_nodes: int | None = None  # per job
    max_cpus: int | None = None  # per node
    max_memory: int | None = None  # MiB per node of a job
    preempt_mode: str = ""
    grace_time: int = 0  # seconds
    tier: int = 1  # PriorityTier: the partition with the higher one preempts
    qos: str | None = None  # whose limits count for every job
    allow_accounts: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] | None = None
    deny_qos: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] | None = None
    needs_reservation: bool = False


@dataclass(frozen=True)
class Hardware:
    """Nodes that are alike."""

    names: tuple[str, ...]
    partitions: tuple[str, ...]
    cpus: int
    memory: int  # MiB
    tmp: int  # MB of node-local disk
    gpus: tuple[tuple[str, int], ...]  # (type as the site names it, "" if it does not; count)
    features: tuple[str, ...]

    def gpu_count(self, kind: str | None = None) -> int:
        """GPUs per node, of one type or of all."""
        return sum(count for name, count in self.gpus if kind is None or name.lower() == kind.lower())


@dataclass(frozen=True)
class Qos:
    name: str
    grace_time: int = 0  # seconds
    preempts: tuple[str, ...] = ()
    preempt_mode: str = ""
    flags: tuple[str, ...] = ()
    max_time: int | None = None  # seconds
    max_tres: tuple[tuple[str, int], ...] = ()  # per job: nodes, CPUs, gres/gpu, memory in MiB; and so below
    max_tres_user: tuple[tuple[str, int], ...] = ()  # all jobs of a user together
    group_tres: tuple[tuple[str, int], ...] = ()  # all jobs together
    max_jobs_user: int | None = None  # running
    max_submit_user: int | None = None  # running and waiting


@dataclass(frozen=True)
class Association:
    """That a user may charge an account."""

    account: str
    partition: str = ""  # "" = all
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    max_jobs: int | None = None
    max_submit: int | None = None


@dataclass(frozen=True)
class Accounting:
    qos: tuple[Qos, ...]
    associations: tuple[Association, ...]  # of this user


@dataclass(frozen=True)
class Inventory:
    """What changes seldom and takes long to ask: kept for hours."""

    hardware: tuple[Hardware, ...] = ()
    accounting: Accounting | None = None  # None: there is none, or it does not answer
    has_pyxis: bool | None = None  # whether srun here knows --container-image


@dataclass(frozen=True)
class Probe:
    """What `stoker site --probe` saw on a node."""

    host: str
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Site:
    """What a launch is held against."""

    settings: Mapping[str, str]  # slurm.conf, as Slurm shows it
    partitions: tuple[Partition, ...]
    out_of_service: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # node -> (state, reason)
    inventory: Inventory = Inventory()
    age: float = 0.0  # seconds since the inventory was taken
    probes: Mapping[str, Probe] = field(default_factory=dict)  # by partition: what a node of it was seen to have

    @property
    def has_accounts(self) -> bool:
        return "slurmdbd" in self.settings.get("AccountingStorageType", "")

    def enforces(self, what: str) -> bool:
        """Whether AccountingStorageEnforce has a word: associations, limits, qos, ..."""
        words = self.settings.get("AccountingStorageEnforce", "").lower().split(",")
        # limits and qos imply associations, "all" implies all of them.
        implied = what == "associations" and {"limits", "qos", "safe", "wckeys"} & set(words)
        return what in words or "all" in words or bool(implied)

    def hardware_of(self, partition: Partition) -> tuple[Hardware, ...] | None:
        """The nodes of a partition; None if not all of them can be seen (powered down in a cloud, PrivateData)."""
        found = tuple(h for h in self.inventory.hardware if partition.name in h.partitions)
        return found if sum(len(h.names) for h in found) == partition.total_nodes else None

    @property
    def sees_all_nodes(self) -> bool:
        return bool(self.partitions) and all(self.hardware_of(p) is not None for p in self.partitions)


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """From `scontrol show partition`."""
    return tuple(_partition(fields) for fields in records(text, "PartitionName"))


def _partition(fields: Mapping[str, str]) -> Partition:
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        state=fields.get("State", "UP"),
        is_hidden=fields.get("Hidden") == "YES",
        max_time=_limit(fields.get("MaxTime", "")),
        default_time=_limit(fields.get("DefaultTime", "")),
        total_nodes=number(fields.get("TotalNodes", "")) or 0,
        min_nodes=number(fields.get("MinNodes", "")) or 0,
        max_nodes=number(fields.get("MaxNodes", "")),
        max_cpus=number(fields.get("MaxCPUsPerNode", "")),
        max_memory=number(fields.get("MaxMemPerNode", "")),
        preempt_mode=fields.get("PreemptMode", ""),
        grace_time=number(fields.get("GraceTime", "")) or 0,
        tier=number(fields.get("PriorityTier", "")) or 0,
        qos=(names(fields.get("QoS", "")) or (None,))[0],
        allow_accounts=names(fields.get("AllowAccounts", "")) or None,
        deny_accounts=names(fields.get("DenyAccounts", "")),
        allow_qos=names(fields.get("AllowQos", "")) or None,
        deny_qos=names(fields.get("DenyQos", "")),
        allow_groups=names(fields.get("AllowGroups", "")) or None,
        needs_reservation=fields.get("ReqResv") == "YES",
    )


def _limit(text: str) -> int | None:
    """A time limit in seconds; None for UNLIMITED, NONE and what cannot be read: it is not judged then."""
    try:
        return parse_time(text)
    except ValueError:
        return None


def number(text: str) -> int | None:
    """A whole number; None for UNLIMITED, N/A and the like."""
    return int(text) if text.isascii() and text.isdigit() else None


def names(text: str) -> tuple[str, ...]:
    """Words with commas between them; none for (null), ALL and the like."""
    return () if text.strip() in _NOTHING else tuple(word for word in text.split(",") if word)


def parse_hardware(text: str) -> tuple[Hardware, ...]:
    """From `scontrol show node`: nodes that are alike, together."""
    alike: dict[Hardware, list[str]] = {}
    for fields in records(text, "NodeName"):
        kind = Hardware(
            names=(),
            partitions=names(fields.get("Partitions", "")),
            cpus=number(fields.get("CPUTot", "")) or 0,
            memory=number(fields.get("RealMemory", "")) or 0,
            tmp=number(fields.get("TmpDisk", "")) or 0,
            gpus=_gpus(fields.get("Gres", "")),
            features=names(fields.get("AvailableFeatures", "")),
        )
        alike.setdefault(kind, []).append(fields["NodeName"])
    return tuple(
        Hardware(tuple(n), k.partitions, k.cpus, k.memory, k.tmp, k.gpus, k.features) for k, n in alike.items()
    )


def _gpus(gres: str) -> tuple[tuple[str, int], ...]:
    try:
        return tuple((gpus.type or "", gpus.count) for gpus in listed(gres))
    except ValueError:
        return ()


def parse_out_of_service(text: str) -> dict[str, tuple[str, str]]:
    """From sinfo's rows node, state, reason (SEPARATOR between them), one per node and partition."""
    rows = (line.split(SEPARATOR) for line in text.splitlines())
    return {row[0].strip(): (row[1].strip(), row[2].strip()) for row in rows if len(row) == 3}


def parse_licenses(text: str) -> dict[str, int]:
    """From `scontrol show licenses`: how many there are of each."""
    return {r["LicenseName"]: number(r.get("Total", "")) or 0 for r in records(text, "LicenseName")}


def tres(text: str) -> tuple[tuple[str, int], ...]:
    """`node=2,gres/gpu=16,mem=100G`: memory in MiB."""
    found = []
    for word in text.split(","):
        key, _, value = word.partition("=")
        amount = _memory(value) if key == "mem" else number(value)
        if amount is not None:
            found.append((key, amount))
    return tuple(found)


def _memory(text: str) -> int | None:
    try:
        return shown_memory(text)
    except ValueError:
        return None


def _rows(text: str) -> Iterable[dict[str, str]]:
    """`sacctmgr --parsable2` with its header: a cell's column is known by its name, whatever the version prints."""
    lines = [line.split("|") for line in text.splitlines() if "|" in line]
    return (dict(zip(lines[0], row, strict=False)) for row in lines[1:]) if lines else ()


def parse_qos(text: str) -> tuple[Qos, ...]:
    """From `sacctmgr --parsable2 show qos`."""
    return tuple(
        Qos(
            name=row["Name"],
            grace_time=_seconds(row.get("GraceTime", "")) or 0,
            preempts=names(row.get("Preempt", "")),
            preempt_mode=row.get("PreemptMode", ""),
            flags=names(row.get("Flags", "")),
            max_time=_seconds(row.get("MaxWall", "")),
            max_tres=tres(row.get("MaxTRES", "")),
            max_tres_user=tres(row.get("MaxTRESPU", "")),
            group_tres=tres(row.get("GrpTRES", "")),
            max_jobs_user=number(row.get("MaxJobsPU", "")),
            max_submit_user=number(row.get("MaxSubmitPU", "")),
        )
        for row in _rows(text)
        if row.get("Name")
    )


def parse_associations(text: str) -> tuple[Association, ...]:
    """From `sacctmgr --parsable2 show association` of one user."""
    return tuple(
        Association(
            account=row["Account"],
            partition=row.get("Partition", ""),
            qos=names(row.get("QOS", "")),
            default_qos=row.get("Def QOS", ""),
            max_jobs=number(row.get("MaxJobs", "")),
            max_submit=number(row.get("MaxSubmit", "")),
        )
        for row in _rows(text)
        if row.get("Account") and row.get("User", "-")
    )


def _seconds(text: str) -> int | None:
    """A time of sacctmgr, [days-]hours:minutes:seconds, to the second; None if there is none."""
    try:
        return parse_elapsed(text)
    except ValueError:
        return None


def number_of_seconds(text: str) -> int | None:
    """`30 sec` of `scontrol show config`."""
    return number(text.split()[0]) if text.split() else None
