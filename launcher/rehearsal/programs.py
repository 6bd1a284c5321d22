"""Where the programs of a cluster are, which are missing, and which version of Slurm this is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from .spec import MARKER_FILE, ClusterSpec

CLIENTS = (
    *("sbatch", "srun", "salloc", "squeue", "scancel", "scontrol", "sinfo", "sattach", "sbcast"),
    *("sacct", "sacctmgr", "sdiag", "sprio", "sreport", "sshare", "sstat"),
)
_SYSTEM_PATH = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin")
_BASE = "apt-get install slurm-wlm munge iproute2 procps"
_DATABASE = "apt-get install mariadb-server slurmdbd"


def search_path(spec: ClusterSpec, path: str | None = None) -> str:
    """PATH for the cluster's daemons and clients: another build first if one is named, then ours, then sbin."""
    prefix = [f"{spec.slurm_prefix}/bin", f"{spec.slurm_prefix}/sbin"] if spec.slurm_prefix else []
    given = (os.environ.get("PATH", os.defpath) if path is None else path).split(os.pathsep)
    # A shell may have another cluster's commands first in its PATH: those would go there.
    own = [part for part in given if part and not os.path.exists(f"{os.path.dirname(part)}/{MARKER_FILE}")]
    wanted = [*prefix, *own, *_SYSTEM_PATH]
    return os.pathsep.join(dict.fromkeys(wanted))


def needed(spec: ClusterSpec) -> tuple[str, ...]:
    programs = ["slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel", "munged"]
    if spec.isolate:
        programs += ["ip", "nsenter"]
    if spec.database:
        programs += ["slurmdbd", "sacct", "sacctmgr", "mariadbd", "mariadb-install-db"]
    return tuple(programs)


def missing(spec: ClusterSpec) -> tuple[str, ...]:
    """Programs that this cluster needs and the machine lacks."""
    path = search_path(spec)
    return tuple(name for name in needed(spec) if shutil.which(name, path=path) is None)


def how_to_install(spec: ClusterSpec, lacking: tuple[str, ...]) -> str:
    """One line for people: what lacks and the command that brings it (Debian, Ubuntu)."""
    base_lacks = any(name in lacking for name in needed(ClusterSpec(isolate=spec.isolate)))
    commands = [_BASE] if base_lacks else []
    commands += [_DATABASE] if spec.database else []
    return f"not installed: {', '.join(lacking)}; as root: {' && '.join(commands)}"


def slurm_version(path: str) -> tuple[int, int]:
    """(year, month) of the Slurm release on `path`, such as (22, 5). Raises ValueError when it does not say."""
    argv = [shutil.which("slurmctld", path=path) or "slurmctld", "-V"]
    text = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False).stdout
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"`slurmctld -V` printed {text!r}: expected a version such as 22.05.8")
    return int(match[1]), int(match[2])
