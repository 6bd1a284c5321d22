"""Which kind of storage a run's checkpoints lie in.

Owns: the choice, from settings and from a target's `spec`. What is not used is not imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...conf.schema import CheckpointConfig
from ...launcher.run.layout import RunDir
from .base import Shelf, Target
from .posix import PosixShelf, PosixTarget


def shelf_of(run: RunDir, settings: CheckpointConfig) -> Shelf:
    """All checkpoints of `run`, wherever `checkpoint.storage` has them. Touches no storage."""
    if settings.storage is not None and settings.storage.startswith("s3://"):
        from .objects import ObjectShelf

        root = f"{settings.storage.rstrip('/')}/{run.path.name}/"
        return ObjectShelf(run.checkpoints, root, settings.local)
    return PosixShelf(run.checkpoints, settings.stripes, settings.local)


def target_of(spec: dict[str, Any]) -> Target:
    """The target that `Shelf.spec` described, in this process. Touches no storage."""
    target: Target
    if spec["kind"] == "objects":
        from .objects import ObjectTarget

        target = ObjectTarget(spec)
    else:
        assert spec["kind"] == "posix", spec
        target = PosixTarget(spec)
    if spec["local"] is None:
        return target
    from .local import LocalTarget

    return LocalTarget(target, Path(spec["local"]))
