"""A directory of files that appears whole or not at all.

Owns: its temporary name, durability, the rename at the end, and taking away what a killed process left half made. Does
not own: what is in it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from stat import S_ISDIR

from ...launcher.run.files import GOING, fsync_dir, give_up, now_at
from ...launcher.run.process_start import start_ticks

# Of whom it is: machine, process, when that began. With one more token behind: being deleted.
_UNFINISHED = re.compile(r"\.tmp-.*\.([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{8}(-[0-9a-f]{8})?")
_NAME = 40  # characters of the final name that the temporary one has: it must fit into 255 bytes in any script
_SILENT = 24 * 3600.0  # seconds without any write after which another machine's is taken for dead


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A name beside `path` for a directory that the caller makes and fills; it becomes `path` at the end. What others
    who were killed left beside `path` is taken away.

    Raises:
        ValueError: there is something at `path`.
    """
    if os.path.lexists(path):
        raise ValueError(f"{path}: exists already; name a new directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_unfinished(path.parent)
    owner = f"{_machine()}-{os.getpid()}-{start_ticks(os.getpid())}"
    unfinished = path.with_name(f".tmp-{path.name[:_NAME]}.{owner}-{token_hex(4)}")
    try:
        yield unfinished
        for file in unfinished.rglob("*"):
            if file.is_file():
                _sync(file)
        os.rename(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    fsync_dir(path.parent)


def sweep_unfinished(folder: Path) -> None:
    """Take away what killed processes left of new directories in `folder`. Errors are passed over."""
    with suppress(OSError):
        for name in os.listdir(folder):
            owner = _UNFINISHED.fullmatch(name)
            if owner is None:
                continue
            directory = folder / name
            with suppress(OSError):
                if not S_ISDIR(os.lstat(directory).st_mode):
                    continue
                if name.startswith(GOING):
                    shutil.rmtree(directory, ignore_errors=True)
                elif _is_left(directory, owner[1], int(owner[2]), int(owner[3])):
                    # Should it live all the same, it fails at its next file, and not with half of them.
                    going = give_up(directory)
                    if going is not None:
                        shutil.rmtree(going, ignore_errors=True)


def _is_left(directory: Path, machine: str, pid: int, start: int) -> bool:
    """Whether nobody works on it any more. Of another machine's process only its files tell, and of another user's,
    which may not be seen here."""
    if machine == _machine() and os.lstat(directory).st_uid == os.geteuid():
        return start_ticks(pid) != start
    last = max(os.lstat(p).st_mtime for p in (directory, *directory.rglob("*")))
    return now_at(directory.parent) - last > _SILENT


@cache
def _machine() -> str:
    """Where a process's number means this very process: this boot of this kernel, and this container's numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
