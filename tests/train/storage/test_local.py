"""By way of the node's own disk: memory is free early, the file is whole where it belongs, nothing stays behind."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import stoker.train.storage.local as local_module
from checkpoint_bytes import SHARD, begin, save
from stoker.conf.schema import CheckpointConfig
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.verification import verify
from stoker.train.storage.base import Shelf
from stoker.train.storage.choice import shelf_of
from stoker.train.storage.posix import PosixSink

MIB = 2**20


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    return tmp_path / "nvme" / "me"


@pytest.fixture
def shelf(run: RunDir, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setattr(local_module, "LARGE", 1000)
    monkeypatch.setattr(local_module, "_CHUNK", MIB)
    return shelf_of(run, CheckpointConfig(local=str(nvme)))


@pytest.mark.parametrize("without_names", [True, False])
def test_a_file_arrives_whole_and_the_disk_is_empty(
    run: RunDir, shelf: Shelf, nvme: Path, monkeypatch: pytest.MonkeyPatch, without_names: bool
) -> None:
    if not without_names:  # as on a file system without O_TMPFILE
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    shard = os.urandom(5 * MIB + 77)
    name = save(shelf, 10, shard)
    verify(run.checkpoint(name))
    assert (run.checkpoint(name) / SHARD).read_bytes() == shard
    assert list(nvme.iterdir()) == []


def test_memory_is_free_while_the_shared_place_stands_still(
    run: RunDir, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_moving = threading.Event()
    write = PosixSink.write

    def slow(self: PosixSink, data: memoryview) -> None:
        assert is_moving.wait(60)
        write(self, data)

    monkeypatch.setattr(PosixSink, "write", slow)
    data = os.urandom(3 * MIB)
    sink = begin(shelf, 10).create(SHARD, len(data))
    wave = bytearray(data)
    sink.write(memoryview(wave))  # returns
    wave[:] = bytes(len(wave))
    is_moving.set()
    sink.finish()
    assert next(run.checkpoints.rglob(SHARD)).read_bytes() == data


@pytest.mark.parametrize("after", [0, 2])
def test_a_full_disk_of_the_node_costs_no_checkpoint(
    run: RunDir, shelf: Shelf, nvme: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    pwrite, calls = os.pwrite, []

    def full(fd: int, data: memoryview, at: int) -> int:
        calls.append(at)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    data = os.urandom(5 * MIB)
    target = begin(shelf, 10)
    sink = target.create(SHARD, len(data))
    for at in range(0, len(data), 2 * MIB):
        sink.write(memoryview(data)[at : at + 2 * MIB])
    sink.finish()
    assert next(run.checkpoints.rglob(SHARD)).read_bytes() == data
    assert target.notes == [f"checkpoint.local={nvme}: written without it: No space left on device"]


def test_a_directory_that_cannot_be_made_costs_no_checkpoint(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shelf = shelf_of(run, CheckpointConfig(local=str(tmp_path / "file")))
    target = begin(shelf, 10)
    sink = target.create(SHARD, local_module.LARGE)
    sink.abort()
    assert target.notes == [f"checkpoint.local={tmp_path}/file: written without it: File exists"]


@pytest.mark.parametrize("is_early", [True, False])
def test_an_error_of_the_shared_place_fails_the_file(
    shelf: Shelf, nvme: Path, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    def broken(self: PosixSink, data: memoryview) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), SHARD)

    monkeypatch.setattr(PosixSink, "write", broken)
    sink = begin(shelf, 10).create(SHARD, 4 * MIB)
    with pytest.raises(OSError, match="Input/output error"):  # noqa: PT012
        while is_early:  # seen by a write before the end
            sink.write(memoryview(bytes(1000)))
        sink.write(memoryview(bytes(1000)))
        sink.finish()
    sink.abort()
    sink.abort()
    assert list(nvme.iterdir()) == []


def test_an_abandoned_file_leaves_nothing_on_the_node(run: RunDir, shelf: Shelf, nvme: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    target = begin(shelf, 10)
    sink = target.create(SHARD, 4 * MIB)
    sink.write(memoryview(bytes(2 * MIB)))
    sink.abort()
    target.discard()
    assert list(nvme.iterdir()) == []
    assert list(run.checkpoints.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert save(shelf, 20) == CheckpointName(20, 1)
