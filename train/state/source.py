"""Where the bytes of a checkpoint come from: the one interface that restore reads through, and files.

Owns: that interface (files here; object stores in train/storage; a segment of this node or of another could have the
same). Does not own: whether the bytes are those that were written (reader.py), or what they mean (loader.py).
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from ...launcher.run.manifest import BLOCK, InvalidCheckpointError

_OPEN = 32  # files kept open: more than threads, since reads come sorted by file
_AT_ONCE = 4  # a parallel file system gives one stream a fraction of its speed; a node has 8 ranks that read


class ByteSource(Protocol):
    """Random access to the files of one checkpoint, from several threads."""

    piece: int  # bytes of a read that is large enough; a multiple of the checksum block
    streams: int  # reads at a time, per rank, that are worth it

    def where(self, file: str) -> str:
        """The file's name for messages."""
        ...

    def read(self, file: str, at: int, *into: memoryview) -> None:
        """Fill the buffers, one after the other, with the bytes from `at` on. No more buffers than `os.preadv` takes.

        Raises:
            InvalidCheckpointError: the file is missing, too short or unreadable; names it.
        """
        ...

    def close(self) -> None: ...


class _Descriptor:
    """Closed when the last thread that uses it has let go of it, not when the source does."""

    def __init__(self, path: Path) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class FileSource:
    """A checkpoint directory. Not mapped into memory: there, a disk's error would end the process with SIGBUS."""

    piece = BLOCK
    streams = _AT_ONCE

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Descriptor] = OrderedDict()
        self._reopened: set[str] = set()

    def where(self, file: str) -> str:
        return str(self.directory / file)

    def read(self, file: str, at: int, *into: memoryview) -> None:
        try:
            opened = self._opened(file)
            rest = list(into)
            while rest:
                try:
                    got = os.preadv(opened.fd, rest, at)
                except OSError as e:
                    if e.errno != errno.ESTALE or not self._forget(file, opened):
                        raise
                    opened = self._opened(file)  # NFS: the server was started again, or has another file of that name
                    continue
                if got == 0 and any(rest):
                    raise InvalidCheckpointError(f"{self.where(file)}: ends at byte {at}, more was expected")
                at += got
                rest = _behind(rest, got)
        except OSError as e:
            raise InvalidCheckpointError(f"{self.where(file)}: {e.strerror}") from e

    def _opened(self, file: str) -> _Descriptor:
        with self._lock:
            opened = self._open.pop(file, None) or _Descriptor(self.directory / file)
            self._open[file] = opened
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
            return opened

    def _forget(self, file: str, stale: _Descriptor) -> bool:
        """Whether it is worth to open the file again: once, by whichever thread comes first."""
        with self._lock:
            if self._open.get(file) is stale:
                if file in self._reopened:
                    return False
                self._reopened.add(file)
                del self._open[file]
            return True

    def close(self) -> None:
        with self._lock:
            self._open.clear()


def _behind(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers behind their first `done` bytes."""
    for number, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[number + 1 :]]
        done -= len(buffer)
    return []
