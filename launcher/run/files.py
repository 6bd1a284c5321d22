"""Files that others see appear whole, and never change.

Owns: atomic creation, exclusive creation, appending whole lines, strict JSON reading.
Does not own: which files there are (layout.py) or what stands in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that has none: write, fsync and close do not know what they work on."""
    try:
        yield
    except OSError as e:
        if e.filename is not None:
            raise
        raise OSError(e.errno, e.strerror, str(path)) from e


def fsync_dir(directory: Path) -> None:
    """Make renames and creations in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(directory):
            os.fsync(fd)
    finally:
        os.close(fd)


def temporary_name(path: Path) -> Path:
    """A name in the same directory that no reader takes for a finished file (all start with `.tmp-`)."""
    return path.with_name(f".tmp-{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


GOING = ".tmp-deleting-"  # a directory's name begins so from the moment on at which it is given up


def give_up(directory: Path) -> Path | None:
    """Take a directory away in one call, so that nobody sees half of it: its new name, under which it can be deleted.
    None if it was not there. Raises OSError: it still is."""
    going = directory.with_name(f"{GOING}{directory.name.removeprefix('.tmp-')}-{secrets.token_hex(4)}")
    try:
        os.rename(directory, going)
    except FileNotFoundError:
        return None
    return going


@contextlib.contextmanager
def _staged(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    tmp = temporary_name(path)
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with naming(path), open(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        yield tmp
    finally:
        with contextlib.suppress(FileNotFoundError):
            tmp.unlink()


def write_atomic(path: Path, data: bytes | str, mode: int = 0o644) -> None:
    """Write `path` so that readers see all of it or none of it; an existing file is replaced."""
    with _staged(path, data.encode() if isinstance(data, str) else data, mode) as tmp:
        os.replace(tmp, path)
    fsync_dir(path.parent)


def now_at(directory: Path) -> float:
    """The time, in Unix seconds, by the clock that gives the files below `directory` their times: a file server's, on
    most network file systems. Our own where nothing may be written there."""
    probe = temporary_name(directory / "now")
    try:
        with open(probe, "xb"):
            pass
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def create_exclusive(path: Path, data: bytes | str, mode: int = 0o644) -> bool:
    """Create `path` whole, or return False and leave it alone if it exists already.

    `link` is the one POSIX call that both publishes a complete file and fails if the name is taken.
    """
    with _staged(path, data.encode() if isinstance(data, str) else data, mode) as tmp:
        try:
            os.link(tmp, path)
        except FileExistsError:
            # A network file system repeats a request whose answer was lost, and then finds what it made itself.
            if not os.path.samefile(tmp, path):
                return False
    fsync_dir(path.parent)
    return True


def to_json(value: Any) -> str:
    """One line of strict JSON (NaN and infinities are refused: no other reader takes them)."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def create_json(path: Path, value: Any) -> bool:
    return create_exclusive(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a JSON object; the message names the file.
    """
    return parse_json(path.read_bytes(), str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; `where` is its name for messages. Raises ValueError as `read_json`."""
    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as e:
        raise ValueError(f"{where}: not UTF-8 ({e.reason} at byte {e.start}); expected a complete JSON object") from e
    except json.JSONDecodeError as e:
        raise ValueError(
            f"{where}: not valid JSON ({e.msg} at line {e.lineno}); expected a complete JSON object"
        ) from e
    except RecursionError as e:  # nothing of ours is nested so deeply, and it is no ValueError
        raise ValueError(f"{where}: not valid JSON (nested too deeply); expected a complete JSON object") from e
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def append_line(path: Path, line: str) -> None:
    """Append one line in a single write, so that a crash leaves at most a torn last line.

    A torn line (the disk was full) is closed first: otherwise it would spoil the line that follows it.

    Raises:
        OSError: with the file's name; part of the line may have been written.
    """
    assert "\n" not in line
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        with naming(path):
            size = os.fstat(fd).st_size
            is_torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            data = memoryview(b"\n" * is_torn + line.encode() + b"\n")
            while data:
                data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a line file. A torn line (its writer was killed) is passed over; a missing file is empty."""
    try:
        f = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115 (closed below; the generator outlives a with)
    except FileNotFoundError:
        return
    with f:
        for line in f:
            try:
                value = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(value, dict):
                yield value
