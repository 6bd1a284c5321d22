"""What the kernel says of other processes: state, signals, open memory files. `proc` is /proc, or a test's copy of it.

Owns: parsing of /proc. A process that is gone, or is somebody else's, is None or empty, never an error.
Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_WORDS = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended, not yet reaped",
    "X": "ended",
    "I": "idle",
}


@dataclass(frozen=True)
class Standing:
    """What a process is doing, as the kernel sees its main thread."""

    letter: str  # of proc(5): R, S, D, T, t, Z
    wchan: str  # kernel function it waits in; empty if it does not or the kernel does not say
    kernel: tuple[str, ...] = ()  # kernel stack, where we may read it (root)
    blocked_threads: int = 0  # further threads in uninterruptible sleep

    @property
    def words(self) -> str:
        return _WORDS.get(self.letter, f"in state {self.letter}")


def pids(proc: Path = PROC) -> list[int]:
    return sorted(int(name) for name in os.listdir(proc) if name.isdecimal())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def status(pid: int, proc: Path = PROC, thread: int | None = None) -> dict[str, str]:
    """Fields of /proc/PID/status; {} if there is no such process."""
    path = proc / str(pid) / "status" if thread is None else proc / str(pid) / "task" / str(thread) / "status"
    pairs = (line.split(":", 1) for line in _text(path).splitlines() if ":" in line)
    return {key: value.strip() for key, value in pairs}


def standing(pid: int, proc: Path = PROC) -> Standing | None:
    """None if the process is gone."""
    letter = _letter(pid, pid, proc)
    if letter is None:
        return None
    wchan = _text(proc / str(pid) / "wchan").strip()
    kernel = tuple(line.split("] ", 1)[-1] for line in _text(proc / str(pid) / "stack").splitlines())
    others = [_letter(pid, t, proc) for t in threads(pid, proc) if t != pid]
    return Standing(letter, "" if wchan == "0" else wchan, kernel, others.count("D"))


def _letter(pid: int, thread: int, proc: Path) -> str | None:
    # The command's name, in parentheses, may itself hold spaces and parentheses.
    rest = _text(proc / str(pid) / "task" / str(thread) / "stat").rpartition(")")[2].split()
    return rest[0] if rest else None


def threads(pid: int, proc: Path = PROC) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(proc / str(pid) / "task"))
    except OSError:
        return []


def children(pid: int, proc: Path = PROC) -> list[int]:
    """Processes whose parent this is."""
    return [p for p in pids(proc) if status(p, proc).get("PPid") == str(pid)]


def own_pid(pid: int, proc: Path = PROC) -> int | None:
    """The process's number in its own PID namespace (a container's)."""
    fields = status(pid, proc)
    numbers = (fields.get("NSpid") or fields.get("Pid") or "").split()
    return int(numbers[-1]) if numbers else None


def has_signal(mask: str | None, number: int) -> bool:
    """Whether a mask of /proc/PID/status (hexadecimal) holds a signal."""
    return bool(int(mask or "0", 16) >> (number - 1) & 1)


def links(pid: int, proc: Path = PROC) -> Iterator[tuple[int, str]]:
    """(descriptor, what it leads to) of a process that we may look into."""
    directory = proc / str(pid) / "fd"
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        try:
            yield int(name), os.readlink(directory / name)
        except OSError:
            continue


def environment(pid: int, proc: Path = PROC) -> dict[str, str]:
    """The environment that the process was started with; {} if we may not read it."""
    try:
        data = (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0") if b"=" in entry)
    return {key: value for key, _, value in pairs}
