"""Reading a file past the page cache.

Owns: whether the cache has the bytes already (then that is the faster way), the read, and memory that suits it. On a
local disk it saves the kernel's search for free pages and its copy, and evicts nothing that training reads. Does not
own: who may read so, what is done where it fails (source.py), checks of what came (reader.py). Sources: open(2) on
O_DIRECT, mincore(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

PAGE = 4096  # bytes; of file offset, size and memory address in a direct read
_HUGE = 2 * 1024 * 1024  # bytes of a huge page (x86-64; elsewhere it is a good alignment too)
_LIBC = ctypes.CDLL(None)


def pages(size: int) -> memoryview:
    """New memory of `size` bytes from a huge page on.

    A disk takes pieces of memory by the hundred: small pages cut a read into requests of 1 MiB, which took twice as
    long (virtio). And a process that is forked meanwhile does not get it: the bytes could end up there (open(2)).
    """
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
    skip = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE
    return memoryview(memory)[skip : skip + size]


class PastCache:
    """A file that is open for direct reads. Closed when the last thread that uses it has let go of it.

    Raises OSError, EINVAL where the file system cannot do that.
    """

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        # For mincore. It is never touched: there, a disk's error would end the process with SIGBUS.
        size = os.fstat(self._fd).st_size
        self._map = np.frombuffer(mmap.mmap(self._fd, size, prot=mmap.PROT_READ) if size else b"", np.uint8)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def is_cached(self, at: int, size: int) -> bool:
        """Whether the page cache has these bytes, by a look at the first and the last page (a look at all took a tenth
        of the time of a read). True also if it does not say: another user's file, or past its end."""
        if at % mmap.PAGESIZE or not 0 < size <= len(self._map) - at:
            return True
        last = (at + size - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        return self._has_page(at) and self._has_page(last)

    def _has_page(self, at: int) -> bool:
        found = ctypes.c_ubyte(1)
        _LIBC.mincore(ctypes.c_void_p(self._map.ctypes.data + at), ctypes.c_size_t(1), ctypes.byref(found))
        return bool(found.value & 1)

    def read(self, at: int, into: memoryview) -> int:
        """Read whole pages into `into`, which begins at one; returns how many bytes came, which may be fewer."""
        whole = len(into) // PAGE * PAGE
        return os.preadv(self._fd, [into[:whole]], at) if whole else 0
