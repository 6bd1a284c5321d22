"""What a place for checkpoints can do. One implementation per kind: POSIX directories, object stores, tests' stand-ins.

Owns: the two interfaces between the checkpointer and its writers on one side and storage on the other. A `Target` is
one checkpoint under preparation: nobody takes it for one before `publish`. A `Shelf` is all checkpoints of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...launcher.run.layout import CheckpointName
from ...launcher.run.manifest import Manifest
from ..state.source import ByteSource

LastCheck = Callable[[], None]


def nothing() -> None:
    """A `LastCheck` that has nothing against it."""


class Sink(Protocol):
    """One new file, written from its beginning to its end."""

    def write(self, data: memoryview) -> None:
        """The next bytes; they may be changed when this returns.

        Raises:
            OSError: with the file's name; the file is of no use any more.
        """
        ...

    def finish(self) -> None:
        """On stable storage, with all its bytes, when this returns. Raises as `write`."""
        ...

    def abort(self) -> None:
        """Leave it: nothing is promised about what lies there. Never raises; safe after `finish`."""
        ...


class Target(Protocol):
    """One checkpoint under preparation. Every process makes its own from the same `spec` (see `Shelf.spec`)."""

    spec: dict[str, Any]  # plain JSON: what `target_of` makes the same target from, in any process of the run

    @property
    def notes(self) -> list[str]:
        """What was given up on the way and does no harm, for people; told once (`checkpoint_storage`)."""
        ...

    def prepare(self) -> None:
        """Make the place for the files, if nobody has. Every writer, before its first file: ranks do not wait for
        each other when a save begins.

        Raises:
            OSError: ENOSPC when it is known beforehand that it does not fit; says what is full.
        """
        ...

    def create(self, file: str, size: int) -> Sink:
        """Begin the new file `file` that will have `size` bytes. Raises OSError."""
        ...

    def read(self, file: str) -> bytes:
        """A small file of this target that any of its processes has finished. Raises OSError."""
        ...

    def delete(self, files: Sequence[str]) -> None:
        """Delete small files of this target. Raises OSError."""
        ...

    def publish(self, manifest: Manifest, last_check: LastCheck = nothing) -> None:
        """Write the manifest and make this a checkpoint, whole or not at all; durable when this returns.

        All files that the manifest names are finished; their sizes are looked at once more. `last_check` is called
        right before the one call that makes it a checkpoint: the place for the fence, and for failpoints.

        Raises:
            OSError, and what `last_check` raises: it is no checkpoint.
        """
        ...

    def discard(self) -> None:
        """Take everything away. Raises OSError; `Shelf.sweep` of a later attempt will try again."""
        ...


class Shelf(Protocol):
    """All checkpoints of one run."""

    def names(self) -> list[CheckpointName]:
        """Newest first; whether they are valid is not looked at. Raises OSError: it cannot be said."""
        ...

    def manifest(self, name: CheckpointName) -> Manifest:
        """Manifest and sizes, checked; kilobytes are read. Raises InvalidCheckpointError."""
        ...

    def source(self, name: CheckpointName) -> ByteSource:
        """The bytes of a checkpoint's files."""
        ...

    def spec(self, name: CheckpointName, token: str, total: int, shards: int) -> dict[str, Any]:
        """What `target_of` makes the target of a new checkpoint from. Touches no storage, and is the same on all ranks.

        `token` (gNNNN-HEX: generation and number of the save) tells preparations of one name apart; `total`: bytes of
        all shards; `shards`: how many there are, of about equal size.
        """
        ...

    def remove(self, name: CheckpointName) -> None:
        """At once no checkpoint any more, then deleted. Raises OSError: it is still there."""
        ...

    def sweep(self, attempt: int, token: str | None = None) -> None:
        """Remove what attempts below `attempt` left unfinished; with `token`, also what this attempt did before the
        save of that token. Errors are passed over."""
        ...
