"""CPU binding: each worker to its share of the allowed CPUs near its GPU. Pure: facts in, sets of CPUs out.

Owns: which GPU a local rank has, and how CPUs are split. Does not own: setting the affinity (the forked worker does).
Never outside of what the agent may use, and nothing where it could only harm: too few cores, or CPUs that Slurm counts
and the machine does not have. Memory follows by first touch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .fabric_sysfs import Facts, Gpu, Port, share_switch

Cpus = frozenset[int]

LEAST_CORES = 2  # of a share: a worker has threads besides its own (prefetch, gloo's, NCCL's)


@dataclass(frozen=True)
class Seat:
    """Where one worker works."""

    cpus: Cpus | None = None  # None: as the agent
    gpu: str | None = None  # PCI address
    port: str | None = None  # the rail nearest to it; told, not set: NCCL chooses by the same distance itself

    def describe(self) -> dict[str, str]:
        cpus = {"cpus": format_cpus(self.cpus)} if self.cpus is not None else {}
        return cpus | {k: v for k, v in (("gpu", self.gpu), ("port", self.port)) if v is not None}


def seats(facts: Facts, rails: Sequence[Port], environ: Mapping[str, str], allowed: Cpus, count: int) -> list[Seat]:
    """One seat per local rank. `allowed`: CPUs that the agent may use."""
    gpus = gpus_of_workers(facts.gpus, environ, count)
    near = [(g.cpus & allowed) if g is not None else frozenset() for g in gpus]
    cores = [core & allowed for core in facts.siblings if core & allowed]
    is_ours = is_given(len(allowed), max((len(c) for c in cores), default=1), environ)
    # Others may work on the same CPUs: the right half of the machine is still right, a share of it is not ours.
    shares = split(cores, near) if is_ours else [n or None for n in near]
    shares = [None if s is None or s >= allowed else s for s in shares]
    return [Seat(s, g.address if g else None, _nearest(g, rails)) for s, g in zip(shares, gpus, strict=True)]


def gpus_of_workers(gpus: Sequence[Gpu], environ: Mapping[str, str], count: int) -> list[Gpu | None]:
    """The GPU of each local rank (CUDA device number = local rank); None where it cannot be told.

    CUDA_VISIBLE_DEVICES holds indices or UUIDs. Where Slurm confines a step to its GPUs, indices count those alone, and
    SLURM_STEP_GPUS (or SLURM_JOB_GPUS) says which they are by the numbers of their device files (srun's manual page).
    """
    by_minor = {g.minor: g for g in gpus if g.minor is not None} or dict(enumerate(gpus))
    order: list[Gpu | None] = list(gpus)
    slurm = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = [n.strip() for n in visible.split(",")] if visible is not None else None
    if slurm and all(n.isdecimal() for n in slurm.split(",")):
        given = [by_minor.get(int(n)) for n in slurm.split(",")]
        is_global = names is not None and names == slurm.split(",")
        if is_global or names is None:
            return _padded(given, count)
        order = given
    if names is None:
        return _padded(order, count)
    return _padded([_named(n, gpus, order) for n in names], count)


def _named(name: str, gpus: Sequence[Gpu], order: Sequence[Gpu | None]) -> Gpu | None:
    if name.isdecimal():
        return order[int(name)] if int(name) < len(order) else None
    found = [g for g in gpus if g.uuid is not None and name.startswith("GPU-") and g.uuid.startswith(name)]
    return found[0] if len(found) == 1 else None


def _padded(found: Sequence[Gpu | None], count: int) -> list[Gpu | None]:
    return [found[i] if i < len(found) else None for i in range(count)]


def is_given(allowed: int, threads: int, environ: Mapping[str, str]) -> bool:
    """Whether the allowed CPUs are this job's own: Slurm counts as many (whole cores of `threads` may be rounded up).

    Fewer than counted: a test cluster that declares CPUs it has not. More: a site that does not confine its jobs.
    """
    count = environ.get("SLURM_CPUS_ON_NODE", "")
    return count.isdecimal() and int(count) <= allowed <= int(count) * threads


def split(cores: Sequence[Cpus], near: Sequence[Cpus]) -> list[Cpus | None]:
    """Even parts of whole cores for each worker: of those near its GPU, else of what is near nobody's.

    Workers for which there are too few cores share (near ones), or are not bound (None).
    """
    shares: list[Cpus | None] = [None] * len(near)
    everybody = frozenset().union(*near)
    for group in dict.fromkeys(near):
        members = [i for i, n in enumerate(near) if n == group]
        # A core belongs to the group if one of its threads does.
        mine = [c for c in cores if (c & group if group else not c & everybody)]
        if len(mine) < LEAST_CORES * len(members):
            for i in members:
                shares[i] = group or None
            continue
        for k, i in enumerate(members):
            first, last = k * len(mine) // len(members), (k + 1) * len(mine) // len(members)
            shares[i] = frozenset().union(*mine[first:last])
    return shares


def _nearest(gpu: Gpu | None, rails: Sequence[Port]) -> str | None:
    """The rail behind the same PCIe switch that shares most of the way."""
    if gpu is None:
        return None
    shared = {p.name: sum(a == b for a, b in zip(p.pci, gpu.pci, strict=False)) for p in rails if _is_near(p, gpu)}
    return max(shared, key=lambda name: shared[name], default=None)


def _is_near(port: Port, gpu: Gpu) -> bool:
    return share_switch(port.pci, gpu.pci)


def format_cpus(cpus: Cpus) -> str:
    """`0-3,8`: as the kernel writes it."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
