"""What lies in a run's folder of checkpoints, at a look: manifests and sizes, so that 10,000 are seen in a second.

Owns: that look, and what retention makes of it. Does not own: reading whole checkpoints (run/verification.py), or
layout of text. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from .errors import UserError
from .find import find_run
from .run.chosen import NOTATION, find_checkpoint
from .run.effective import effective_config
from .run.layout import CheckpointName, RunDir
from .run.manifest import InvalidCheckpointError, Manifest, read_manifest
from .run.retention import Retention, Validation, validation_of
from .run.verdict_note import read_note

_JOBS = 8  # processes that look, where there are many checkpoints
MANY = 2000  # checkpoints of which a list is made with less care
_EACH = 1000  # checkpoints that are worth a process


class Health(str, Enum):
    VERIFIED = "verified"  # every block was good when it was read, and no file was written since
    VALID = "valid"  # manifest and sizes are right
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"  # being written, or left by whoever was killed


@dataclass(frozen=True)
class Found:
    """One checkpoint, or what will be one."""

    name: CheckpointName
    directory: Path
    health: Health
    problem: str  # why it is damaged
    time: float | None  # Unix seconds: when it was written, or the last change of an unfinished one
    size: int | None  # bytes of its files as the manifest has them
    validation: Validation | None = None
    verified: float | None = None  # when
    is_elsewhere: bool = False  # only the manifest is here, the bytes are in an object store

    @property
    def is_valid(self) -> bool:
        return self.health in (Health.VALID, Health.VERIFIED)


def look_around(run: RunDir) -> list[Found]:
    """Everything that is there, newest first; unfinished ones behind those with the same name. Of more than `MANY` the
    manifests' own checksums are not looked at."""
    try:
        entries = os.listdir(run.checkpoints)
    except FileNotFoundError:
        return []
    jobs = min(_JOBS, len(entries) // _EACH)
    is_glance = len(entries) > MANY
    if jobs < 2:
        found = _look_at(str(run.checkpoints), entries, is_glance)
    else:  # a look is work for the interpreter, or waiting for a file server: in either case several do it sooner
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
            look = partial(_look_at, str(run.checkpoints), is_glance=is_glance)
            shares = pool.map(look, [entries[i::jobs] for i in range(jobs)])
            found = [f for share in shares for f in share]
    return sorted(found, key=lambda f: (f.name.step, f.name.attempt, f.health is not Health.UNFINISHED), reverse=True)


def _look_at(folder: str, entries: Sequence[str], is_glance: bool) -> list[Found]:
    found = []
    for entry in entries:
        name = CheckpointName.parse(entry)
        if name is not None:
            found.append(look_into(Path(f"{folder}/{entry}"), name, is_glance))
        elif (unfinished := CheckpointName.parse_unfinished(entry)) is not None:
            found.append(_unfinished(Path(f"{folder}/{entry}"), unfinished[0]))
    return found


def look_into(directory: Path, name: CheckpointName, is_glance: bool = False) -> Found:
    """One finished checkpoint. Never raises: what cannot be read is damaged, and says why."""
    try:
        manifest = read_manifest(directory, is_glance)
    except InvalidCheckpointError as e:
        return Found(name, directory, Health.DAMAGED, _short(str(e), directory), None, None)
    size = sum([f.size for f in manifest.files])
    loss, elsewhere = validation_of(manifest), manifest.location is not None
    problem = None if elsewhere else _wrong_size(directory, manifest)
    if problem is not None:
        return Found(name, directory, Health.DAMAGED, problem, manifest.time, size, loss)
    note = read_note(directory, manifest)
    if note is None:
        return Found(name, directory, Health.VALID, "", manifest.time, size, loss, None, elsewhere)
    if note.problem is not None:
        return Found(name, directory, Health.DAMAGED, note.problem, manifest.time, size, loss, None, elsewhere)
    return Found(name, directory, Health.VERIFIED, "", manifest.time, size, loss, note.time, elsewhere)


def _wrong_size(directory: Path, manifest: Manifest) -> str | None:
    prefix = f"{directory}/"  # not joined as paths: this is most of what a look costs
    for f in manifest.files:
        try:
            size = os.stat(prefix + f.name).st_size
        except OSError as e:
            return f"{f.name}: {e.strerror}"
        if size != f.size:
            return f"{f.name}: {size} bytes, expected {f.size}"
    return None


def _unfinished(directory: Path, name: CheckpointName) -> Found:
    try:
        when = directory.stat().st_mtime
        size = sum(entry.stat().st_size for entry in os.scandir(directory))
    except OSError:  # it has just got its name, or was taken away
        return Found(name, directory, Health.UNFINISHED, "", None, None)
    return Found(name, directory, Health.UNFINISHED, "", when, size)


def _short(problem: str, directory: Path) -> str:
    return problem.removeprefix(f"{directory}/").removeprefix(f"{directory}: ")


def checkpoint_at(text: str) -> Path:
    """What a person means, runs also by job id. Raises UserError, ValueError: nothing is there."""
    return find_checkpoint(text, _run)


def _run(text: str) -> RunDir:
    try:
        return find_run(text)
    except UserError as e:
        raise UserError(f"{text}: no checkpoint, no run and no job; expected {NOTATION}") from e


def settings_of(run: RunDir) -> dict[str, Any]:
    """Section `checkpoint` of the run's configuration; {} if that cannot be read."""
    try:
        found = effective_config(run)["checkpoint"]
    except (OSError, ValueError, KeyError):
        return {}
    return found if isinstance(found, dict) else {}


def retention_of(settings: dict[str, Any], found: Sequence[Found]) -> Retention:
    """What the run itself keeps."""
    keep, every, best = (int(settings.get(key) or 0) for key in ("keep", "keep_every", "keep_best"))
    return Retention(keep, every, best, proven=proven(found))


def proven(found: Sequence[Found]) -> frozenset[CheckpointName]:
    return frozenset(f.name for f in found if f.health is Health.VERIFIED)


def reasons(retention: Retention, found: Sequence[Found]) -> dict[CheckpointName, tuple[str, ...]]:
    """Why retention keeps each finished one; () if it would go."""
    by_name = {f.name: f for f in found if f.health is not Health.UNFINISHED}
    return retention.reasons(by_name, lambda name: _Remembered(by_name[name]) if by_name[name].is_valid else None)


@dataclass(frozen=True)
class _Remembered:
    """What is left of a manifest after a look, for retention."""

    found: Found

    @property
    def state(self) -> dict[str, Any]:
        loss = self.found.validation
        return {} if loss is None else {"validation": {"step": loss.step, "loss": loss.loss}}
