"""Where the bytes of a checkpoint come from, and the check that they are those that were written.

Owns: the one interface that restore reads through (files today; a segment of this node or of another has the same),
and verification of every 4 MiB block that is touched. Does not own: what the bytes mean (loader.py).
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Protocol

from ...launcher.run.manifest import BLOCK, BlockChecker, FileEntry, InvalidCheckpointError, Manifest


class ByteSource(Protocol):
    """Random access to the files of one checkpoint."""

    def where(self, file: str) -> Path:
        """The file's name for messages."""
        ...

    def read(self, file: str, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `at` on.

        Raises:
            InvalidCheckpointError: the file is missing, too short or unreadable; names it.
        """
        ...

    def close(self) -> None: ...


class FileSource:
    """A checkpoint directory. Not mapped into memory: there, a disk's error would end the process with SIGBUS."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: tuple[str, int] | None = None  # one at a time: reads come sorted by file

    def where(self, file: str) -> Path:
        return self.directory / file

    def read(self, file: str, at: int, into: memoryview) -> None:
        try:
            fd = self._descriptor(file)
            done = 0
            while done < len(into):
                got = os.preadv(fd, [into[done:]], at + done)
                if got == 0:
                    raise InvalidCheckpointError(f"{self.where(file)}: ends at byte {at + done}, more was expected")
                done += got
        except OSError as e:
            raise InvalidCheckpointError(f"{self.where(file)}: {e.strerror}") from e

    def _descriptor(self, file: str) -> int:
        if self._open is not None and self._open[0] == file:
            return self._open[1]
        self.close()
        self._open = (file, os.open(self.where(file), os.O_RDONLY | os.O_CLOEXEC))
        return self._open[1]

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None


class VerifiedReader:
    """Reads any range of any file that the manifest names; what it returns has been checked."""

    def __init__(self, source: ByteSource, manifest: Manifest) -> None:
        self._source = source
        self._entries = {f.name: f for f in manifest.files}
        self._checkers: dict[str, BlockChecker] = {}
        self._block = bytearray(BLOCK)
        self._held: tuple[str, int, int] | None = None  # file, number and size of the block in memory

    def small(self, file: str) -> bytes:
        """A whole file that has one checksum (index, sidecar).

        Raises:
            InvalidCheckpointError: it is not what was written.
        """
        entry = self._entry(file)
        data = bytearray(entry.size)
        self._source.read(file, 0, memoryview(data))
        if zlib.crc32(data) != entry.crc32:
            raise InvalidCheckpointError(f"{self._source.where(file)}: does not match its checksum in the manifest")
        return bytes(data)

    def read(self, file: str, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes of `file` from `at` on; whole blocks are read and checked.

        Raises:
            InvalidCheckpointError: a block is not what was written, or cannot be read.
        """
        entry = self._entry(file)
        if at + len(into) > entry.size:
            raise InvalidCheckpointError(f"{self._source.where(file)}: {entry.size} bytes, the index reaches beyond")
        done = 0
        while done < len(into):
            number, skip = divmod(at + done, BLOCK)
            block = self._load(entry, number)
            count = min(len(block) - skip, len(into) - done)
            into[done : done + count] = block[skip : skip + count]
            done += count

    def _load(self, entry: FileEntry, number: int) -> memoryview:
        size = min(BLOCK, entry.size - number * BLOCK)
        block = memoryview(self._block)[:size]
        # Neighbouring tensors share a block: it is read and checked once.
        if self._held != (entry.name, number, size):
            self._held = None
            self._source.read(entry.name, number * BLOCK, block)
            self._checker(entry).check(number, block)
            self._held = (entry.name, number, size)
        return block

    def _checker(self, entry: FileEntry) -> BlockChecker:
        if entry.name not in self._checkers:
            if entry.blocks is None:
                raise InvalidCheckpointError(f"{self._source.where(entry.name)}: has no block checksums")
            # Its file comes first: the source keeps one open, and the block's own is the one to keep.
            self._checkers[entry.name] = BlockChecker(self._source.where(entry.name), self.small(entry.blocks))
        return self._checkers[entry.name]

    def _entry(self, file: str) -> FileEntry:
        if file not in self._entries:
            raise InvalidCheckpointError(f"{self._source.where(file)}: the manifest does not name it")
        return self._entries[file]
