"""The processes of one group of contenders, seen from benchmarks/checkpoint.py: orders to all ranks, their answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Group:
    """`size` ranks of one module; they stand still between orders. What they print goes to `log`."""

    module: str
    processes: list[subprocess.Popen[bytes]]
    orders: list[IO[str]]
    answers: list[IO[str]]
    log: Path

    @staticmethod
    def start(module: str, python: Path | str, fds: list[tuple[int, ...]] | None, options: dict[str, Any]) -> Group:
        """`options`: those of Setting (rank.py) but rank and fds. `fds`: by rank; None: an environment of its own,
        which is to see nothing of this one."""
        root, size = Path(options["root"]), options["size"]
        log = root / f"{module}-{size}.log"
        group = Group(module, [], [], [], log)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if fds is None:
            environment.pop("PYTHONPATH", None)
        for rank in range(size):
            order_read, order_write = os.pipe()
            answer_read, answer_write = os.pipe()
            given = () if fds is None else fds[rank]
            own = options | {"rank": rank, "fds": given, "module": module}
            own |= {"orders": order_read, "answers": answer_write}
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [python, HERE / "rank.py", json.dumps(own)],
                    env=environment,
                    cwd=root,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(order_read, answer_write, *given),
                )
            os.close(order_read)
            os.close(answer_write)
            group.processes.append(process)
            group.orders.append(os.fdopen(order_write, "w"))
            group.answers.append(os.fdopen(answer_read))
        return group

    def wait(self) -> list[dict[str, Any]]:
        """Every rank's answer to the last order."""
        lines = [answers.readline() for answers in self.answers]
        if not all(lines):
            end = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
            raise SystemExit(f"{self.module} ended before its measurement was over:\n{end}")
        return [json.loads(line) for line in lines]

    def order(self, do: str, who: str, directory: Path) -> dict[str, float]:
        """The slowest rank's figures."""
        for orders in self.orders:
            print(json.dumps({"do": do, "who": who, "directory": str(directory)}), file=orders, flush=True)
        answers = self.wait()
        return {key: max(answer[key] for answer in answers) for key in answers[0]}

    def end(self) -> None:
        for orders in self.orders:
            orders.close()
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Peak:
    """The most memory that was held at once, in bytes beyond what was held before."""

    def __init__(self) -> None:
        self.bytes = 0
        self._before = held()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.bytes = max(self.bytes, held() - self._before)

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def peak() -> Iterator[Peak]:
    watch = Peak()
    try:
        yield watch
    finally:
        watch.end()


def held() -> int:
    """Bytes of the machine's memory that cannot be dropped: anonymous pages and shared memory, no file's cache."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("AnonPages", "Shmem"))


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def cold(directory: Path) -> None:
    """Take the files out of the page cache. They are brought in before, whoever wrote them: so the next reader finds
    free pages that were in use a moment ago. In a virtual machine others may have to be fetched from the host, which
    takes several times as long as reading into them."""
    warm(directory)
    for path in files_of(directory):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm(directory: Path) -> None:
    """Bring the files into the page cache."""
    buffer = bytearray(16 * 1024 * 1024)
    for path in files_of(directory):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    held = sum(map(_cached_bytes, files_of(directory))) / max(1, sum(p.stat().st_size for p in files_of(directory)))
    if held < 0.99:
        # Where memory is short, what is read first is gone when the last is read: that is the disk again.
        print(f"warning: {held:.0%} of {directory.name} is in the page cache; warm figures are not", file=sys.stderr)


def _cached_bytes(path: Path) -> int:
    words = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout or 0)


def settle() -> None:
    """Let what a deletion left to the disk come to its end."""
    os.sync()
    time.sleep(0.1)
