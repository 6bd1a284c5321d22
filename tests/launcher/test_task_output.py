"""Output of a user's own processes: whole lines with the rank, progress bars made short, storage that stands still."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from stoker.launcher import task_output
from stoker.launcher.task_output import LONGEST, STALE, Lines, Writer


def test_lines_in_pieces() -> None:
    lines = Lines("[3] ")
    assert lines.feed(b"on", 0.0) == b""
    assert lines.feed(b"e\ntwo\r\n\nthr", 0.0) == b"[3] one\n[3] two\n[3] \n"
    assert lines.end() == b"[3] thr\n"
    assert lines.end() == b""


def test_a_progress_bar_is_what_it_shows_last() -> None:
    lines = Lines("")
    assert lines.feed(b"\r10%", 0.0) + lines.feed(b"\r20%", 1.0) + lines.feed(b"\r99%\n", 2.0) == b"99%\n"
    # Bars that end with the carriage return instead of beginning with it.
    assert lines.feed(b"10%\r", 0.0) + lines.feed(b"20%\r", 1.0) + lines.feed(b"99%\r", 2.0) == b""
    assert lines.end() == b"99%\n"


def test_a_bar_that_goes_on_for_hours_is_seen_now_and_then() -> None:
    lines = Lines("[0] ")
    shown = b""
    for second in range(100):
        shown += lines.feed(f"\r{second}%".encode(), float(second)) + lines.stale(float(second))
    assert 5 <= shown.count(b"\n") <= 100 / STALE
    assert shown.startswith(b"[0] 11%\n")


def test_a_line_without_end_is_broken() -> None:
    lines = Lines("")
    out = b"".join(lines.feed(b"x" * 1000, 0.0) for _ in range(200))
    assert len(out) > 2 * LONGEST
    assert max(map(len, out.split(b"\n"))) <= LONGEST + 1000


def test_storage_that_stands_still_delays_nobody(tmp_path: Path) -> None:
    read, write = os.pipe()  # a pipe that nobody reads, for a log on such storage
    writer = Writer()
    writer.start()
    done = threading.Event()

    def work() -> None:
        for _ in range(1000):
            if not writer.is_full:
                writer.log(write, b"x" * 100_000)
        writer.flush(0.1)
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(20.0)
    assert writer.is_full  # from here on the processes have to wait
    assert writer._asked <= task_output.MAX_PENDING + 100_000
    threading.Thread(target=lambda: [os.read(read, 1 << 20) for _ in range(10**6)], daemon=True).start()
    writer.flush(20.0)
    assert not writer.is_full


def test_what_cannot_be_written_is_lost_and_the_rest_is_not(tmp_path: Path) -> None:
    writer = Writer()
    writer.start()
    fd = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    writer.append(tmp_path / "no" / "such" / "place", "{}")
    writer.log(fd, b"one\n")
    writer.append(tmp_path / "metrics", "{}")
    writer.flush(20.0)
    assert (tmp_path / "log").read_text() == "one\n"
    assert (tmp_path / "metrics").read_text() == "{}\n"
    os.close(fd)


def test_a_log_is_closed_behind_what_was_meant_for_it(tmp_path: Path) -> None:
    read, write = os.pipe()  # a pipe that nobody reads, for storage that stands still
    writer = Writer()
    writer.start()
    fd = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    writer.log(write, b"x" * 1_000_000)
    writer.log(fd, b"last words\n")
    writer.close(fd)
    writer.flush(0.1)
    os.fstat(fd)  # open still: no other file can get its number
    threading.Thread(target=lambda: [os.read(read, 1 << 20) for _ in range(10**6)], daemon=True).start()
    writer.flush(20.0)
    assert (tmp_path / "log").read_text() == "last words\n"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
