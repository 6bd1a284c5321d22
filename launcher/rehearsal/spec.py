"""What a rehearsal cluster is (ClusterSpec) and where its files lie (Layout). Pure values, no processes.

The spec is written to DIR/spec.json, so that every later command knows what it deals with. How the spec becomes
Slurm's configuration is in config.py.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_NODES = 120
# The longest socket that Slurm makes below a cluster directory (a step's, in a node's spool) is about 42 bytes longer
# than the directory, and the kernel takes 107 bytes in all.
LONGEST_DIRECTORY = 64
MARKER_FILE = ".stoker-cluster"


@dataclass(frozen=True)
class ClusterSpec:
    """Size, kind and timing of a cluster. Times are seconds unless the name says otherwise.

    `isolate` gives each node its own address, host name, process table, /tmp and /dev/shm; `share` lists directories
    below /tmp that its nodes still have in common. `database` adds slurmdbd and a private MariaDB, so that sacct works.
    CPUs, memory (MB), GPUs and their type are what Slurm is told, whatever the machine has. `node_options` are further
    words of each node's line in slurm.conf ("Features=ib TmpDisk=900000"). `settings` are slurm.conf lines
    ("Key=Value") that replace the generated ones of the same key. `slurm_prefix` points at another build of Slurm.
    `topology` are lines of topology.conf ("SwitchName=..."); without any, all nodes are alike.
    Raises ValueError for values no cluster can have.
    """

    nodes: int = 4
    cpus: int = 8
    memory: int = 8000
    gpus: int = 8
    gpu_type: str = ""
    node_options: str = ""
    isolate: bool = False
    database: bool = False
    cred_expire: int = 5
    kill_wait: int = 5
    grace_time: int = 20
    slurmd_timeout: int = 5
    message_timeout: int = 5
    short_minutes: int = 1
    job_requeue: bool = True
    preempt_mode: str = "REQUEUE"
    send_user_signal: bool = False
    share: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    slurm_prefix: str = ""
    topology: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"nodes = {self.nodes}: expected 1 to {MOST_NODES}")
        least = {"cpus": 1, "memory": 1, "gpus": 0, "cred_expire": 1, "kill_wait": 0, "grace_time": 0}
        least |= {"slurmd_timeout": 1, "message_timeout": 1, "short_minutes": 1}
        for field, smallest in least.items():
            if getattr(self, field) < smallest:
                raise ValueError(f"{field} = {getattr(self, field)}: expected {smallest} or more")
        if self.preempt_mode not in ("REQUEUE", "CANCEL"):
            raise ValueError(f"preempt_mode = {self.preempt_mode!r}: expected 'REQUEUE' or 'CANCEL'")
        if not re.fullmatch(r"[A-Za-z0-9_]*", self.gpu_type, re.ASCII):
            raise ValueError(f"gpu_type = {self.gpu_type!r}: expected letters, digits and _")
        if not re.fullmatch(r"(?:\w+=\S+(?: \w+=\S+)*)?", self.node_options, re.ASCII):
            raise ValueError(f"node_options: {self.node_options!r} is not words like Features=ib")
        for line in self.settings:
            if not re.fullmatch(r"\w+=[^\r\n]*", line):
                raise ValueError(f"settings: {line!r} is not one 'Key=Value' line of slurm.conf")
        for line in self.topology:
            if not re.fullmatch(r"SwitchName=[^\r\n]*", line):
                raise ValueError(f"topology: {line!r} is not one 'SwitchName=...' line of topology.conf")
        for path in self.share:
            if not path.startswith("/"):
                raise ValueError(f"share: {path!r} is not an absolute path")

    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    def node_number(self, name: str) -> int:
        """Position of a node, from 1. Raises ValueError when the cluster has no such node."""
        if name not in self.node_names():
            raise ValueError(f"no node {name!r} in this cluster: it has {node_range(self)}")
        return int(name[1:])

    def to_json(self) -> str:
        """In one line, without a newline."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> ClusterSpec:
        """Inverse of to_json. Raises ValueError for anything that is not a spec this version knows."""
        values: Any = json.loads(text)
        if not isinstance(values, Mapping):
            raise ValueError(f"a cluster's spec is a JSON object, not {type(values).__name__}")
        known = {field.name for field in dataclasses.fields(ClusterSpec)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"spec of a cluster made by another version: unknown fields {', '.join(unknown)}")
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return ClusterSpec(**{**values, **lists})


def node_range(spec: ClusterSpec) -> str:
    """All nodes in Slurm's notation: "n1" or "n[1-4]"."""
    return "n1" if spec.nodes == 1 else f"n[1-{spec.nodes}]"


@dataclass(frozen=True)
class Layout:
    """Files of one cluster; everything lies below `root`."""

    root: Path

    @staticmethod
    def of(directory: str | Path) -> Layout:
        """Layout of a directory that need not exist. Raises ValueError when its name is too long or not plain."""
        root = Path(directory).expanduser().resolve()
        if len(str(root).encode()) > LONGEST_DIRECTORY:
            raise ValueError(
                f"{root}: {len(str(root).encode())} bytes long; sockets below a cluster's directory allow "
                f"{LONGEST_DIRECTORY}: choose a shorter --dir"
            )
        # Slurm's own configuration files have no quoting for these.
        if not re.fullmatch(r"[\w./+@-]+", str(root), re.ASCII) or str(root) == "/":
            raise ValueError(f"{root}: Slurm's configuration cannot name it; use letters, digits and . _ + @ - only")
        return Layout(root)

    # The marker says "this directory is a cluster's", and the keeper holds a lock on it as long as it lives.
    @property
    def marker(self) -> Path:
        return self.root / MARKER_FILE

    @property
    def spec(self) -> Path:
        return self.root / "spec.json"

    @property
    def etc(self) -> Path:
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def control(self) -> Path:
        return self.run / "keeper.sock"

    @property
    def munge_socket(self) -> Path:
        return self.run / "munge.socket"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def devices(self) -> Path:
        return self.root / "dev"

    @property
    def nodes(self) -> Path:
        return self.root / "nodes"

    # Secrets and the database: nobody but the cluster's owner may look in.
    @property
    def private(self) -> Path:
        return self.root / "private"

    # Isolated clusters: client commands that work from outside, and what lies there seen from inside.
    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def bin_inside(self) -> Path:
        return self.root / "bin-inside"

    def directories(self) -> tuple[Path, ...]:
        """What bring-up makes and take-down removes."""
        return (
            self.etc,
            self.run,
            self.log,
            self.state,
            self.spool,
            self.devices,
            self.nodes,
            self.private,
            self.bin,
            self.bin_inside,
        )
