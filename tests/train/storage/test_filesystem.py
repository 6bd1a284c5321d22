"""Which file system a directory lies in, whether there is room, and patience with those of other nodes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import stoker.train.storage.filesystem as filesystem_module
import stoker.train.storage.posix as posix_module
from checkpoint_bytes import begin, put, save
from stoker.launcher.run.layout import RunDir
from stoker.train.state.source import FileSource
from stoker.train.storage.filesystem import FileSystem, check_room, file_system, patiently
from stoker.train.storage.posix import PosixShelf


def test_kinds_are_known_by_the_kernels_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system(Path("/dev/shm")) is FileSystem.memory
    assert file_system(Path("/proc")) is FileSystem.other
    assert file_system(tmp_path / "nowhere") is FileSystem.other
    for magic, kind in ((0x0BD00BD0, FileSystem.lustre), (0x6969, FileSystem.nfs), (0x47504653, FileSystem.gpfs)):
        monkeypatch.setattr(filesystem_module, "_magic", lambda directory, found=magic: found)
        assert file_system(tmp_path) is kind
        assert kind.is_shared


def room(monkeypatch: pytest.MonkeyPatch, **found: int) -> None:
    values = {"f_blocks": 10**6, "f_bavail": 1000, "f_frsize": 2**20, "f_files": 10**6, "f_favail": 10**6} | found
    monkeypatch.setattr(os, "statvfs", lambda directory: SimpleNamespace(**values))


def test_room_is_checked_with_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch)
    check_room(Path("/x"), 980 * 2**20, 10)
    with pytest.raises(OSError, match=r"No space left on device \(1,055 MB needed, 1,049 MB free\): '/x'") as caught:
        check_room(Path("/x"), 990 * 2**20, 10)
    assert caught.value.errno == errno.ENOSPC


def test_a_file_system_that_does_not_say_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, f_blocks=0, f_bavail=0)
    check_room(Path("/x"), 2**40, 10)


def test_no_inodes_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, f_favail=9)
    with pytest.raises(OSError, match=r"10 files needed, 9 inodes free"):
        check_room(Path("/x"), 1, 10)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_another_nodes_file_is_waited_for(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    slept: list[float] = []
    monkeypatch.setattr(filesystem_module.time, "sleep", slept.append)

    def read() -> str:
        if len(slept) < 3:
            raise OSError(code, os.strerror(code), "part")
        return "found"

    assert patiently(read, FileSystem.nfs) == "found"
    assert slept == [0.1, 0.2, 0.4]


def test_patience_has_an_end_and_is_not_for_local_disks_or_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(filesystem_module.time, "sleep", slept.append)

    def missing() -> None:
        raise FileNotFoundError(errno.ENOENT, "no", "part")

    def broken() -> None:
        raise OSError(errno.EIO, "broken", "part")

    for work, kind in ((missing, FileSystem.local), (broken, FileSystem.nfs)):
        with pytest.raises(OSError, match="part"):
            patiently(work, kind)
    assert slept == []
    with pytest.raises(FileNotFoundError):
        patiently(missing, FileSystem.nfs)
    assert 60 < sum(slept) < 70


def test_a_target_reads_patiently(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix_module, "file_system", lambda folder: FileSystem.nfs)
    target = begin(PosixShelf(run.checkpoints), 10)
    monkeypatch.setattr(filesystem_module.time, "sleep", lambda pause: put(target, "part", b"late"))
    assert target.read("part") == b"late"


def test_a_stale_handle_is_opened_again_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save(PosixShelf(run.checkpoints), 10, b"0123456789")
    source = FileSource(run.checkpoint(name))
    preadv, stale = os.preadv, [True]

    def once(fd: int, buffers: list[memoryview], at: int) -> int:
        if stale.pop() if stale else False:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", once)
    into = bytearray(4)
    source.read("shard-00000.safetensors", 3, memoryview(into))
    assert into == b"3456"
    stale += [True]
    with pytest.raises(Exception, match="Stale file handle"):
        source.read("shard-00000.safetensors", 3, memoryview(into))
