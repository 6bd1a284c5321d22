"""Storage that is full, read-only, slow or broken, for real where that can be had: the save fails with the file's name,
older checkpoints are untouched, nothing half-made is left, and the next save works."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from persist_parts import RankData, answer, request
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.verification import verify
from stoker.train.state.persist import Answer
from stoker.train.state.persist_local import LocalPersister
from stoker.train.storage.direct import NewFile
from stoker.train.storage.posix import PosixShelf

MIB = 2**20
TEN, TWENTY, THIRTY = (CheckpointName(step, 1) for step in (10, 20, 30))


class Saver:
    """One rank, its writer, and the shelf."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.data = run, RankData(0, 1, seed=1)
        self.shelf = PosixShelf(run.checkpoints)
        self.persister = LocalPersister(run, self.shelf, self.data.fds)
        self.job = 0

    def begin(self, step: int) -> None:
        self.job += 1
        part = self.data.part(self.run, self.job, step, 1)
        part.spec["total"] = len(self.data.data)
        self.data.save(self.persister, part)

    def save(self, step: int) -> None:
        self.begin(step)
        self.persister.publish(self.job, request([answer(self.persister, "part")], step))
        answer(self.persister, "published")

    def fail(self, step: int) -> str:
        """A save that fails, as far as the checkpointer takes it; what it is told."""
        self.begin(step)
        found: list[Answer] = []
        while not any(a.what in ("failed", "part") for a in found):
            found += self.persister.wait(60.0)
        assert found[-1].what == "failed"
        self.persister.abandon(self.job)
        return str(found[-1].error)

    def close(self) -> None:
        self.persister.close()
        for fd in self.data.fds:
            os.close(fd)


@pytest.fixture
def saver(run: RunDir) -> Iterator[Saver]:
    made = Saver(run)
    yield made
    made.close()


def mounted(place: Path, *options: str) -> Iterator[Path]:
    place.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or subprocess.run(["mount", *options, str(place)], capture_output=True).returncode != 0:
        pytest.skip("may not mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def small_disk(run: RunDir) -> Iterator[Path]:
    """32 MiB below the checkpoints: two of them fit."""
    yield from mounted(run.checkpoints, "-t", "tmpfs", "-o", "size=32m,nr_inodes=64", "tmpfs")


def names(run: RunDir) -> list[str]:
    return sorted(p.name for p in run.checkpoints.iterdir())


def check_recovered(saver: Saver) -> None:
    """The older one is untouched, the next one comes, and there is nothing else."""
    verify(saver.run.checkpoint(TEN))
    saver.save(30)
    verify(saver.run.checkpoint(THIRTY))
    assert names(saver.run) == [str(TEN), str(THIRTY)]


def test_a_disk_without_room_is_known_before_anything_is_written(
    saver: Saver, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.save(10)
    (small_disk / "other").write_bytes(bytes(14 * MIB))
    with monkeypatch.context() as m:
        m.setattr(NewFile, "__init__", None)  # no file is made
        said = saver.fail(20)
    assert said.startswith(f"{small_disk}: No space left on device (")
    assert " MB needed, " in said
    (small_disk / "other").unlink()
    check_recovered(saver)


def test_a_disk_that_fills_up_meanwhile(saver: Saver, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver.save(10)
    create: Callable[..., None] = NewFile.__init__

    def create_and_fill(self: NewFile, path: Path, *rest: Any) -> None:
        (small_disk / "other").write_bytes(bytes(14 * MIB))
        create(self, path, *rest)

    with monkeypatch.context() as m:
        m.setattr(NewFile, "__init__", create_and_fill)
        said = saver.fail(20)
    assert said.endswith("/shard-00000.safetensors: No space left on device")
    (small_disk / "other").unlink()
    check_recovered(saver)


def test_a_disk_without_inodes(saver: Saver, small_disk: Path) -> None:
    saver.save(10)
    others = [small_disk / f"other-{k}" for k in range(54)]
    for other in others:
        other.touch()
    assert saver.fail(20).startswith(f"{small_disk}: No space left on device (8 files needed, ")
    for other in others:
        other.unlink()
    check_recovered(saver)


def test_a_disk_that_became_read_only(saver: Saver, small_disk: Path) -> None:
    saver.save(10)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    said = saver.fail(20)
    assert said.startswith(f"{small_disk}/.tmp-step-00000020-a0001-g0001-")
    assert said.endswith(": Read-only file system")
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    check_recovered(saver)


@pytest.fixture
def broken_disk(run: RunDir, tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 64 MiB on a loop device whose blocks have only 20 MiB: it promises room and cannot keep that."""
    below = mounted(tmp_path / "below", "-t", "tmpfs", "-o", "size=20m", "tmpfs")
    image = next(below) / "image"
    with open(image, "wb") as f:
        f.truncate(64 * MIB)
    if subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], capture_output=True).returncode != 0:
        pytest.skip("no mkfs.ext4")
    yield from mounted(run.checkpoints, "-o", "loop", str(image))
    next(below, None)


def test_a_disk_that_loses_blocks(saver: Saver, broken_disk: Path) -> None:
    saver.save(10)
    said = saver.fail(20)
    assert said.endswith(("Input/output error", "No space left on device"))
    assert f"{broken_disk}/" in said
    saver.persister.close()  # its thread has taken the rest away
    verify(saver.run.checkpoint(TEN))
    assert [n for n in names(saver.run) if n != "lost+found"] == [str(TEN)]
    assert [str(n) for n in saver.shelf.names()] == [str(TEN)]


def test_storage_that_stands_still_keeps_nobody_waiting(
    saver: Saver, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.save(10)
    is_stuck, may_go_on = threading.Event(), threading.Event()
    write = NewFile.write

    def stuck(self: NewFile, data: memoryview) -> None:
        is_stuck.set()
        assert may_go_on.wait(60)
        write(self, data)

    with monkeypatch.context() as m:
        m.setattr(NewFile, "write", stuck)
        saver.begin(20)
        assert is_stuck.wait(60)
        assert saver.persister.poll() == []
        saver.persister.abandon(saver.job)  # returns though nothing moves
        may_go_on.set()
        check_recovered(saver)
