"""What kind of file system a directory lies in, and whether there is room for a checkpoint.

Owns: recognising kinds by statfs(2), and the check of free space before anything is written. Does not own: what is done
for a kind (lustre.py, posix.py).
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


class FileSystem(Enum):
    """The value is what messages call it."""

    lustre = "Lustre"
    nfs = "NFS"
    gpfs = "GPFS"
    beegfs = "BeeGFS"
    ceph = "CephFS"
    smb = "SMB"
    fuse = "FUSE"
    memory = "tmpfs"
    local = "local"
    other = "unknown"

    @property
    def is_shared(self) -> bool:
        """Other nodes may see it, and may see what we do with a delay."""
        return self not in (FileSystem.memory, FileSystem.local)


# `f_type` of statfs(2): linux/magic.h; for those outside of the kernel, their own headers.
_MAGIC = {
    0x0BD00BD0: FileSystem.lustre,
    0x6969: FileSystem.nfs,
    0x47504653: FileSystem.gpfs,
    0x19830326: FileSystem.beegfs,
    0x00C36400: FileSystem.ceph,
    0xFF534D42: FileSystem.smb,
    0xFE534D42: FileSystem.smb,
    0x65735546: FileSystem.fuse,
    0x01021994: FileSystem.memory,
    0x858458F6: FileSystem.memory,  # ramfs
    0xEF53: FileSystem.local,  # ext2, ext3, ext4
    0x58465342: FileSystem.local,  # xfs
    0x9123683E: FileSystem.local,  # btrfs
    0x2FC12FC1: FileSystem.local,  # zfs
    0x794C7630: FileSystem.local,  # overlayfs
}
_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 12.8)  # seconds; 64 together
_STATFS_BYTES = 512  # more than struct statfs has anywhere


def file_system(directory: Path) -> FileSystem:
    """The kind of file system that `directory` lies in; `other` if that cannot be found out. Never raises."""
    return _MAGIC.get(_magic(directory), FileSystem.other)


def _magic(directory: Path) -> int:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    try:
        found = ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(directory), buffer)
    except (OSError, AttributeError):
        return 0
    # Its first member, a machine word, is the type.
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF if found == 0 else 0


def patiently(work: Callable[[], _T], kind: FileSystem) -> _T:
    """What `work` returns. On a file system of other nodes, a file that is not there is asked for again for about a
    minute: NFS keeps names and attributes for up to that long (nfs(5): acdirmax).

    Raises:
        OSError: the last one.
    """
    for pause in _PAUSES if kind.is_shared else ():
        try:
            return work()
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        time.sleep(pause)
    return work()


def with_margin(size: int) -> int:
    """What `size` bytes of files may take: directories, indirect blocks, rounding, and what others write meanwhile."""
    return size + size // 64 + 2**20


def check_room(directory: Path, size: int, files: int) -> None:
    """Whether `size` bytes in `files` files fit into the file system now.

    Raises:
        OSError: ENOSPC, with the directory and what is missing; or it cannot be asked.
    """
    found = os.statvfs(directory)
    if found.f_blocks == 0:
        return  # it does not say (some FUSE file systems)
    free, needed = found.f_bavail * found.f_frsize, with_margin(size)
    if free < needed:
        raise no_room(directory, f"{_mb(needed)} needed, {_mb(free)} free")
    if found.f_files and found.f_favail < files:
        raise no_room(directory, f"{files} files needed, {found.f_favail} inodes free")


def no_room(directory: Path, detail: str, code: int = errno.ENOSPC) -> OSError:
    """The error for what is known not to fit, before anything is written."""
    return OSError(code, f"{os.strerror(code)} ({detail})", str(directory))


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
