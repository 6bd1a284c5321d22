"""What happens to a run, told as it happens: one short line per thing, with the seconds since the beginning.

Owns: the wording, and which of a run's events are worth a line. Reads the run directory; acts on nothing.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import Any

from ..run import views
from ..run.layout import RunDir


class Terminal:
    """Prints lines with a clock. `began`: Unix seconds that count as zero."""

    def __init__(self) -> None:
        self.began = time.time()

    def say(self, text: str, at: float | None = None) -> None:
        """`at`: Unix seconds at which it happened, if not now."""
        seconds = (time.time() if at is None else at) - self.began
        print(f"{max(seconds, 0.0):7.1f} s  {text}", flush=True)

    def command(self, argv: Sequence[str]) -> None:
        """A command as a person would type it."""
        self.say(f"$ {shlex.join(argv)}")


class Narrator:
    """Tells a run's events, each once. `broken_at` is set by whoever disturbs the run."""

    def __init__(self, run: RunDir, terminal: Terminal) -> None:
        self.run, self.terminal = run, terminal
        self.broken_at: float | None = None  # Unix seconds
        self.reached = 0  # highest step before the disturbance
        self._told: set[tuple[Any, ...]] = set()
        self._is_new_told = False
        self._ended: float | None = None  # of the attempt before

    def look(self) -> None:
        """Tell what is new."""
        for event in views.events(self.run):
            key = (event["attempt"], event["writer"], event["time"], event["event"], event.get("rank"))
            if key not in self._told:
                self._told.add(key)
                self._tell(event)
        if self.broken_at is not None and not self._is_new_told:
            self._tell_new_step(self.broken_at)

    def _tell(self, event: dict[str, Any]) -> None:
        text = self._text(event)
        if text is not None:
            self.terminal.say(text, at=event["time"])

    def _text(self, e: dict[str, Any]) -> str | None:
        rank_0 = e.get("rank") == 0
        match e["event"]:
            case "attempt_started":
                return self._started(e)
            case "form" if e["generation"] > 1:
                return f"workers start again on {', '.join(e['nodes'])}"
            case "first_step" if rank_0:
                return f"first step of attempt {e['attempt']}: step {e['step']}{self._loss(e['step'])}"
            case "restored" if rank_0:
                return f"restored the checkpoint of step {e['step']}"
            case "checkpoint_saved" if rank_0:
                return f"step {e['step']}{self._loss(e['step'])}; checkpoint, {e['bytes'] / 1e6:.0f} MB"
            case "agent_lost":
                return f"the supervisor lost {e['node']}{self._since(e)}: {e['reason']}"
            case "trouble" | "checkpoint_rejected" | "checkpoint_failed":
                return f"{e['event'].replace('_', ' ')}: {e.get('reason') or e.get('error')}"
            case "attempt_ended":
                return self._attempt_ended(e)
        return None

    def _started(self, e: dict[str, Any]) -> str:
        waited = "" if self._ended is None else f" ({e['time'] - self._ended:.0f} s after the end of the one before)"
        return f"attempt {e['attempt']} starts on {e['nodes']}{waited}"

    def _attempt_ended(self, e: dict[str, Any]) -> str:
        self._ended = e["time"]
        if e["next"] != "requeue":
            return f"{e['cause']}: {e['reason']}"
        who = "Slurm noticed" if e.get("cause") == "node_failure" and self._is_on_slurm() else "the attempt ended"
        return f"{who}{self._since(e)}; the run is requeued: {e['cause']} ({e['reason']})"

    def _is_on_slurm(self) -> bool:
        started = [e for e in views.events(self.run) if e["event"] == "attempt_started"]
        return bool(started) and started[-1]["job_id"] is not None

    def _since(self, e: dict[str, Any]) -> str:
        return "" if self.broken_at is None else f" after {e['time'] - self.broken_at:.0f} s"

    def _loss(self, step: int) -> str:
        for record in reversed(views.metrics(self.run)):
            if record["step"] == step and record.get("loss") is not None:
                validation = f", validation {record['eval_loss']:.3f}" if record.get("eval_loss") is not None else ""
                return f", loss {record['loss']:.3f}{validation}"
        return ""

    def _tell_new_step(self, broken_at: float) -> None:
        for record in views.metrics(self.run):
            if record["step"] > self.reached and record["time"] > broken_at:
                self._is_new_told = True
                seconds = record["time"] - broken_at
                self.terminal.say(f"first new step: {record['step']}, {seconds:.0f} s after", at=record["time"])
                return
