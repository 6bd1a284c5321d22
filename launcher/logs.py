"""`stoker logs RUN`: the logs of all attempts and nodes as one.

Owns: finding the files, and following them over requeues until the run ends. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .find import find_run
from .run.layout import RunDir
from .watch import wait_for_end

_BLOCK = 1 << 16


@dataclass(frozen=True)
class Source:
    """One log file. `label` stands before each of its lines."""

    path: Path
    label: str
    attempt: int | None = None  # None: the job's own output, over all its attempts


def sources(run: RunDir, node: str | None = None, attempt: int | None = None) -> list[Source]:
    """The run's log files: the batch script's first, then by attempt and node.

    Args:
        node, attempt: only these; the batch script's output is neither's.
    """
    found = []
    if node is None and attempt is None and run.job_logs.is_dir():
        found += [Source(p, f"job {p.stem}") for p in sorted(run.job_logs.glob("*.log"), key=_natural)]
    for a in run.all_attempts():
        if attempt is not None and a.number != attempt:
            continue
        for path in sorted((a.path / "logs").glob("*.log"), key=_natural):
            if node is None or path.stem == node:
                found.append(Source(path, f"{a.number} {path.stem}", a.number))
    return found


def _natural(path: Path) -> list[tuple[int, str]]:
    """n2 before n10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def tail_offset(path: Path, lines: int) -> int:
    """Where the last `lines` lines of a file begin, in bytes."""
    with open(path, "rb") as f:
        end = position = f.seek(0, os.SEEK_END)
        seen = b""
        while position > 0 and seen.count(b"\n") <= lines:
            position = max(0, position - _BLOCK)
            f.seek(position)
            seen = f.read(end - position)
    kept = seen.splitlines(keepends=True)[-lines:] if lines else []
    return end - sum(map(len, kept))


@dataclass
class Follower:
    """Prints what is new in a run's logs at every call, whole lines only, each with its label."""

    list_sources: Callable[[], list[Source]]
    write: Callable[[str], object]
    tail: int | None = None  # of files found at the first look: only so many lines
    _offsets: dict[Path, int] = field(default_factory=dict)
    _is_first: bool = True

    def poll(self, with_torn: bool = False) -> bool:
        """Print what has come since; True if there was anything. `with_torn`: also a last line without its end."""
        is_news = False
        for source in self.list_sources():
            if self._is_first and self.tail is not None:
                self._offsets[source.path] = tail_offset(source.path, self.tail)
            for line in self._new_lines(source.path, with_torn):
                self.write(f"[{source.label}] {line}\n")
                is_news = True
        self._is_first = False
        return is_news

    def _new_lines(self, path: Path, with_torn: bool) -> Iterator[str]:
        offset = self._offsets.get(path, 0)
        try:
            with open(path, "rb") as f:
                f.seek(offset)
                for line in f:
                    if not line.endswith(b"\n") and not with_torn:
                        break
                    offset += len(line)
                    yield line.decode("utf-8", "replace").rstrip("\r\n")
        except FileNotFoundError:
            return
        finally:
            self._offsets[path] = offset


def follower(run: RunDir, node: str | None = None, attempt: int | None = None, tail: int | None = None) -> Follower:
    """A Follower of a run's logs that prints to standard output."""
    return Follower(lambda: sources(run, node, attempt), _print, tail)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("stoker logs", description="Show or follow a run's logs over all its attempts.")
    parser.add_argument("run", metavar="RUN", help="run directory, or job id")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends, over requeues")
    parser.add_argument("-n", "--lines", type=int, help="only the last LINES lines of each file")
    parser.add_argument("--node", help="only this node")
    parser.add_argument("--attempt", type=int, help="only this attempt")
    arguments = parser.parse_args(argv)
    run = find_run(arguments.run)
    out = follower(run, arguments.node, arguments.attempt, arguments.lines)
    if not arguments.follow:
        if not out.poll(with_torn=True):
            print(f"{run.path}: no log yet", file=sys.stderr)
        return 0
    end = wait_for_end(run, out.poll)
    out.poll(with_torn=True)
    print(f"{run.path}: {end.state.value} {end.detail}".rstrip(), file=sys.stderr)
    return 0
