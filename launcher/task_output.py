"""What a user's own processes print, on its way into the node's log.

Owns: lines with the rank before them, progress bars that cost one line now and then, and writing from a thread, so
that storage which stands still delays neither signals nor news of the processes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from pathlib import Path

from .run.files import append_line

LONGEST = 65536  # bytes; a longer line is broken
STALE = 10.0  # seconds after which an unfinished line is shown as it is
MAX_PENDING = 32 << 20  # bytes that may wait for storage before the processes have to


class Lines:
    """One process's output, cut into whole lines.

    A carriage return takes a line back, as on a terminal: of a progress bar only what it shows at the end of the line
    is kept, or what it shows every STALE seconds.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix, self._rest, self._since = prefix.encode(), b"", 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        """What can be written now."""
        *lines, rest = (self._rest + data).split(b"\n")
        if lines or not self._rest:
            self._since = now
        cut = rest.rstrip(b"\r").rfind(b"\r")
        self._rest = rest[cut + 1 :]
        if len(self._rest) > LONGEST:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(self._line(line) for line in lines)

    def stale(self, now: float) -> bytes:
        """An unfinished line that has waited for long enough."""
        return self.end() if self._rest and now - self._since > STALE else b""

    def end(self) -> bytes:
        rest, self._rest = self._rest, b""
        return self._line(rest) if rest.strip() else b""

    def _line(self, line: bytes) -> bytes:
        line = line.rstrip(b"\r")
        return self._prefix + line[line.rfind(b"\r") + 1 :] + b"\n"


class Writer(threading.Thread):
    """Writes in the order in which it is asked to. What storage refuses is lost; the processes go on."""

    def __init__(self) -> None:
        super().__init__(name="writer", daemon=True)
        self._queue: queue.SimpleQueue[tuple[int | Path, bytes | None] | threading.Event] = queue.SimpleQueue()
        self._asked = self._done = 0

    @property
    def is_full(self) -> bool:
        return self._asked - self._done > MAX_PENDING

    def log(self, fd: int, data: bytes) -> None:
        if data:
            self._put(fd, data)

    def append(self, path: Path, line: str) -> None:
        self._put(path, line.encode())

    def close(self, fd: int) -> None:
        """Close a log once all that was meant for it is written. Closed before, its number would be another's."""
        self._queue.put((fd, None))

    def _put(self, where: int | Path, data: bytes) -> None:
        self._asked += len(data)
        self._queue.put((where, data))

    def flush(self, seconds: float) -> None:
        """Wait until all that was asked for so far is written, but not for longer than that."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait(seconds)

    def run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            where, data = item
            with contextlib.suppress(OSError):
                if data is None:
                    assert isinstance(where, int)
                    os.close(where)
                elif isinstance(where, Path):
                    append_line(where, data.decode())
                else:
                    _write_all(where, data)
            self._done += len(data or b"")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            time.sleep(0.01)
