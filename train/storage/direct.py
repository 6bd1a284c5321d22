"""Writing a large new file past the page cache, where the file system can do that.

Owns: when a write may be direct, and what is done where it may not. A direct write costs no copy, evicts nothing that
training reads, and leaves nothing for fsync to wait for: on ext4 it took a tenth of the CPU time of a write through the
cache, and less wall time. Does not own: names, durability of the directory (posix.py). Source: open(2), O_DIRECT.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from ...launcher.run.files import naming

_CHUNK = 32 * 1024 * 1024  # bytes per write: large for parallel file systems, small enough to notice a full one early
# Likewise of a direct write: after each the disk stands still until this process, which leaves the processors to the
# workers, gets one again. With all of them busy, 32 MiB took three times as long per byte.
_DIRECT_CHUNK = 256 * 1024 * 1024
_ALIGN = 4096  # bytes; of file offset, size and memory address in a direct write


class NewFile:
    """Created by this, or empty and this process' own (`is_there`); written from its beginning to its end.

    Raises OSError with the file's name, whichever call fails.
    """

    def __init__(self, path: Path, direct: bool = True, is_there: bool = False) -> None:
        self._path, self._at = path, 0
        with naming(path):
            flags = 0 if is_there else os.O_CREAT | os.O_EXCL
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o644)
        self._may_be_direct, self._is_direct = direct, False

    def write(self, data: memoryview) -> None:
        """Append; `data` may be changed when this returns. Direct if it begins at a page of memory and of the file.

        Writes end at multiples of 32 MiB of the file, so that none but the last touches a part of a file system's block
        (GPFS: up to 16 MiB; a part of one is read before it is written).
        """
        view, done = data.cast("B"), 0
        with naming(self._path):
            while done < len(view):
                chunk = _DIRECT_CHUNK if self._may_be_direct else _CHUNK
                end = min(done + chunk - self._at % chunk, len(view))
                written = self._write(view[done:end])
                done += written
                self._at += written

    def _write(self, view: memoryview) -> int:
        whole = len(view) - len(view) % _ALIGN
        if whole and self._at % _ALIGN == 0 and self._set_direct(True):
            try:
                return os.write(self._fd, view[:whole])
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self._may_be_direct = False  # the memory's address, or the file system thinks otherwise after all
        self._set_direct(False)
        written = os.write(self._fd, view)
        # Starts the disk on what is complete, so that fsync finds little left. (Only advice: errors say nothing.)
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, self._at, written, os.POSIX_FADV_DONTNEED)
        return written

    def _set_direct(self, wanted: bool) -> bool:
        """Returns whether writes are direct now. Set later than at opening: that can fail with the file created."""
        wanted = wanted and self._may_be_direct
        if wanted != self._is_direct:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            flags = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
                self._is_direct = wanted
            except OSError:
                self._may_be_direct = False
        return self._is_direct

    def finish(self) -> None:
        """On stable storage when this returns."""
        with naming(self._path):
            os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)  # a network file system may report a full disk only here

    def abort(self) -> None:
        """Close and leave what lies there. Safe twice and after `finish`."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)
