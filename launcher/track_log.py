"""What wandb holds on this disk: the steps in its own log files, and which processes still write them.

Owns: reading the `.wandb` files below a run's report directory. They are the tracker's watermark: a step was recorded
if and only if it stands in one of them. wandb's service buffers, so no note of ours made before or after a call of
wandb could be true after a kill. Does not own: the records' schema (track.py hands in wandb's). Standard library only.

Format: a 7-byte header, then LevelDB's log format (blocks of 32 KiB, each piece of a record with crc32 of type and
data, length, type), the checksum being zlib's; source: wandb's core/pkg/leveldb and LevelDB's doc/log_format.md.
"""

from __future__ import annotations

import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

_MAGIC = b":W&B"
_HEADER_SIZE = 7
_BLOCK = 32 * 1024
_PIECE = struct.Struct("<IHB")  # checksum, length, type
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_TAIL_BLOCKS = 8  # looked at first: records of steps come all the time, so the last is near the end

_LEFTOVER = 30.0  # seconds the service of a killed tracker may take to end; it takes one or two
_QUIET = 5.0  # it writes every two seconds

StepOf = Callable[[bytes], "int | None"]  # the step of a serialised record, None if it is no history record


def records(data: bytes, has_header: bool = True) -> Iterator[tuple[int, bytes]]:
    """(offset behind it, record) of the whole records in a file, or in its end from a block's beginning (no header).

    A record that began before and a torn one at the end are passed over; behind a damaged piece it goes on with the
    next block.
    """
    at = _HEADER_SIZE if has_header else 0
    record: bytes | None = None
    while at + _PIECE.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _PIECE.size:
            at += left
            continue
        checksum, length, kind = _PIECE.unpack_from(data, at)
        body = data[at + _PIECE.size : at + _PIECE.size + length]
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or zlib.crc32(data[at + 6 : at + 7] + body) != checksum:
            at, record = at + left, None
            continue
        at += _PIECE.size + length
        if kind in (_FULL, _FIRST):
            record = body
        elif record is not None:
            record += body
        if record is not None and kind in (_FULL, _LAST):
            yield at, record
            record = None


def _ends(path: Path) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
    """(where it begins, records) of the end of a file, then of all of it: the caller stops when it has enough.

    Raises:
        ValueError: it is no `.wandb` file.
    """
    with open(path, "rb") as f:
        header = f.read(_HEADER_SIZE)
        if header[: len(_MAGIC)] != _MAGIC[: len(header)]:
            raise ValueError(f"{path}: not a log file of wandb (it begins with {header!r}, expected {_MAGIC!r})")
        blocks = f.seek(0, os.SEEK_END) // _BLOCK
        for first in dict.fromkeys((max(0, blocks - _TAIL_BLOCKS), 0)):
            f.seek(first * _BLOCK)
            yield first * _BLOCK, list(records(f.read(), has_header=first == 0))


def last_step(path: Path, step_of: StepOf) -> int:
    """The highest step in a `.wandb` file, 0 if it has none. Raises ValueError."""
    for _, found in _ends(path):
        steps = [step for _, record in found if (step := step_of(record)) is not None]
        if steps:
            return max(steps)
    return 0


def cut_torn_end(path: Path) -> bool:
    """Take away the piece of a record that a killed writer has left at the end; False if there is none.

    It holds nothing, but `wandb sync` would stop at it, for this file and for all later ones of the run. Only for a
    file that nobody writes any more.
    """
    size = path.stat().st_size
    for start, found in _ends(path):
        if found or start == 0:
            end = start + found[-1][0] if found else min(size, _HEADER_SIZE)
            break
    if end == size:
        return False
    os.truncate(path, end)
    return True


def log_files(directory: Path, wandb_id: str) -> list[Path]:
    """The `.wandb` files of one W&B run below wandb's directory: one per session of the tracker."""
    return sorted(directory.glob(f"*run-*/run-{wandb_id}.wandb"))


def recorded_step(directory: Path, wandb_id: str, step_of: StepOf) -> int:
    """The highest step that any of them holds."""
    return max((last_step(path, step_of) for path in log_files(directory, wandb_id)), default=0)


def wait_for_writers(directory: Path, seconds: float = _LEFTOVER) -> int | None:
    """Until nobody on this host writes below `directory`; a process that still does after so many seconds."""
    deadline = time.monotonic() + seconds
    while found := writers(directory):
        if time.monotonic() > deadline:
            return found[0]
        time.sleep(0.2)
    return None


def wait_until_unchanged(files: list[Path], seconds: float = _QUIET) -> None:
    """Until the files have had the same sizes for so long: processes on another host cannot be seen from here."""
    before, since = None, time.monotonic()
    while time.monotonic() - since < seconds:
        sizes = [path.stat().st_size for path in files]
        if sizes != before:
            before, since = sizes, time.monotonic()
        time.sleep(0.1)


def writers(directory: Path) -> list[int]:
    """Processes on this host that can still write a `.wandb` file below `directory`.

    wandb's service outlives a killed tracker by a second or two; until it is gone, the files do not tell everything.
    """
    root = os.path.realpath(directory)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(_is_writing(process, fd, root) for fd in os.listdir(process / "fd")):
                found.append(int(process.name))
        except OSError:
            continue  # ended meanwhile, or somebody else's
    return found


def _is_writing(process: Path, fd: str, root: str) -> bool:
    try:
        target = os.readlink(process / "fd" / fd)
        if not target.startswith(root + "/") or not target.endswith(".wandb"):
            return False
        flags = re.search(r"^flags:\s*([0-7]+)", (process / "fdinfo" / fd).read_text(), re.MULTILINE)
        return flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        return False
