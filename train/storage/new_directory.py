"""A directory of files that appears whole or not at all.

Owns: its temporary name, durability and the rename at the end. Does not own: what is in it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from ...launcher.run.files import fsync_dir


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A name beside `path` for a directory that the caller makes and fills; it becomes `path` at the end.

    Raises:
        ValueError: there is something at `path`.
    """
    if os.path.lexists(path):
        raise ValueError(f"{path}: exists already; name a new directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".tmp-{path.name}-{token_hex(4)}")
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


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
