"""What killed tools leave goes with the next one; what somebody works on stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from stoker.train.storage import new_directory as module
from stoker.train.storage.new_directory import new_directory, sweep_unfinished
from stoker.train.storage.posix import PosixShelf


def begun_by_another(path: Path) -> int:
    """The pid of a process that stands still in the middle of making `path`."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with new_directory(path) as unfinished:
                unfinished.mkdir()
                (unfinished / "half").write_bytes(b"x")
                os.write(tell, b".")
                signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(ready, 1) == b"."
    os.close(ready)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def make(path: Path) -> None:
    with new_directory(path) as unfinished:
        unfinished.mkdir()
        (unfinished / "file").write_bytes(b"x")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_next_one_takes_away_what_was_killed_and_leaves_what_lives(tmp_path: Path) -> None:
    live = begun_by_another(tmp_path / "live")
    kill(begun_by_another(tmp_path / "killed"))
    assert [name.split(".")[1] for name in names(tmp_path)] == ["tmp-killed", "tmp-live"]
    make(tmp_path / "new")
    left = names(tmp_path)
    assert (len(left), left[0].startswith(".tmp-live."), left[1]) == (2, True, "new")
    kill(live)
    sweep_unfinished(tmp_path)
    assert names(tmp_path) == ["new"]


def test_a_runs_own_cleaning_takes_it_away_too(tmp_path: Path) -> None:
    kill(begun_by_another(tmp_path / "average"))
    PosixShelf(tmp_path).sweep(1)
    assert names(tmp_path) == []


def test_another_machines_goes_when_it_has_been_silent_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(begun_by_another(tmp_path / "old"))
    kill(begun_by_another(tmp_path / "new"))
    monkeypatch.setattr(module, "_machine", lambda: "00000000")
    for path in [p for p in tmp_path.rglob("*") if ".tmp-old" in str(p)]:
        os.utime(path, (1e9, 1e9))
    sweep_unfinished(tmp_path)
    assert [name.split(".")[1] for name in names(tmp_path)] == ["tmp-new"]


def test_another_users_is_left_alone_whose_processes_may_not_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(begun_by_another(tmp_path / "theirs"))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    sweep_unfinished(tmp_path)
    assert len(names(tmp_path)) == 1


def test_other_names_stay(tmp_path: Path) -> None:
    for name in (".tmp-mine", ".tmp-deleting-mine", ".tmp-a.0123abcd-1-2", "a.0123abcd-1-2-0123abcd"):
        (tmp_path / name).mkdir()
    (tmp_path / ".tmp-file.0123abcd-1-2-0123abcd").write_bytes(b"")
    sweep_unfinished(tmp_path)
    assert len(names(tmp_path)) == 5


def test_one_that_was_killed_while_it_was_deleted_goes(tmp_path: Path) -> None:
    (tmp_path / ".tmp-deleting-a.0123abcd-1-2-0123abcd-0123abcd").mkdir()
    sweep_unfinished(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("letter", ["a", "\u00e4"])
def test_long_names_have_room(tmp_path: Path, letter: str) -> None:
    name = letter * (255 // len(letter.encode()))
    make(tmp_path / name)
    assert names(tmp_path) == [name]
