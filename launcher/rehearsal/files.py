"""The files of a cluster: made at bring-up, removed at take-down. Starts nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from pathlib import Path

from . import config, programs
from .config import Site
from .spec import ClusterSpec, Layout


def refuse_foreign(layout: Layout) -> None:
    """Raise ValueError when the directory holds anything but a cluster or nothing."""
    root = layout.root
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is not a directory")
    if root.is_dir() and not layout.marker.exists() and any(root.iterdir()):
        raise ValueError(f"{root} is neither empty nor a cluster's directory: choose another --dir")


def make_directories(layout: Layout, shared_machine: bool) -> None:
    """Empty directories. `shared_machine`: other users may submit jobs (root's clusters)."""
    for path in layout.directories():
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
    layout.private.chmod(0o700)
    # Not root, every job runs as the cluster's owner whoever submits it, so nobody else may come in.
    layout.root.chmod(0o755 if shared_machine else 0o700)


def write_configuration(spec: ClusterSpec, site: Site) -> None:
    layout = site.layout
    layout.spec.write_text(spec.to_json() + "\n")
    layout.slurm_conf.write_text(config.slurm_conf(spec, site))
    (layout.etc / "gres.conf").write_text(config.gres_conf(spec, layout))
    if spec.topology:
        (layout.etc / "topology.conf").write_text(config.topology_conf(spec))
    (layout.etc / "cgroup.conf").write_text(config.cgroup_conf(site.version))
    for number in range(spec.gpus):
        (layout.devices / f"gpu{number}").symlink_to("/dev/null")
    _write_private(layout.private / "munge.key", os.urandom(128))
    if spec.database:
        _write_private(layout.etc / "slurmdbd.conf", config.slurmdbd_conf(spec, site).encode())
    if spec.isolate:
        (layout.etc / "hosts").write_text(config.hosts(spec, site.hostname))
        machine = Path("/etc/nsswitch.conf")
        (layout.etc / "nsswitch.conf").write_text(config.nsswitch_conf(machine.read_text() if machine.exists() else ""))
        # Where nsswitch.conf does not rule, asking ourselves is refused at once.
        (layout.etc / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")


def _write_private(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)


def enter_argv(layout: Layout, keeper: int) -> list[str]:
    """Command line prefix that runs what follows inside an isolated cluster, beside its controller."""
    argv = ["nsenter", f"--target={keeper}", "--net", "--mount"]
    return argv if os.geteuid() == 0 else [*argv, "--user", "--preserve-credentials"]


def write_clients(layout: Layout, path: str, keeper: int) -> None:
    """Client commands for an isolated cluster: in `bin` scripts that enter it, in `bin-inside` links to the real ones
    (seen under the name of `bin` from inside, so that a path found outside also holds in a job)."""
    enter = shlex.join(enter_argv(layout, keeper))
    for name in programs.CLIENTS:
        real = shutil.which(name, path=path)
        if real is None:
            continue
        script = layout.bin / name
        script.write_text(f'#!/bin/sh\nexec {enter} env --chdir="$PWD" {shlex.quote(real)} "$@"\n')
        script.chmod(0o755)
        (layout.bin_inside / name).symlink_to(real)


def remove(layout: Layout, keep_logs: bool = False) -> None:
    """Remove what bring-up made, but for the marker. Files that others put beside it stay."""
    for path in layout.directories():
        if not (keep_logs and path == layout.log):
            _remove_tree(path)
    layout.spec.unlink(missing_ok=True)


def remove_marker(layout: Layout) -> None:
    """The directory is no cluster's any more; it goes too if nothing else is in it."""
    layout.marker.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        layout.root.rmdir()


def _remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        # Jobs may leave directories that even their owner cannot list.
        for directory, _, _ in os.walk(path):
            for entry in os.scandir(directory):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)
        shutil.rmtree(path)


def log_tail(layout: Layout, daemon: str, lines: int = 12) -> list[str]:
    """The last lines a daemon wrote, for people who ask why it died."""
    found: dict[str, str] = {}
    for name in (f"{daemon}.out", f"{daemon}.log"):
        with contextlib.suppress(OSError):
            for line in (layout.log / name).read_text(errors="replace").splitlines():
                # Slurm's daemons write the same lines to both, one time with their name before it, one with the time.
                bare = re.sub(r"^(\[[^]]*\]|\w+:) ", "", line)
                found[bare] = found.pop(bare, line)
    return [line for bare, line in found.items() if bare.strip()][-lines:]
