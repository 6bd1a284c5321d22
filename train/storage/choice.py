"""Which kind of storage a run's checkpoints lie in.

Owns: the choice, from settings and from a target's `spec`. What is not used is not imported.
"""

from __future__ import annotations

from typing import Any

from ...conf.schema import CheckpointConfig
from ...launcher.run.layout import RunDir
from .base import Shelf, Target
from .posix import PosixShelf, PosixTarget


def shelf_of(run: RunDir, settings: CheckpointConfig) -> Shelf:
    """All checkpoints of `run`, wherever `checkpoint.storage` has them. Touches no storage."""
    if settings.storage is not None and settings.storage.startswith("s3://"):
        from .objects import ObjectShelf

        return ObjectShelf(run.checkpoints, f"{settings.storage.rstrip('/')}/{run.path.name}/")
    return PosixShelf(run.checkpoints, settings.stripes)


def target_of(spec: dict[str, Any]) -> Target:
    """The target that `Shelf.spec` described, in this process. Touches no storage."""
    if spec["kind"] == "objects":
        from .objects import ObjectTarget

        return ObjectTarget(spec)
    assert spec["kind"] == "posix", spec
    return PosixTarget(spec)
