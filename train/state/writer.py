"""Persists a packed segment: the shard's file and its block checksums, written and synced by the caller's thread.

Owns: writing files of a checkpoint under preparation. Does not own: which directory, and when it becomes a checkpoint
(checkpointer.py). Nothing is renamed here: the directory that holds the files is published as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...launcher.run.files import naming
from ...launcher.run.manifest import FileEntry, block_checksums, describe
from ..storage.base import Target
from .checksum import crc32
from .segment import Segment

_CHUNK = 32 * 1024 * 1024  # bytes per write: large for parallel file systems, small enough to notice a full one early


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def shard_number(name: str) -> int:
    """Of a shard's file."""
    number = int(name.removeprefix("shard-").removesuffix(".safetensors"))
    assert shard_name(number) == name, name
    return number


def sidecar_name(number: int) -> str:
    return f"shard-{number:05d}.crc32"


def write_small(target: Target, name: str, data: bytes) -> None:
    """Create the file `name` of a checkpoint under preparation, on stable storage when this returns. Raises OSError."""
    sink = target.create(name, len(data))
    try:
        sink.write(memoryview(data))
        sink.finish()
    except BaseException:
        sink.abort()
        raise


def write_file(path: Path, data: memoryview | bytes, halfway: Callable[[], None] = lambda: None) -> None:
    """Create `path` with this content, on stable storage when this returns. `halfway` is called once about half is out.

    Raises:
        OSError: with the file's name, whichever call failed.
    """
    view = memoryview(data)
    with naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            at = _write(fd, view, 0, len(view) // 2)
            halfway()
            _write(fd, view, at, len(view))
            os.fsync(fd)
        finally:
            os.close(fd)  # a network file system may report a full disk only here


def _write(fd: int, view: memoryview, at: int, end: int) -> int:
    while at < end:
        at += os.write(fd, view[at : min(at + _CHUNK, end)])
    return at


def write_shard(
    directory: Path, number: int, segment: Segment, halfway: Callable[[], None] = lambda: None
) -> tuple[FileEntry, FileEntry]:
    """Write the segment as shard `number` with its sidecar; returns the manifest's entries for both.

    Raises:
        OSError: with the file's name.
    """
    name = shard_name(number)
    blocks = f"{name.removesuffix('.safetensors')}.crc32"
    # crc32 and write both leave the interpreter, so the checksums cost no time beside the disk.
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
        checksums = pool.submit(block_checksums, segment.data, crc32)
        write_file(directory / name, segment.data, halfway)
        sidecar = checksums.result()
    write_file(directory / blocks, sidecar)
    return FileEntry(name, segment.size, None, blocks), describe(blocks, sidecar)
