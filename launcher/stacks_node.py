"""`python RUN_DIR/bootstrap.py stoker.launcher.stacks_node RUN_DIR ATTEMPT`: the stacks of a run's processes here.

Owns: finding the processes of one attempt on this node, asking each for its stacks, and how the answers travel to the
login node. No process is waited for longer than `limit`: of one that does not answer, the kernel's word on it is told.
Standard library only.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import procfs
from .run.heartbeat import Phase, Segment
from .run.layout import RunDir
from .run.stacks import SIGNAL, Offer, node_name, run_key

LIMIT = 3.0  # seconds that all processes of a node together may take
_LOOK_EVERY = 0.01
_MOST = 1 << 20  # bytes of stacks of one process
_HEARTBEAT = re.compile(r"/memfd:stoker-g(\d+)-r(\d+) \(deleted\)")
_MARK = "stoker-stacks"  # of lines of ours, among what a site's shells print
_CHUNK = 600  # characters per line: srun mixes longer ones of several nodes


@dataclass(frozen=True)
class Beat:
    """Where a worker's heartbeat says that it is."""

    phase: str
    step: int
    micro: int
    sequence: int
    age: float  # seconds since its last sign of life


@dataclass(frozen=True)
class Answer:
    """What is known of one process."""

    node: str
    role: str
    rank: int | None
    pid: int
    state: str  # in words; empty if it told its stacks and no thread hangs in the kernel
    text: str = ""  # as faulthandler writes it, or py-spy
    wchan: str = ""
    kernel: tuple[str, ...] = ()
    beat: Beat | None = None


@dataclass(frozen=True)
class Target:
    """A process that has made an offer. `proc`'s numbers, seen from here."""

    offer: Offer
    pid: int
    fd: int | None  # None: a program of the user's own, which has made no offer
    segment: tuple[int, int] | None = None  # its heartbeat: a process that has it open, and the descriptor there


def targets(run: RunDir, attempt: int, node: str | None, only: Iterable[int] | None = None) -> list[Target]:
    """Processes of an attempt on `node` (None: whatever they call it), by role. `only`: the processes to look at."""
    key = run_key(run)
    found = []
    for pid in procfs.pids() if only is None else only:
        descriptors = {link: fd for fd, link in procfs.links(pid) if link.startswith("/memfd:stoker-")}
        for link, fd in descriptors.items():
            offer = Offer.parse(link)
            if offer is None or (offer.run, offer.attempt) != (key, attempt) or node not in (None, offer.node):
                continue
            if procfs.own_pid(pid) == offer.pid:
                heartbeat = descriptors.get(f"/memfd:stoker-{offer.role} (deleted)") if offer.rank is not None else None
                found.append(Target(offer, pid, fd, None if heartbeat is None else (pid, heartbeat)))
                if offer.role == "zygote":
                    found += _of_own_script(offer, pid, descriptors)
    return sorted(found, key=lambda t: (t.offer.rank is None, t.offer.rank or 0, t.offer.role))


def _of_own_script(parent: Offer, pid: int, descriptors: dict[str, int]) -> list[Target]:
    """Processes of a script of the user's own (task.cmd): children of who starts it, which has their heartbeats."""
    beats = {m[2]: (m[1], fd) for link, fd in descriptors.items() if (m := _HEARTBEAT.fullmatch(link))}
    found = []
    for child in procfs.children(pid) if beats else []:
        rank = procfs.environment(child).get("RANK", "")
        if rank in beats:
            generation, fd = beats[rank]
            offer = Offer(parent.run, parent.attempt, parent.node, f"g{generation}-r{rank}", child)
            found.append(Target(offer, child, None, (pid, fd)))
    return found


@dataclass
class _Asked:
    target: Target
    file: int  # its memory, opened anew
    blocked: frozenset[int] = frozenset()  # threads that had the signal blocked before
    text: str | None = None

    def look(self) -> None:
        """Take the text once it is complete: the signal is delivered, and no thread is inside its handler."""
        size = os.fstat(self.file).st_size
        if not size or procfs.has_signal(procfs.status(self.target.pid).get("ShdPnd"), SIGNAL):
            return
        if _blocking(self.target.pid) <= self.blocked:
            self.text = self.written()

    def written(self) -> str:
        return os.pread(self.file, _MOST, 0).decode("utf-8", "replace")


def _blocking(pid: int) -> frozenset[int]:
    """Threads that block the signal: while a handler runs, its thread does."""
    masks = ((t, procfs.status(pid, thread=t).get("SigBlk")) for t in procfs.threads(pid))
    return frozenset(t for t, mask in masks if procfs.has_signal(mask, SIGNAL))


def collect(found: Sequence[Target], limit: float = LIMIT) -> list[Answer]:
    """Ask all at once; returns after at most `limit` seconds (and what reading takes)."""
    deadline = time.monotonic() + limit
    with contextlib.ExitStack() as files:
        asked = [files.enter_context(_ask(target, deadline)) for target in found]
        waiting = [a for a in asked if a is not None]
        while waiting and time.monotonic() < deadline:
            for a in waiting:
                a.look()
            waiting = [a for a in waiting if a.text is None and os.path.exists(f"/proc/{a.target.pid}")]
            if waiting:
                time.sleep(_LOOK_EVERY)
        return [_answer(target, a, limit) for target, a in zip(found, asked, strict=True)]


@contextlib.contextmanager
def _ask(target: Target, deadline: float) -> Iterator[_Asked | None]:
    """Send the signal to a process that can take it. None: it cannot, or cannot be reached."""
    now = procfs.standing(target.pid)
    # A stopped process would keep the signal and answer when nobody listens any more.
    is_able = target.fd is not None and now is not None and now.letter not in "TtZX"
    if not is_able or not procfs.has_signal(procfs.status(target.pid).get("SigCgt"), SIGNAL):
        yield None
        return
    try:
        file = os.open(f"/proc/{target.pid}/fd/{target.fd}", os.O_RDWR)
    except OSError:
        yield None
        return
    try:
        if not _lock(file, deadline):
            yield None
            return
        os.ftruncate(file, 0)
        asked = _Asked(target, file, _blocking(target.pid))
        with contextlib.suppress(ProcessLookupError):
            os.kill(target.pid, SIGNAL)
        yield asked
    finally:
        os.close(file)


def _lock(file: int, deadline: float) -> bool:
    """Two that ask at once take turns."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_EVERY)


def _answer(target: Target, asked: _Asked | None, limit: float) -> Answer:
    offer = target.offer
    beat = read_beat(target)
    if asked is not None and asked.text is not None:
        return Answer(offer.node, offer.role, offer.rank, target.pid, _stuck(target.pid), asked.text, beat=beat)
    now = procfs.standing(target.pid)
    if now is None:
        return Answer(offer.node, offer.role, offer.rank, target.pid, "gone", beat=beat)
    text = asked.written() if asked is not None else ""
    if now.letter in "DTtZ":
        words = now.words
    elif target.fd is None:
        text = _by_py_spy(target.pid, limit)
        words = "" if text else f"{now.words}; a program of your own: its Python stacks need py-spy on the node"
    else:
        words = f"{now.words}, but it gave no answer within {limit:g} s"
    return Answer(offer.node, offer.role, offer.rank, target.pid, words, text, now.wchan, now.kernel, beat)


def _stuck(pid: int) -> str:
    """Threads beside the main one that hang in the kernel, such as readers of storage that does not answer."""
    now = procfs.standing(pid)
    count = 0 if now is None else now.blocked_threads
    return f"{count} of its threads in uninterruptible sleep" if count else ""


def _by_py_spy(pid: int, limit: float) -> str:
    """Of a program that has made no offer, where py-spy is installed and may look; else empty."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=limit, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_beat(target: Target) -> Beat | None:
    """The worker's own word in shared memory, which needs nothing of it."""
    if target.segment is None:
        return None
    try:
        segment = Segment(os.open(f"/proc/{target.segment[0]}/fd/{target.segment[1]}", os.O_RDWR))
    except (OSError, ValueError):
        return None
    try:
        b = segment.read_heartbeat()
    except ValueError:  # a phase of a newer version
        b = None
    finally:
        segment.close()
    if b is None:
        return None
    return Beat(Phase(b.phase).name.lower(), b.step, b.micro, b.sequence, round(time.monotonic() - b.time, 1))


# The way to the login node.


def encode(node: str, answers: Sequence[Answer]) -> list[str]:
    """Lines that survive being mixed with those of other nodes."""
    packed = base64.b64encode(zlib.compress(json.dumps([asdict(a) for a in answers]).encode())).decode()
    pieces = [packed[i : i + _CHUNK] for i in range(0, len(packed), _CHUNK)]
    return [f"{_MARK} {node} {i} {len(pieces)} {piece}" for i, piece in enumerate(pieces)]


@dataclass
class _Pieces:
    total: int
    texts: dict[int, str] = field(default_factory=dict)


def decode(text: str) -> dict[str, list[Answer]]:
    """Node -> answers, of the nodes whose lines are all there; other lines are passed over."""
    found: dict[str, _Pieces] = {}
    for line in text.splitlines():
        parts = line.split(" ")
        if len(parts) == 5 and parts[0] == _MARK and parts[2].isdecimal() and parts[3].isdecimal():
            found.setdefault(parts[1], _Pieces(int(parts[3]))).texts[int(parts[2])] = parts[4]
    answers = {}
    for node, pieces in found.items():
        if len(pieces.texts) < pieces.total:
            continue
        with contextlib.suppress(ValueError, zlib.error, TypeError, KeyError):
            packed = base64.b64decode("".join(pieces.texts[i] for i in range(pieces.total)))
            answers[node] = [_from_record(r) for r in json.loads(zlib.decompress(packed))]
    return answers


def _from_record(record: dict[str, Any]) -> Answer:
    beat = record.pop("beat")
    return Answer(**(record | {"kernel": tuple(record["kernel"])}), beat=Beat(**beat) if beat else None)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("stacks_node")
    parser.add_argument("run", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("--limit", type=float, default=LIMIT)
    arguments = parser.parse_args(argv)
    signal.alarm(int(arguments.limit) + 30)  # nobody may be left to end this process
    node = node_name()
    found = targets(RunDir(arguments.run), arguments.attempt, node)
    print("\n".join(encode(node, collect(found, arguments.limit))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
