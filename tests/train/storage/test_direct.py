"""Files are the same whatever part of them could be written past the page cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from stoker.train.storage.direct import NewFile

PAGE = 4096


@pytest.fixture
def memory() -> mmap.mmap:
    """Pages, as segments are."""
    pages = mmap.mmap(-1, 64 * PAGE)
    pages.write(os.urandom(len(pages)))
    return pages


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the writes that were direct."""
    sizes: list[int] = []
    write = os.write

    def watched(fd: int, data: memoryview) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            sizes.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", watched)
    return sizes


def written(path: Path, pieces: list[memoryview]) -> bytes:
    file = NewFile(path)
    for piece in pieces:
        file.write(piece)
    file.finish()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ([0, 64 * PAGE], [64 * PAGE]),
        ([0, 10 * PAGE + 7], [10 * PAGE]),  # the rest of a page goes through the cache
        ([0, 16 * PAGE, 48 * PAGE, 48 * PAGE + 1], [16 * PAGE, 32 * PAGE]),
        ([0, 5, 64 * PAGE], []),  # nothing lies at a page of the file any more
        ([0, 0], []),
    ],
)
def test_what_begins_at_a_page_is_written_past_the_cache(
    tmp_path: Path, memory: mmap.mmap, direct: list[int], cuts: list[int], expected: list[int]
) -> None:
    view = memoryview(memory)
    pieces = [view[a:b] for a, b in pairwise(cuts)]
    assert written(tmp_path / "file", pieces) == bytes(view[: cuts[-1]])
    if not direct and expected:
        pytest.skip("this file system has no direct writes")
    assert direct == expected


def test_memory_that_begins_within_a_page_goes_through_the_cache(tmp_path: Path, memory: mmap.mmap) -> None:
    view = memoryview(memory)
    assert written(tmp_path / "file", [view[1 : 1 + 8 * PAGE], view[: 8 * PAGE]]) == bytes(
        view[1 : 1 + 8 * PAGE]
    ) + bytes(view[: 8 * PAGE])


def test_a_file_that_exists_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError) as caught:
        NewFile(path)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """1 MiB of memory: a file system that may have no direct writes, and is soon full."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_is_told_with_the_name_of_the_file(small_disk: Path) -> None:
    file = NewFile(small_disk / "file")
    with pytest.raises(OSError, match="No space left on device") as caught:
        file.write(memoryview(mmap.mmap(-1, 2 * 1024 * 1024)))
    file.abort()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small_disk / "file"))


@pytest.mark.parametrize("refusing", ["when asked", "when written"])
def test_where_direct_writes_are_refused_the_cache_takes_all(
    tmp_path: Path, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    write, control = os.write, fcntl.fcntl

    def no_write(fd: int, data: memoryview) -> int:
        if control(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data)

    def no_flag(fd: int, what: int, value: int = 0) -> int:
        if what == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(fd, what, value)

    change: tuple[object, str, Callable[..., int]]
    change = (fcntl, "fcntl", no_flag) if refusing == "when asked" else (os, "write", no_write)
    monkeypatch.setattr(*change)
    view = memoryview(memory)
    assert written(tmp_path / "file", [view, view[:9]]) == bytes(view) + bytes(view[:9])
