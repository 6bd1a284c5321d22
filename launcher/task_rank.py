"""One process of a user's own script: started, listened to, asked to stop, and what its end means.

Owns: the process and its pipe, its heartbeat and metrics files, and its segment (run/heartbeat.py), in which it stands
for a worker of our own: a stop that is committed there reaches the script as a signal.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .run.files import to_json
from .run.heartbeat import NO_STOP, Heartbeat, Phase, Segment
from .run.outcome import EXIT_REQUEUE, Cause
from .run.wire import Channel, Closed
from .task_output import Lines, Writer

EVERY = 5.0  # seconds between two lines of metrics that come of heartbeats
LONGEST_METRICS = 1 << 20  # bytes; a longer line is none
READ = 1 << 16  # bytes taken from a pipe at a time
LARGEST = 2**53  # a step or count beyond it is none: the segment has 64 bits, and stop steps lie above a step
LAST_WORDS = 256  # reads of a pipe, and of metrics, after their process has ended; somebody else may still write
_AGAIN = f"asked to be started again (exit code {EXIT_REQUEUE})"
_STARTER = Path(__file__).with_name("task_start.py")


@dataclass(frozen=True)
class Files:
    """Where a process's words go. `metrics`: the attempt's, where this process is rank 0."""

    log: int
    heartbeat: Path
    own_metrics: Path
    metrics: Path | None


class Rank:
    """Raises OSError on creation: no process could be started."""

    def __init__(
        self,
        spec: dict[str, Any],
        env: dict[str, str],
        cmd: Sequence[str],
        cwd: Path,
        files: Files,
        segment: Segment,
        channel: Channel,
        writer: Writer,
    ) -> None:
        self.rank, self.generation = int(spec["rank"]), int(spec["generation"])
        self._stop_signal = signal.Signals(spec["stop_number"])
        self._files, self._segment, self._channel, self._writer = files, segment, channel, writer
        self._lines = Lines(f"[{self.rank}] ")
        self._step, self._sequence = 0, 0  # as the agent sees it
        self._seen, self._first = 0, 0  # steps of the newest heartbeat, and of the first one
        self._is_beating = self._is_held = self._is_asked = False
        self._stamp: int | None = None  # of the heartbeat file
        self._since = time.monotonic()  # of the last heartbeat
        self._intervals: deque[float] = deque(maxlen=31)
        self._metrics_read, self._told_step, self._told_at, self._has_metrics = 0, 0, self._since, False
        self._is_in_long_line = False
        self._has_failed_to_look = self._has_told_heartbeat = False
        self._outside: signal.Signals | None = None  # Slurm, or somebody, signalled the whole step
        self.has_closed_output = False
        self.pipe, theirs = os.pipe()
        self._errors, errors = os.pipe()
        os.set_blocking(self.pipe, False)
        os.set_blocking(self._errors, False)
        try:
            self.pid = _spawn([str(os.getpid()), str(errors), str(cwd), *cmd], env, theirs, errors)
            if spec.get("cpus"):
                # In time: it still has to become the command, which starts its threads later.
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(self.pid, spec["cpus"])
        finally:
            os.close(theirs)
            os.close(errors)

    def report(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(Closed):  # without an agent we are about to end
            message = {"kind": "report", "event": event, "generation": self.generation, "fields": fields}
            self._channel.send(message)

    # What it says.

    def read(self) -> bool:
        """Take what it has printed; False if there was nothing."""
        try:
            data = os.read(self.pipe, READ)
        except BlockingIOError:
            return False
        self._writer.log(self._files.log, self._lines.feed(data, time.monotonic()))
        self.has_closed_output = not data
        return bool(data)

    def look(self) -> None:
        """Heartbeat and metrics in, stop out; called a few times a second. What fails here is said once: the other
        processes, and their ends, are more than this one's heartbeat."""
        try:
            self._look()
        except Exception as e:
            if not self._has_failed_to_look:
                self._say(f"cannot look at heartbeat and metrics ({type(e).__name__}: {e})")
            self._has_failed_to_look = True

    def _say(self, text: str) -> None:
        self._writer.log(self._files.log, f"[{self.rank}] stoker: {text}\n".encode(errors="replace"))

    def _look(self) -> None:
        now = time.monotonic()
        self._writer.log(self._files.log, self._lines.stale(now))
        control = self._segment.read_control()
        if control.generation == self.generation and control.stop_step != NO_STOP:
            # The steps that it does from here on are not told: a stop step has been named.
            self._is_held = True
            if control.is_committed:
                self._ask_to_stop()
        self._listen(now)
        self._beat(now)
        if self._files.metrics is not None:
            self._take_metrics(self._files.metrics, now)

    def _listen(self, now: float) -> None:
        try:
            stamp = self._files.heartbeat.stat().st_mtime_ns
            text = self._files.heartbeat.read_bytes()[:64] if stamp != self._stamp else b""
        except OSError:
            return
        if stamp == self._stamp:
            return
        words = [int(word) for word in text.split()[:2] if word.isdigit()]
        if any(word > LARGEST for word in words):
            words = []
            if not self._has_told_heartbeat:
                self._say(f"heartbeat ignored, expected numbers up to {LARGEST}: {text.decode(errors='replace')!r}")
            self._has_told_heartbeat = True
        if words:
            self._seen = words[0]
        if words and not self._is_held:
            self._step, self._sequence = words[0], words[1] if len(words) > 1 else 0
        if self._is_beating:
            self._intervals.append(now - self._since)
        else:
            self._first = self._seen
        self._stamp, self._since, self._is_beating = stamp, now, True

    def _beat(self, now: float) -> None:
        if self._is_asked:
            phase, since = Phase.HOLD, now  # saving, which its own deadline bounds
        elif self._is_beating:
            phase, since = Phase.STEP, self._since
        else:
            phase, since = Phase.SILENT, now
        # 0 has the limit of the start hold: a first step may compile for as long.
        has_stepped = self._intervals and self._step > self._first
        between = statistics.median(self._intervals) if has_stepped else 0.0
        self._segment.beat(Heartbeat(self.generation, phase, 0, self._step, self._sequence, since, between))

    def _take_metrics(self, path: Path, now: float) -> None:
        """Pass on what the script says of its steps; where it says nothing, its heartbeats."""
        for line in self._new_metrics():
            record = metrics_record(line) if len(line) < LONGEST_METRICS else None
            if record is None:
                text = f"[{self.rank}] stoker: not taken as metrics, expected a JSON object with an integer step: "
                self._writer.log(self._files.log, text.encode() + line[:200] + b"\n")
                continue
            self._told_step, self._told_at, self._has_metrics = record["step"], now, True
            self._writer.append(path, to_json({"time": round(time.time(), 3)} | record))
        # Where it began, another attempt did the step and may have said more of it.
        if self._seen > max(self._told_step, self._first) and now - self._told_at > EVERY:
            self._tell_step(path, now)

    def _tell_step(self, path: Path, now: float) -> None:
        self._told_step, self._told_at = self._seen, now
        self._writer.append(path, to_json({"step": self._seen, "time": round(time.time(), 3)}))

    def _new_metrics(self) -> list[bytes]:
        """Whole lines that came since the last look; of one that is too long its beginning, without the rest."""
        try:
            with open(self._files.own_metrics, "rb") as f:
                f.seek(self._metrics_read)
                data = f.read(LONGEST_METRICS)
        except OSError:
            return []
        whole, newline, _ = data.rpartition(b"\n")
        if not newline and len(data) == LONGEST_METRICS:
            is_new, self._is_in_long_line = not self._is_in_long_line, True
            self._metrics_read += len(data)
            return [data] if is_new else []
        self._metrics_read += len(whole) + len(newline)
        lines = whole.split(b"\n")
        if newline and self._is_in_long_line:
            del lines[0]
            self._is_in_long_line = False
        return [line for line in lines if line.strip()]

    # Its end.

    def _ask_to_stop(self) -> None:
        """Once, and not if Slurm has sent it the same already."""
        if self._is_asked:
            return
        self._is_asked = True
        if self._outside is self._stop_signal:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, self._stop_signal)
        self.report("stop_signal", name=self._stop_signal.name)

    def signalled(self, number: signal.Signals) -> None:
        """The launcher got a signal that Slurm sends to everything in a step: so did the script."""
        self._outside = number

    def kill(self) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)

    def ended(self, status: int) -> None:
        """It has been reaped: kill what it has left, take its last words, say what its end means."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for _ in range(LAST_WORDS):
            if not self.read():
                break
        self._writer.log(self._files.log, self._lines.end())
        if self._files.metrics is not None:
            now = time.monotonic()
            self._listen(now)
            for _ in range(LAST_WORDS):
                before = self._metrics_read
                self._take_metrics(self._files.metrics, now)
                if self._metrics_read == before:
                    break
            if not self._has_metrics and self._seen > self._told_step:
                self._tell_step(self._files.metrics, now)
        error = b""
        with contextlib.suppress(BlockingIOError):
            error = os.read(self._errors, 4096)
        if error:
            text = error.decode(errors="replace")
            self.report("failed", cause=Cause.BAD_CONFIG.value, error=text, traceback=None)
        elif (meaning := meaning_of(status, self._is_asked, self._outside)) is not None:
            asks = {"cause": Cause.REQUESTED.value} if meaning == _AGAIN else {}
            self.report("ended", finished=meaning == "", error=meaning, **asks)
        self._writer.flush(2.0)
        self._writer.close(self._files.log)
        os.close(self.pipe)
        os.close(self._errors)
        self._segment.close()
        self._channel.close()


def meaning_of(status: int, is_asked: bool, outside: signal.Signals | None) -> str | None:
    """What an exit status says: "" that this rank is finished, None that it crashed, else why it wants to be started
    again. `status`: as subprocess has it, negative for a signal."""
    if is_asked:
        return "stopped when asked to"
    if outside is not None and status in (0, EXIT_REQUEUE, -outside, 128 + outside):
        return f"ended after {outside.name} from outside"
    if status == 0:
        return ""
    return _AGAIN if status == EXIT_REQUEUE else None


def metrics_record(line: bytes) -> dict[str, Any] | None:
    """A line of the script's metrics as one of the run's; None if it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or not 0 <= record["step"] <= LARGEST:
        return None
    return {key: value for key, value in ((str(k), _plain(v)) for k, v in record.items()) if value is not ...}


def _plain(value: Any) -> Any:
    """Numbers that are finite, texts, truth values; null for NaN and infinities; nothing (...) for what is nested."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else ...


def _spawn(arguments: list[str], env: dict[str, str], output: int, errors: int) -> int:
    """Start task_start.py in a process group of its own; its pid."""
    # Below the process's own descriptors nothing is inherited: all of ours close on exec.
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    os.set_inheritable(errors, True)
    command = [sys.executable, "-I", "-S", str(_STARTER), *arguments]
    return os.posix_spawn(sys.executable, command, env, file_actions=actions, setpgroup=0)
