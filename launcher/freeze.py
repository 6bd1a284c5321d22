"""Freezing: turning a plan into a run directory that nothing outside can change any more.

Owns: what is in a new run directory. It is made under a temporary name and renamed, so that it is there whole or not
at all. What to freeze is prepare.py's to say.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from . import code, stage, storage
from .environment import recorded
from .errors import environment_error
from .run import packages
from .run.files import fsync_dir, temporary_name, write_atomic, write_json
from .run.layout import RunDir

_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # nothing that looks like something else


@dataclass(frozen=True)
class Plan:
    """A checked launch, before anything of it exists."""

    directory: Path  # absolute; where the run will be
    run_id: str
    name: str
    seed: int
    plain: dict[str, Any]  # conf.schema.Config as JSON
    yaml: str
    overrides: tuple[str, ...]
    command: tuple[str, ...]
    cwd: Path
    python: str  # interpreter inside the job
    script: str
    snapshot: code.Snapshot
    staged: stage.Environment | None = None


def new_id(now: float | None = None) -> str:
    """`261130-104733-x7q2`: UTC time to the second, so that names sort by age, and four random characters."""
    stamp = time.strftime("%y%m%d-%H%M%S", time.gmtime(now))
    return f"{stamp}-{''.join(secrets.choice(_ALPHABET) for _ in range(4))}"


def freeze(plan: Plan, environment: Mapping[str, str]) -> RunDir:
    """Make the run directory.

    Raises:
        UserError: it exists already, or cannot be written (full, read-only, no permission); nothing is left then but
            a packed environment, which is not this run's alone.
    """
    target = plan.directory
    if os.path.lexists(target):
        raise environment_error(f"{target} exists already; choose another --run-dir, or leave the choice to stoker")
    with _explained(plan), _new_folders(target.parent):
        if plan.staged is not None:
            stage.ensure(plan.staged)
        tmp = temporary_name(target)
        tmp.mkdir()
        try:
            _fill(RunDir(tmp), plan, environment)
            with storage.place(RunDir(tmp), plan.plain["checkpoint"]["storage"], target.name):
                os.rename(tmp, target)
        except BaseException:
            shutil.rmtree(tmp, ignore_errors=True)
            raise
        fsync_dir(target.parent)
    return RunDir(target)


def discard(run: RunDir, with_root: bool = False) -> None:
    """Take a run directory away again of which no job was made; `with_root`: the folder around it too, if empty."""
    storage.take_back(run)
    tmp = temporary_name(run.path)
    os.rename(run.path, tmp)  # at once under its name, then file by file
    shutil.rmtree(tmp, ignore_errors=True)
    if with_root:
        with contextlib.suppress(OSError):
            run.path.parent.rmdir()


@contextlib.contextmanager
def _explained(plan: Plan) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        where = f" ({e.filename})" if e.filename else ""
        raise environment_error(
            f"run_root={plan.directory.parent}: cannot make a run directory there: {e.strerror or e}{where}; "
            "set run_root to a directory that can be written from here and from the nodes"
        ) from e


@contextlib.contextmanager
def _new_folders(folder: Path) -> Iterator[None]:
    """Make `folder` with its parents, and take away again what was made if the body fails."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()
        raise


def _fill(run: RunDir, plan: Plan, environment: Mapping[str, str]) -> None:
    packed = code.pack(plan.snapshot, run.code)
    bootstrap = Path(code.__file__).parent / "run" / "bootstrap.py"
    write_atomic(run.path / "bootstrap.py", bootstrap.read_bytes())
    write_atomic(run.config_yaml, plan.yaml)
    write_json(run.config_json, plan.plain)
    write_atomic(run.overrides, "".join(f"{line}\n" for line in plan.overrides))
    write_atomic(run.script, plan.script, mode=0o755)
    # Another interpreter's packages cannot be seen from here.
    found = packages.installed() if plan.python == sys.executable else None
    write_json(run.env, _surroundings(plan, environment, found))
    write_json(run.run, _identity(plan, packed, found))
    for folder in (run.submissions, run.attempts, run.job_logs):
        folder.mkdir()


def _surroundings(plan: Plan, environment: Mapping[str, str], found: dict[str, str] | None) -> dict[str, Any]:
    return {
        "python": plan.python,
        "python_version": platform.python_version() if found is not None else None,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cwd": str(plan.cwd),
        "variables": recorded(environment),
        "packages": found,
    }


def _identity(plan: Plan, packed: code.Packed, found: dict[str, str] | None) -> dict[str, Any]:
    return {
        "id": plan.run_id,
        "name": plan.name,
        "created": time.time(),
        "user": getpass.getuser(),
        "wandb_id": plan.run_id,
        "stoker_version": __version__,
        "package_fingerprint": packages.fingerprint(found) if found is not None else None,
        "git": code.git_state(plan.snapshot.project or code.package_root(), plan.directory.parent.resolve()),
        "seed": plan.seed,
        "command": shlex.join(plan.command),
        "code": {
            "sha256": packed.sha256,
            "bytes": packed.bytes,
            "files": packed.files,
            "pythonpath": list(plan.snapshot.pythonpath),
            "cwd": plan.snapshot.cwd,
            "left_out": list(plan.snapshot.left_out),
        },
    }
