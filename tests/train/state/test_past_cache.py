"""What nobody else reads comes past the page cache where that can be, and is the same bytes everywhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from state_ranks import make_job
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.manifest import BLOCK, InvalidCheckpointError
from stoker.train.box import Replica
from stoker.train.state.entry import Entry
from stoker.train.state.past_cache import PAGE, PastCache, pages
from stoker.train.state.source import FileSource

SIZE = 3 * PAGE + 77


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is read past the cache, which has nothing. By a plain descriptor: not every disk can be asked."""
    sizes: list[int] = []
    opened, read = os.open, PastCache.read
    monkeypatch.setattr(os, "open", lambda path, flags, *mode, **at: opened(path, flags & ~os.O_DIRECT, *mode, **at))
    monkeypatch.setattr(PastCache, "is_cached", lambda self, at, size: False)

    def watched(self: PastCache, at: int, into: memoryview) -> int:
        sizes.append(len(into))
        return read(self, at, into)

    monkeypatch.setattr(PastCache, "read", watched)
    return sizes


def direct(file: Path) -> PastCache:
    try:
        return PastCache(file)
    except OSError as e:
        pytest.skip(f"{file.parent}: {e.strerror}")


def test_whole_pages_are_read_into_memory_that_begins_at_one(file: Path) -> None:
    into = pages(SIZE)
    assert direct(file).read(0, into) == 3 * PAGE
    assert into[: 3 * PAGE] == file.read_bytes()[: 3 * PAGE]


def test_what_the_page_cache_has_is_told(file: Path) -> None:
    opened = direct(file)
    assert opened.is_cached(0, SIZE)  # written a moment ago
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    assert not opened.is_cached(0, SIZE)
    assert opened.is_cached(0, SIZE + 1)  # a file that is too short: for `read` to tell


def test_what_is_cached_is_left_to_the_cache(file: Path) -> None:
    direct(file)
    assert FileSource(file.parent, may_go_past=True).read_past("shard", 0, pages(SIZE)) == 0


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_is_asked_once(
    file: Path, past: list[int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refused(*arguments: object) -> int:
        asked.append(1)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(PastCache, "read", refused)
    source = FileSource(file.parent, may_go_past=True)
    assert [source.read_past("shard", 0, pages(SIZE)) for _ in range(3)] == [0, 0, 0]
    assert len(asked) == 1


def test_an_error_of_the_disk_names_the_file(file: Path, past: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(PastCache, "read", broken)
    with pytest.raises(InvalidCheckpointError, match=f"{file}: Input/output error"):
        FileSource(file.parent, may_go_past=True).read_past("shard", 0, pages(SIZE))


def saved(run: RunDir) -> torch.Tensor:
    tensor = torch.arange(5 * BLOCK // 8 + 11)  # its last block ends in the middle of a page
    make_job(run, 1).checkpointer().save(1, [Entry.whole("w", tensor)], {})
    return tensor


@pytest.mark.parametrize("most", [10 * BLOCK, PAGE])  # a read may bring less than was asked for
def test_a_rank_s_own_blocks_come_past_the_cache(
    run: RunDir, past: list[int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = saved(run)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:most], *into[1:]][:1], at))
    loaded = torch.zeros_like(expected)
    make_job(run, 1).checkpointer().restore([Entry.whole("w", loaded)])
    assert torch.equal(loaded, expected)
    assert sorted(past)[1:] == [4 * BLOCK]  # the first is the rest of the file


def test_what_other_ranks_read_too_is_left_to_the_cache(run: RunDir, past: list[int]) -> None:
    expected = saved(run)
    loaded = torch.zeros_like(expected)
    make_job(run, 1).checkpointer().restore([Entry.whole("w", loaded, Replica(("data",), 0, 2))])
    assert torch.equal(loaded, expected)
    assert past == []


def test_a_block_that_came_past_the_cache_is_checked(run: RunDir, past: list[int]) -> None:
    saved(run)
    shard = run.checkpoint(CheckpointName(1, 1)) / "shard-00000.safetensors"
    with shard.open("r+b") as f:
        f.seek(2 * BLOCK + 5)
        f.write(b"!")
    with pytest.raises(Exception, match=r"block 2 .* does not match its checksum"):
        make_job(run, 1).checkpointer().restore([Entry.whole("w", torch.zeros(5 * BLOCK // 8 + 11, dtype=torch.int64))])
    assert past
