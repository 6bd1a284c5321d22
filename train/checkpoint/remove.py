"""For `stoker checkpoint prune`: removes checkpoints whose bytes lie in an object store."""

from __future__ import annotations

from pathlib import Path

from ..storage.posix import remove_directory


def main(argv: list[str]) -> int:
    """The directories of their manifests."""
    for directory in argv:
        remove_directory(Path(directory))
    return 0
