"""Where the bytes of a checkpoint come from: the one interface that restore reads through, and files.

Owns: that interface (files here; object stores in train/storage; a segment of this node or of another could have the
same). Does not own: whether the bytes are those that were written (reader.py), or what they mean (loader.py).
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ...launcher.run.manifest import BLOCK, InvalidCheckpointError
from .past_cache import PAGE, PastCache

_T = TypeVar("_T")

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

    def read_past(self, file: str, at: int, into: memoryview) -> int:
        """Like `read`, past the cache of this machine: for bytes that nobody else reads. Returns how many came, 0 if
        that is not possible or not the faster way; `read` gets the rest. `into` begins at a page of memory.
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


class _Files(Generic[_T]):
    """Files of a directory that are open, the ones used last. For several threads."""

    def __init__(self, make: Callable[[str], _T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._open: OrderedDict[str, _T] = OrderedDict()

    def get(self, file: str) -> _T:
        """Raises OSError."""
        with self._lock:
            opened = self._open.pop(file, None) or self._make(file)
            self._open[file] = opened
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
            return opened

    def forget(self, file: str, stale: _T) -> bool:
        """Returns whether `stale` was still the one."""
        with self._lock:
            is_first = self._open.get(file) is stale
            if is_first:
                del self._open[file]
            return is_first

    def close(self) -> None:
        with self._lock:
            self._open.clear()


class FileSource:
    """A checkpoint directory. Its bytes are not read as mapped memory: there, a disk's error would end the process
    with SIGBUS."""

    piece = 4 * BLOCK  # between two reads a thread checks and copies: the disk has more to do meanwhile
    streams = _AT_ONCE

    def __init__(self, directory: Path, may_go_past: bool = False) -> None:
        """may_go_past: the page cache, where it has nothing (see `read_past`). For a disk of this node: over a network,
        it is the cache that reads ahead."""
        self.directory = directory
        self._may_go_past = may_go_past
        self._files = _Files(lambda file: _Descriptor(directory / file))
        self._past = _Files(lambda file: PastCache(directory / file))
        self._reopened: set[str] = set()

    def where(self, file: str) -> str:
        return str(self.directory / file)

    def read(self, file: str, at: int, *into: memoryview) -> None:
        try:
            opened = self._files.get(file)
            rest = list(into)
            while rest:
                try:
                    got = os.preadv(opened.fd, rest, at)
                except OSError as e:
                    if e.errno != errno.ESTALE or not self._forget(file, opened):
                        raise
                    opened = self._files.get(file)  # NFS: the server was started again, or has another file of the name
                    continue
                if got == 0 and any(rest):
                    raise InvalidCheckpointError(f"{self.where(file)}: ends at byte {at}, more was expected")
                at += got
                rest = _behind(rest, got)
        except OSError as e:
            raise InvalidCheckpointError(f"{self.where(file)}: {e.strerror}") from e

    def _forget(self, file: str, stale: _Descriptor) -> bool:
        """Whether it is worth to open the file again: once, by whichever thread comes first."""
        if self._files.forget(file, stale):
            if file in self._reopened:
                return False
            self._reopened.add(file)
        return True

    def read_past(self, file: str, at: int, into: memoryview) -> int:
        if not self._may_go_past or at % PAGE:
            return 0
        try:
            opened = self._past.get(file)
            return 0 if opened.is_cached(at, len(into)) else opened.read(at, into)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise InvalidCheckpointError(f"{self.where(file)}: {e.strerror}") from e
            self._may_go_past = False  # the file system cannot
            return 0

    def close(self) -> None:
        self._files.close()
        self._past.close()


def _behind(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers behind their first `done` bytes."""
    for number, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[number + 1 :]]
        done -= len(buffer)
    return []
