"""Where a demonstration or a drill can take place on this machine, and a cluster that goes away again.

Owns: the choice (isolated nodes, plain nodes, no Slurm), with the reason in a line, and the temporary directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from . import programs
from .cluster import Cluster
from .spec import ClusterSpec


class Ground(str, Enum):
    ISOLATED = "isolated"  # Slurm; each node has its own network, processes and /tmp
    PLAIN = "plain"  # Slurm; a node is a process tree
    LOCAL = "local"  # no Slurm: cluster=local


def choose() -> tuple[Ground, str]:
    """The best ground this machine offers, and in a line what is missing for a better one ("" if nothing is)."""
    if lacking := programs.missing(ClusterSpec()):
        return Ground.LOCAL, programs.how_to_install(ClusterSpec(isolate=True), lacking)
    if lacking := programs.missing(ClusterSpec(isolate=True)):
        return Ground.PLAIN, programs.how_to_install(ClusterSpec(isolate=True), lacking)
    if error := namespaces_denied():
        who = "root" if os.geteuid() == 0 else "an ordinary user"
        return Ground.PLAIN, f"this machine does not let {who} make namespaces ({error})"
    return Ground.ISOLATED, ""


_PROBE = """
import os, sys
from {package} import linux
wanted = linux.NEW_NETWORK | linux.NEW_MOUNT
try:
    linux.unshare(wanted) if os.geteuid() == 0 else linux.new_user_namespace(wanted)
    linux.make_mounts_private()
    linux.unshare(linux.NEW_PID | linux.NEW_IPC | linux.NEW_HOSTNAME)
except OSError as e:
    sys.exit(str(e))
"""


def namespaces_denied() -> str:
    """The kernel's words if this user cannot make the namespaces of isolated nodes, else ""."""
    code = _PROBE.format(package=__package__)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


@contextmanager
def temporary_cluster(spec: ClusterSpec, directory: Path | None = None) -> Iterator[Cluster]:
    """A cluster in a directory of its own below /tmp, both gone at the end, whatever happens. Raises as Cluster.start.

    Even if this process is killed the cluster's keeper, who sees that, takes the cluster down.
    """
    base = directory or short_directory("stoker")
    try:
        with Cluster.start(spec, base / "c") as cluster:
            yield cluster
    finally:
        shutil.rmtree(base, ignore_errors=True)


def short_directory(prefix: str) -> Path:
    """A new directory; /tmp whatever TMPDIR says, because sockets below it allow only short names."""
    base = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir="/tmp"))
    base.chmod(0o755)  # daemons and jobs of other users pass through; what is private lies in directories that say so
    return base


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived; what Ctrl-C does is done."""


@contextmanager
def orderly_end() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that what was started is taken down."""

    def on_signal(number: int, _frame: object) -> None:
        raise Terminated(signal.Signals(number).name)

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stoker_argv(argv: Sequence[str]) -> list[str]:
    """`stoker ...` with this interpreter and package."""
    return [sys.executable, "-m", "stoker.launcher.cli", *argv]
