"""`checkpoint.local`: large files go to the node's own disk first, and from there to where they belong.

Owns: that detour. Memory is free as soon as the node's disk has the bytes; the copy goes on beside that, and a file is
finished only where it belongs. On the node's disk it has no name, so that nothing is left there, however a process
ends. If that disk is full or fails, the rest goes straight on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...launcher.run.manifest import Manifest
from .base import LastCheck, Sink, Target, nothing

LARGE = 64 * 2**20  # bytes from which the detour is worth it
_CHUNK = 32 * 2**20  # bytes per read and write


class LocalSink:
    """A file on its way: written by the caller, copied on by a thread."""

    def __init__(self, sink: Sink, fd: int) -> None:
        """Takes over `fd`: an open file without a name."""
        self._sink, self._fd = sink, fd
        self._changed = threading.Condition()
        self._written = self._copied = 0
        self._is_whole = self._is_given_up = False
        self._error: BaseException | None = None
        self.trouble: OSError | None = None  # why the node's disk was left
        self._thread = threading.Thread(target=self._copy, name="copy", daemon=True)
        self._thread.start()

    def write(self, data: memoryview) -> None:
        view, done = data.cast("B"), 0
        while done < len(view) and self.trouble is None:
            with self._changed:
                if self._error is not None:
                    raise self._error
            try:
                count = os.pwrite(self._fd, view[done : done + _CHUNK], self._written)
            except OSError as e:
                self.trouble = e
                break
            done += count
            with self._changed:
                self._written += count
                self._changed.notify_all()
        if done < len(view):
            self._settle()
            self._sink.write(view[done:])

    def finish(self) -> None:
        """When the bytes are where they belong."""
        self._settle()
        self._sink.finish()

    def abort(self) -> None:
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()
        self._join()
        self._sink.abort()

    def _settle(self) -> None:
        """Wait until all that was written here is copied. Raises the copy's error."""
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()
        self._join()
        if self._error is not None:
            raise self._error

    def _join(self) -> None:
        self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # In the thread.

    def _copy(self) -> None:
        try:
            buffer = memoryview(bytearray(_CHUNK))
            while (ready := self._ready()) > 0:
                part = buffer[: min(ready, _CHUNK)]
                got = os.preadv(self._fd, [part], self._copied)
                if got == 0:
                    raise OSError(errno.EIO, "the node's own disk gives back less than was written", "checkpoint.local")
                self._sink.write(part[:got])
                os.posix_fadvise(self._fd, self._copied, got, os.POSIX_FADV_DONTNEED)  # nobody reads it again
                self._copied += got
        except BaseException as e:
            with self._changed:
                self._error = e

    def _ready(self) -> int:
        """Bytes that can be copied; 0 when there will be no more."""
        with self._changed:
            while True:
                if self._is_given_up:
                    return 0
                if self._written > self._copied or self._is_whole:
                    return self._written - self._copied
                self._changed.wait()


class LocalTarget:
    """Another target, whose large files come by way of `directory` on this node."""

    def __init__(self, target: Target, directory: Path) -> None:
        self.spec: dict[str, Any] = target.spec
        self._target, self._directory = target, directory
        self._sinks: list[LocalSink] = []
        self._notes: list[str] = []

    @property
    def notes(self) -> list[str]:
        troubles = [s.trouble for s in self._sinks if s.trouble is not None]
        said = [f"checkpoint.local={self._directory}: written without it: {e.strerror}" for e in troubles]
        return [*self._target.notes, *self._notes, *said]

    def prepare(self) -> None:
        self._target.prepare()

    def create(self, file: str, size: int) -> Sink:
        sink = self._target.create(file, size)
        if size < LARGE:
            return sink
        try:
            fd = nameless_file(self._directory)
        except OSError as e:
            self._notes.append(f"checkpoint.local={self._directory}: written without it: {e.strerror}")
            return sink
        local = LocalSink(sink, fd)
        self._sinks.append(local)
        return local

    def read(self, file: str) -> bytes:
        return self._target.read(file)

    def delete(self, files: Sequence[str]) -> None:
        self._target.delete(files)

    def publish(self, manifest: Manifest, last_check: LastCheck = nothing) -> None:
        self._target.publish(manifest, last_check)

    def discard(self) -> None:
        self._target.discard()


def nameless_file(directory: Path) -> int:
    """An open file on the disk of `directory` that is gone when it is closed. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    path = directory / f".tmp-stoker-{os.getpid()}-{secrets.token_hex(4)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):
        path.unlink()
    return fd
