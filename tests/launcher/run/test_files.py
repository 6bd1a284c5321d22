"""Files appear whole, exclusively where asked, and line files survive torn lines."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stoker.launcher.run import files


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_write_atomic_replaces_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "a", "one")
    files.write_atomic(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_text() == "two"
    assert names(tmp_path) == ["a"]


def test_create_exclusive_keeps_the_first(tmp_path: Path) -> None:
    assert files.create_exclusive(tmp_path / "a", "one")
    assert not files.create_exclusive(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "one"
    assert names(tmp_path) == ["a"]


def test_create_exclusive_believes_the_file_and_not_a_repeated_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def answered_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)  # as NFS does after a lost answer: this one fails

    monkeypatch.setattr(os, "link", answered_twice)
    assert files.create_exclusive(tmp_path / "a", "ours")
    assert not files.create_exclusive(tmp_path / "a", "theirs")


def test_reader_never_sees_a_partial_file(tmp_path: Path) -> None:
    target = tmp_path / "a"
    files.write_atomic(target, "x" * 100_000)
    code = (
        "import sys; from pathlib import Path; from stoker.launcher.run import files\n"
        "for n in range(100): files.write_atomic(Path(sys.argv[1]), 'xy'[n % 2] * 100_000)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(target)])
    try:
        while writer.poll() is None:
            text = target.read_text()
            assert len(text) == 100_000
            assert len(set(text)) == 1
    finally:
        writer.kill()
        assert writer.wait() == 0


@pytest.fixture
def limited_file_size() -> object:
    """Files of this process cannot grow over 4 KiB; writes then fail like on a full disk (EFBIG)."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("limited_file_size")
@pytest.mark.parametrize("write", [files.write_atomic, files.create_exclusive, files.append_line])
def test_full_disk_error_names_the_file_and_leaves_the_old_content(
    tmp_path: Path, write: Callable[[Path, str], object]
) -> None:
    old = tmp_path / "old"
    old.write_text("old\n")
    target = old if write is files.write_atomic else tmp_path / "new"
    with pytest.raises(OSError, match="File too large") as e:
        write(target, "x" * 10_000)
    assert (e.value.errno, e.value.filename) == (errno.EFBIG, str(target))
    assert old.read_text() == "old\n"
    assert not [n for n in names(tmp_path) if n.startswith(".tmp-")]


def test_line_after_a_torn_line_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    files.append_line(path, '{"n":1}')
    with path.open("ab") as f:
        f.write(b'{"n":2,"te')  # the disk was full
    files.append_line(path, '{"n":3}')
    assert list(files.read_lines(path)) == [{"n": 1}, {"n": 3}]
    assert path.read_bytes() == b'{"n":1}\n{"n":2,"te\n{"n":3}\n'


def test_read_lines_passes_over_what_is_no_object(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'\n[1]\n7\n\xff\xfe\n{"n":1}\n{"n":')
    assert list(files.read_lines(path)) == [{"n": 1}]
    assert list(files.read_lines(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"a": 1', "not valid JSON"),
        (b"[1]", "found list"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"", "not valid JSON"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_read_json_names_file_and_fault(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as e:
        files.read_json(path)
    assert str(path) in str(e.value)


def test_nan_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        files.write_json(tmp_path / "a", {"loss": float("nan")})
    assert names(tmp_path) == []
