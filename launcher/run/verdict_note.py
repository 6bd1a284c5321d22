"""What was found when all of a checkpoint was read, noted beside it for whoever comes later.

Owns: that note (verified.json), how long it holds, and which checkpoint is the newest that nothing is known against.
Does not own: the reading (verification.py). A load goes by the bytes, never by the note. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .files import write_json
from .layout import CheckpointName, RunDir
from .manifest import MANIFEST, InvalidCheckpointError, Manifest, check_sizes, read_manifest

VERIFIED = "verified.json"
Stamps = dict[str, list[int]]


@dataclass(frozen=True)
class VerdictNote:
    """Every block was read. `damage`: the first that was bad; None: all were good."""

    time: float  # Unix seconds
    damage: str | None

    @property
    def problem(self) -> str | None:
        """For a person."""
        return None if self.damage is None else f"verify found {self.damage}"


def write_note(directory: Path, manifest: Manifest, note: VerdictNote, stamps: Stamps) -> None:
    """Note it beside the manifest. stamps: of the files as they were before they were read.

    Raises:
        OSError: it cannot be written.
    """
    fields = {"time": note.time, "name": str(manifest.name), "damage": note.damage}
    write_json(directory / VERIFIED, fields | {"files": stamps})


def read_note(directory: Path, manifest: Manifest) -> VerdictNote | None:
    """None if not all was ever read, or if a file was written since."""
    try:
        with open(f"{directory}/{VERIFIED}", "rb") as f:
            raw = json.loads(f.read())
        if raw["files"] != stamps_of(directory, manifest):
            return None
        damage = raw.get("damage")
        return VerdictNote(float(raw["time"]), None if damage is None else str(damage))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_known_bad(directory: Path, manifest: Manifest) -> bool:
    """Whether the note says so."""
    note = read_note(directory, manifest)
    return note is not None and note.damage is not None


def stamps_of(directory: Path, manifest: Manifest) -> Stamps:
    """Size and time of each file, the manifest's own too; of those that lie elsewhere, the manifest says enough."""
    stamps = {}
    for name in [MANIFEST, *(f.name for f in manifest.files)]:
        try:
            s = os.stat(directory / name)
        except FileNotFoundError:
            continue
        stamps[name] = [s.st_size, s.st_mtime_ns]
    return stamps


def newest_valid(
    run: RunDir, skip: frozenset[CheckpointName] = frozenset()
) -> Iterator[tuple[CheckpointName, Manifest]]:
    """Checkpoints whose manifest, sizes and small files are right and that were not found bad, newest first (blocks
    are not read)."""
    for name in run.all_checkpoints():
        if name in skip:
            continue
        directory = run.checkpoint(name)
        try:
            manifest = read_manifest(directory)
            check_sizes(directory, manifest)
        except InvalidCheckpointError:
            continue
        if not is_known_bad(directory, manifest):
            yield name, manifest
