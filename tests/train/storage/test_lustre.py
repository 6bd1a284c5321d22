"""Lustre by what `lfs` says (recorded, see recorded/README.md) and by a stand-in for it on the PATH."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
import stoker.train.storage.posix as posix_module
from checkpoint_bytes import SHARD, begin, save
from stoker.conf.schema import CheckpointConfig
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.verification import verify
from stoker.train.storage import lustre
from stoker.train.storage.base import Shelf
from stoker.train.storage.choice import shelf_of
from stoker.train.storage.filesystem import FileSystem
from stoker.train.storage.lustre import Layout, StorageTarget

RECORDED = Path(__file__).parent / "recorded"
MB, GIB = 10**6, 2**30


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def targets(*free: float, states: str = "") -> list[StorageTarget]:
    return [StorageTarget("testfs", index, int(f), states) for index, f in enumerate(free)]


def test_targets_with_numbers_are_read() -> None:
    found = lustre.parse_targets(recorded("df-full"))
    assert found == [
        StorageTarget("testfs", 0, 37850660 * 1024),
        StorageTarget("testfs", 1, 10240 * 1024),
        StorageTarget("testfs", 2, 0, "DS"),
        StorageTarget("testfs", 3, 39829356 * 1024, "D"),
        StorageTarget("testfs", 10, 39829356 * 1024, "R"),
    ]
    assert [t.index for t in found if t.takes_files] == [0, 1, 3]


@pytest.mark.parametrize(
    ("name", "left"), [("quota", 104400 * 1024), ("quota-wrapped", 200 * 1024), ("quota-none", None)]
)
def test_what_a_quota_leaves_is_read(name: str, left: int | None) -> None:
    assert lustre.parse_quota(recorded(name)) == left


def test_a_quota_that_cannot_be_read_is_no_limit_that_is_believed() -> None:
    with pytest.raises(lustre.LfsError, match="cannot be read"):
        lustre.parse_quota("Disk quotas: permission denied\n")


@pytest.mark.parametrize(
    ("shard", "shards", "count", "stripes"),
    [
        (100 * MB, 1, 50, 1),  # small
        (2 * GIB, 1, 50, 8),  # no stripe below 256 MiB
        (50 * GIB, 1, 40, 40),
        (50 * GIB, 1, 400, 64),  # never more
        (8 * GIB, 8, 40, 5),  # together they fill the targets
        (8 * GIB, 1024, 40, 1),  # many files do that by themselves
        (100 * GIB, 1024, 40, 7),  # but none puts more than 16 GiB on one
    ],
)
def test_stripes_follow_the_size_and_the_number_of_files(shard: int, shards: int, count: int, stripes: int) -> None:
    assert lustre.stripes_for(shard, shards, count) == stripes


def test_files_keep_away_from_full_targets() -> None:
    some = targets(1e12, 1e6, 1e12, 1e12)
    lay = [lustre.choose(Path("f"), some, 1000 * MB, 4, 2, number) for number in range(3)]
    assert [(f.stripes, f.targets) for f in lay] == [(2, (0, 2)), (2, (3, 0)), (2, (2, 3))]
    assert lustre.choose(Path("f"), some, 1000 * MB, 4, -1).targets == (0, 2, 3)
    assert lustre.choose(Path("f"), targets(1e12, 1e12), 2 * GIB, 1, 1) == Layout(1, 16 * 2**20)


def test_a_late_file_is_placed_where_it_fits_though_shares_are_used_up() -> None:
    assert lustre.choose(Path("f"), targets(1.5e9, 1.1e9, 1e6), 1000 * MB, 9, 1, 1).targets == (1,)


def test_no_room_names_the_fullest_targets() -> None:
    with pytest.raises(OSError, match=r"No space left on device \(8,000 MB do not fit on 3 storage targets") as caught:
        lustre.check_targets(Path("/scratch/x"), targets(1e9, 5e6, 2e9), 8000 * MB, 4, 0)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == "/scratch/x"
    assert "least free: OST:1 5 MB, OST:0 1,000 MB, OST:2 2,000 MB" in str(caught.value)


def test_one_full_target_is_no_reason_to_refuse() -> None:
    lustre.check_targets(Path("/scratch/x"), targets(1e11, 0, 1e11, 1e11), 8000 * MB, 4, 0)


class Lfs:
    """The stand-in: prints what was recorded, makes the file that it is told to stripe, and writes down its calls."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._calls = directory, directory / "calls"
        script = f"""#!{sys.executable}
import os, sys
words, here = sys.argv[1:], {str(directory)!r}
open(os.path.join(here, "calls"), "a").write(" ".join(words) + "\\n")
answer = os.path.join(here, words[0] + ("-pool" if words[0] == "df" and "-p" in words else ""))
if not os.path.exists(answer):
    sys.exit("error: " + words[0] + ": Operation not supported")
if words[0] == "setstripe":
    os.close(os.open(words[-1], os.O_CREAT | os.O_EXCL))
print(open(answer).read(), end="")
"""
        program = directory / "lfs"
        program.write_text(script)
        program.chmod(0o755)

    def says(self, word: str, text: str) -> None:
        (self._directory / word).write_text(text)

    def calls(self, word: str) -> list[list[str]]:
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line.split()[1:] for line in lines if line.startswith(f"{word} ")]


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lfs:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setattr(posix_module, "file_system", lambda folder: FileSystem.lustre)
    monkeypatch.setattr(lustre, "LARGE", 100_000)
    made = Lfs(directory)
    for word, name in (("df", "df"), ("getstripe", "getstripe"), ("quota", "quota-none")):
        made.says(word, recorded(name))
    made.says("setstripe", "")
    return made


@pytest.fixture
def shelf(run: RunDir) -> Shelf:
    return shelf_of(run, CheckpointConfig(stripes=2))


LARGE = b"y" * 200_000


def test_only_large_files_are_striped(run: RunDir, shelf: Shelf, lfs: Lfs) -> None:
    name = save(shelf, 10, LARGE)
    verify(run.checkpoint(name))
    unfinished = f"{run.checkpoints}/.tmp-step-00000010-a0001-g0001-00000001"
    assert lfs.calls("setstripe") == [["-c", "2", "-S", str(4 * 2**20), f"{unfinished}/{SHARD}"]]


def test_a_pool_is_kept(run: RunDir, shelf: Shelf, lfs: Lfs) -> None:
    lfs.says("getstripe", recorded("getstripe-pool"))
    lfs.says("df-pool", recorded("df-pool"))
    save(shelf, 10, LARGE)
    assert ["-p", "testfs.flash", str(run.checkpoints)] in lfs.calls("df")
    assert lfs.calls("setstripe")[0][:4] == ["-c", "2", "-p", "flash"]


def test_a_sites_progressive_layout_stays_unless_stripes_are_asked_for(run: RunDir, shelf: Shelf, lfs: Lfs) -> None:
    lfs.says("getstripe", recorded("getstripe-pfl"))
    save(shelf_of(run, CheckpointConfig()), 10, LARGE)
    assert lfs.calls("setstripe") == []
    save(shelf, 20, LARGE)
    assert len(lfs.calls("setstripe")) == 1


def test_full_targets_are_left_out_by_number(run: RunDir, shelf: Shelf, lfs: Lfs) -> None:
    lfs.says("df", recorded("df-full").replace("10240 100%", "   10 100%"))
    verify(run.checkpoint(save(shelf, 10, LARGE)))
    assert lfs.calls("setstripe")[0][:2] == ["-o", "0,3"]


def test_a_quota_that_is_too_small_is_an_error_before_anything_is_written(run: RunDir, shelf: Shelf, lfs: Lfs) -> None:
    lfs.says("quota", recorded("quota-wrapped"))
    said = rf"Disk quota exceeded \(user {os.geteuid()}: 0 MB needed, 0 MB left\)"
    with pytest.raises(OSError, match=said) as caught:
        begin(shelf, 10, size=len(LARGE))
    assert (caught.value.errno, caught.value.filename) == (errno.EDQUOT, str(run.checkpoints))
    assert list(run.checkpoints.iterdir()) == []


@pytest.mark.parametrize(
    ("silent", "notes"),
    [
        ("df", ["Lustre's defaults for new files hold, full targets are not avoided: lfs df: exit 1: error: df: Oper"]),
        ("setstripe", ["Lustre's defaults for new files hold, full targets are not avoided: lfs setstripe: exit 1"]),
        ("quota", ["quota not known: lfs quota: exit 1: error: quota: Operation not supported"]),
    ],
)
def test_what_lfs_refuses_costs_no_checkpoint(
    run: RunDir, shelf: Shelf, lfs: Lfs, tmp_path: Path, silent: str, notes: list[str]
) -> None:
    (tmp_path / "bin" / silent).unlink()
    target = begin(shelf, 10)
    sink = target.create(SHARD, len(LARGE))
    sink.write(memoryview(LARGE))
    sink.finish()
    assert [n[: len(f"{run.checkpoints}: {said}")] for n, said in zip(target.notes, notes, strict=True)] == [
        f"{run.checkpoints}: {said}" for said in notes
    ]


def test_without_lfs_the_file_systems_own_defaults_hold(
    run: RunDir, shelf: Shelf, lfs: Lfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    target = begin(shelf, 10)
    assert target.notes == [
        f"{run.checkpoints}: Lustre's defaults for new files hold, full targets are not avoided: lfs is not on the PATH"
    ]
    verify(run.checkpoint(save(shelf, 20, LARGE)))
