"""Where a user's own script runs, and what it is told: its directory and its environment.

Owns: the private copy of the frozen project, torchrun's variables and ours. The contract with the script stands in
docs/own-scripts.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .run.bootstrap import LOCAL_DIR, local_parents, private_base
from .run.files import read_json
from .run.layout import RunDir
from .task_ports import port_of
from .task_words import is_python

_PREFIX = "own-"
_LOCK = "lock"
# What only we need to know.
_OURS = ("STOKER_ZYGOTE_FD", "STOKER_AGENT_PID", "STOKER_SUPERVISOR", "STOKER_LEASE", "STOKER_WARNED", "STOKER_TOKEN")


@dataclass(frozen=True)
class Place:
    """One node's, for one attempt. `root`: node-local, ours alone, gone at the end."""

    root: Path
    cwd: Path
    shared_code: Path | None  # the frozen project as all runs of the node share it
    own_code: Path | None  # its copy here
    lock: int

    @classmethod
    def make(cls, run: RunDir) -> Place:
        """Copy the frozen project: what the script writes beside itself must not meet the next attempt, or a run with
        the same code.

        Raises:
            OSError: no room on the node.
        """
        errors: list[str] = []
        # The configured directory may be missing on one node: that costs no run, as it does not for our own trainer.
        others = {name: value for name, value in os.environ.items() if name != LOCAL_DIR}
        for parent in dict.fromkeys([*local_parents(os.environ), *local_parents(others)]):
            try:
                place = cls._below(private_base(parent), run)
            except OSError as e:
                errors.append(str(e))
                continue
            if errors:
                print(f"stoker: going on below {parent} ({'; '.join(errors)})", file=sys.stderr, flush=True)
            return place
        raise OSError("; ".join(errors))

    @classmethod
    def _below(cls, base: Path, run: RunDir) -> Place:
        _sweep(base)
        root, lock = _locked(base)
        try:
            inside = read_json(run.run)["code"].get("cwd")
            if inside is None:  # it was not in a project of its own: nothing was frozen
                return cls(root, Path(read_json(run.env)["cwd"]), None, None, lock)
            archive = Path(__file__).resolve().parents[3]
            shared, own = archive / "code" / "user", root / "code" / "user"
            shutil.copytree(shared, own, symlinks=True)
            cwd = root / inside
            cwd.mkdir(parents=True, exist_ok=True)
            return cls(root, cwd, shared, own, lock)
        except BaseException:
            os.close(lock)
            shutil.rmtree(root, ignore_errors=True)
            raise

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        os.close(self.lock)


def _locked(base: Path) -> tuple[Path, int]:
    """A new directory and its lock, which tells that it is in use."""
    while True:
        root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = os.open(root / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Before we held it somebody may have taken it for a dead one's, and the directory away.
        with contextlib.suppress(FileNotFoundError):
            if (root / _LOCK).stat().st_ino == os.fstat(lock).st_ino:
                return root, lock
        os.close(lock)


def _sweep(base: Path) -> None:
    """Take away what killed launchers have left. A live one holds its lock."""
    for root in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(root / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
            finally:
                os.close(lock)


def words(cmd: Sequence[str]) -> list[str]:
    """The command as it is started: `python` is the job's interpreter."""
    return [sys.executable if is_python(cmd[0]) and "/" not in cmd[0] else cmd[0], *cmd[1:]]


def variables(environ: Mapping[str, str], spec: Mapping[str, Any], place: Place, beside: Path) -> dict[str, str]:
    """The environment of one process. `beside`: its own directory on this node, for heartbeat and metrics."""
    env = {name: value for name, value in environ.items() if name not in _OURS}
    rank, local_world = int(spec["rank"]), int(spec["local_world_size"])
    world, generation = int(spec["world_size"]), int(spec["generation"])
    run = RunDir(Path(spec["run"]))
    if place.shared_code is not None:
        entries = [_moved(entry, place) for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
        env["PYTHONPATH"] = os.pathsep.join(entries)
    env.setdefault("PYTHONUNBUFFERED", "1")  # output goes through a pipe and should not wait in it
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(spec["local_rank"]),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(rank // local_world),
        "NODE_RANK": str(rank // local_world),
        "GROUP_WORLD_SIZE": str(world // local_world),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": str(spec["store_host"]),
        "MASTER_PORT": str(port_of(int(spec["store_port"]), generation)),
        "TORCHELASTIC_RUN_ID": run.path.name,
        "TORCHELASTIC_RESTART_COUNT": str(generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(spec["config"]["resilience"]["max_restarts"]),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 opens the store at MASTER_PORT
        "STOKER_RUN_DIR": str(run.path),
        "STOKER_CHECKPOINTS": str(run.checkpoints),
        "STOKER_ATTEMPT": str(spec["attempt"]),
        "STOKER_GENERATION": str(generation),
        "STOKER_STOP_SIGNAL": str(spec["stop_signal"]),
        "STOKER_HEARTBEAT": str(beside / "heartbeat"),
    }
    if rank == 0:
        env["STOKER_METRICS"] = str(beside / "metrics.jsonl")
    return env


def _moved(entry: str, place: Place) -> str:
    """A directory of the shared copy, in ours."""
    assert place.shared_code is not None
    assert place.own_code is not None
    path = Path(entry)
    if path == place.shared_code or place.shared_code in path.parents:
        return str(place.own_code / path.relative_to(place.shared_code))
    return entry
