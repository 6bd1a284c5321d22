"""Rules for what is asked of the cluster and for surviving on it.

Owns: the rules for cluster, resilience and the backend, but for what sbatch is asked for (checks_resources.py). Whether
the site has such a partition, account or node is the launcher's to ask.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .checks_resources import resource_rules
from .problems import Problem
from .sbatch_options import TYPED
from .schema import Backend, ClusterKind, Config
from .secret_names import is_secret, secrets_in
from .slurm_time import format_time, parse_time

CHECK_INTERVAL = 30  # seconds between Slurm's looks at time limits and warnings; compiled in
LONGEST_WARNING = 65535  # seconds; sbatch takes no more

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_RESERVED = ("SLURM_", "SBATCH_", "SRUN_", "STOKER_")
_BY_WORKER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def cluster_rules(config: Config) -> Iterator[Problem]:
    """All rules of this file."""
    yield from _environment(config)
    yield from _processes(config)
    if config.cluster.kind is ClusterKind.slurm:
        yield from resource_rules(config)
        yield from _warning_time(config)
    else:
        yield from _without_slurm(config)


def _environment(config: Config) -> Iterator[Problem]:
    """Keys must not get into the script or the run directory. Their values are not repeated in the messages."""
    for name, value in config.cluster.env.items():
        field = f"cluster.env.{name}"
        if is_secret(name):
            message = "looks like a key or password, which would be written into the run directory; export it before"
            yield Problem(field, None, f"{message} `stoker launch` instead: the job inherits your environment")
        elif not _VARIABLE.fullmatch(name):
            yield Problem(field, value, "no name for a variable; expected letters, digits and _, no digit first")
        elif name.startswith(_RESERVED) or name in _BY_WORKER:
            yield Problem(field, value, "set by Slurm or stoker in the job; leave it out")
        elif name == "OMP_NUM_THREADS":
            yield Problem(field, value, "use cluster.omp_threads")
    for line in config.cluster.setup:
        for name in secrets_in(line):
            message = "keys never go into a run directory; set it in your shell, the job gets your environment, or read"
            yield Problem(
                f"cluster.setup sets {name} to a written-out value", None, f"{message} a file: {name}=$(cat FILE)"
            )
    if config.cluster.python == "":
        yield Problem("cluster.python", "", "expected the path of an interpreter, or null for this one")


def _processes(config: Config) -> Iterator[Problem]:
    cluster, backend = config.cluster, config.parallel.backend
    workers, gpus = cluster.procs_per_node, cluster.gpus_per_node
    if gpus and workers > gpus:
        message = f"more processes than cluster.gpus_per_node={gpus}; each needs a GPU of its own"
        yield Problem("cluster.procs_per_node", str(workers), message)
    elif 0 < workers < gpus:
        message = f"leaves {gpus - workers} of cluster.gpus_per_node={gpus} idle; one process per GPU uses all"
        yield Problem("cluster.procs_per_node", str(workers), message, "warning")
    if cluster.kind is ClusterKind.slurm and backend is Backend.nccl and gpus == 0:
        yield Problem("parallel.backend", "nccl", "needs GPUs; set cluster.gpus_per_node, or take gloo")
    if backend is Backend.gloo and gpus > 0:
        yield Problem("parallel.backend", "gloo", "copies every gradient through the host; nccl is for GPUs", "warning")
    threads = workers * cluster.omp_threads
    if cluster.kind is ClusterKind.slurm and threads > cluster.cpus_per_task > 0:
        message = f"less than {workers} processes x cluster.omp_threads={cluster.omp_threads}: they share these CPUs"
        yield Problem("cluster.cpus_per_task", str(cluster.cpus_per_task), message, "warning")


def _warning_time(config: Config) -> Iterator[Problem]:
    """Slurm looks every 30 s, so the warning may come that much early, and the end that much late."""
    text, warning = config.cluster.time, config.resilience.warning
    limit = None
    if text is not None:
        try:
            limit = parse_time(text)
        except ValueError as e:
            yield Problem("cluster.time", text, str(e))
    if warning > LONGEST_WARNING:
        yield Problem("resilience.warning", str(warning), f"expected at most {LONGEST_WARNING} s; sbatch takes no more")
    elif 0 <= warning < 60:
        message = "may be too short for three steps and a checkpoint, which are then lost; 60 s or more is safer"
        yield Problem("resilience.warning", str(warning), message, "warning")
    if limit is None or warning < 0:
        return
    early = warning + CHECK_INTERVAL
    room = f"warned up to {early} s before the end of cluster.time={text} ({format_time(limit)})"
    if early >= limit:
        message = f"{room}, so before it starts; lower it or ask for more time"
        yield Problem("resilience.warning", str(warning), message)
    elif 2 * early > limit:
        message = f"{room}: less than half of it trains; lower it or ask for more time"
        yield Problem("resilience.warning", str(warning), message, "warning")


def _without_slurm(config: Config) -> Iterator[Problem]:
    cluster = config.cluster
    fields = [field for field in TYPED.values() if field not in ("nodes", "cpus_per_task")]
    for name in (*fields, "gres", "gpu_type", "sbatch"):
        if getattr(cluster, name):
            yield Problem(f"cluster.{name}", None, "has no effect with cluster.kind=local; leave it out", "warning")
