"""What srun says on standard error: passed on as it is, and read for nodes whose agent failed to start.

Owns: the pipe and the two forms of words. srun itself goes on as long as any agent lives, so only its words tell early
that one never came up. Words that are not understood cost nothing but time: the start's limit names the node then.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from typing import IO, NamedTuple

from .jobnodes import hostnames

# "srun: error: n[2-3]: tasks 1-2: Exited with exit code 127"; "... Task launch for StepId=7.0 failed on node n2: ..."
_TASK = re.compile(r"srun: error: (\S+): tasks? [\d,\-]+: (.+)")
UNKNOWN_OPTION = "srun: unrecognized option"  # it has started nothing then
# Of a job that has just been requeued: its end on the former nodes is still going on.
_TOO_EARLY = "Job/step already completing or completed"
_LONGEST = 300  # characters of a line that go into a reason
_LAUNCH = re.compile(r"srun: error: .*failed on node (\S+?): (.+)")


class Failure(NamedTuple):
    """A node that a line names as failed."""

    node: str
    reason: str
    is_end_of_all: bool = False  # srun could start nothing on it, gives up, and kills what it has started elsewhere


def failures_in(line: str) -> Iterator[Failure]:
    task, launch = _TASK.search(line), _LAUNCH.search(line)
    if found := task or launch:
        for node in hostnames(found[1]):
            yield Failure(node, found[2].strip(), is_end_of_all=task is None)


def telling(line: str) -> str:
    """The line, if it says why something did not start; "" for what srun adds to it."""
    line = line.strip()
    is_srun_s = line.startswith(("srun:", "slurmstepd:", "Try ")) and UNKNOWN_OPTION not in line
    return "" if is_srun_s else line[:_LONGEST]


class SrunWords:
    """Reads a stream to its end in a thread of its own."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._found: list[Failure] = []
        self._last = ""
        self.is_too_early = False  # no step can be had yet
        self._thread = threading.Thread(target=self._read, name="srun", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for raw in self._stream:
            line = raw.decode(errors="replace")
            try:
                sys.stderr.write(line)
                sys.stderr.flush()
            except (OSError, ValueError):
                pass  # a full disk must not stop srun
            failures = list(failures_in(line))
            with self._lock:
                self._found += failures
                self._last = telling(line) or self._last
                self.is_too_early |= _TOO_EARLY in line

    @property
    def last(self) -> str:
        """The newest line that tells why something did not start."""
        with self._lock:
            return self._last

    def take(self) -> list[Failure]:
        """Failures since the last call."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def join(self) -> None:
        """Once srun has ended: what it said last."""
        self._thread.join(timeout=2.0)
