"""A run on a rehearsal cluster, as drills and tests look at it: where it is, what happened, how it ended.

Owns: waiting for a run to get somewhere, and telling its story when it does not. Everything is read from the run
directory; nothing here acts on the run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..run import views
from ..run.layout import CheckpointName, RunDir
from ..run.outcome import Next, Outcome
from ..run.submissions import submissions

T = TypeVar("T")
PATIENCE = 180.0  # seconds; a bound against waiting for ever, not an expectation
_TAIL = 25  # lines of each log in a story


def wait_for(condition: Callable[[], T], what: Callable[[], str], patience: float = PATIENCE) -> T:
    """Poll until `condition` is true and return its value.

    Raises:
        TimeoutError: it did not become true within `patience` seconds; `what` says what was waited for.
    """
    deadline = time.monotonic() + patience
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience:.0f} s for {what()}")
        time.sleep(0.1)
    return value


class Trial:
    """One run directory under observation."""

    def __init__(self, path: Path) -> None:
        self.dir = RunDir(path)

    @property
    def job_id(self) -> str:
        """Slurm's id of the newest submission."""
        job = submissions(self.dir)[-1].job_id
        assert job is not None, f"{self.dir.path}: no job is known yet"
        return job

    def losses(self) -> dict[int, float]:
        return {m["step"]: m["loss"] for m in views.metrics(self.dir)}

    def step(self) -> int:
        """The highest step that was ever completed."""
        return max(self.losses(), default=0)

    def outcomes(self) -> list[Outcome | None]:
        """Of all attempts, oldest first; None for one that could not say (power cut) or still runs."""
        return [Outcome.read(a) for a in self.dir.all_attempts()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in views.events(self.dir) if e["event"] == name]

    def nodes(self) -> list[str]:
        """Nodes of the newest generation that was formed, in the order of their ranks."""
        return list(self.events("form")[-1]["nodes"])

    def is_over(self) -> bool:
        """Nothing of it will start again."""
        last = views.last_outcome(self.dir)
        return last is not None and last[1] is not None and last[1].next is Next.NOTHING

    def wait_step(self, step: int, patience: float = PATIENCE) -> None:
        wait_for(lambda: self.step() >= step or self.is_over(), lambda: f"step {step} of {self.story()}", patience)
        if self.step() < step:
            raise TimeoutError(f"the run ended before step {step}: {self.story()}")

    def wait_outcome(self, attempt: int, patience: float = PATIENCE) -> Outcome:
        there = self.dir.attempt(attempt)
        outcome = wait_for(lambda: Outcome.read(there), lambda: f"outcome {attempt} of {self.story()}", patience)
        assert outcome is not None
        return outcome

    def wait_end(self, patience: float = PATIENCE) -> Outcome:
        wait_for(self.is_over, lambda: f"the end of {self.story()}", patience)
        last = self.outcomes()[-1]
        assert last is not None
        return last

    def weights(self, step: int) -> dict[str, str]:
        """Digest of each shard of the newest checkpoint of this step; empty if there is none."""
        names = [c for c in self.dir.all_checkpoints() if c.step == step]
        return self._digests(names[0]) if names else {}

    def _digests(self, name: CheckpointName) -> dict[str, str]:
        shards = sorted(self.dir.checkpoint(name).glob("*.safetensors"))
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in shards}

    def story(self) -> str:
        """What a person needs to understand why it went another way."""
        lines = [str(self.dir.path)]
        hidden = ("time", "writer", "attempt", "event", "traceback")
        for e in views.events(self.dir):
            rest = {k: v for k, v in e.items() if k not in hidden}
            lines.append(f"  {e['time']:.1f} attempt {e['attempt']} {e['writer']}: {e['event']} {rest}")
        logs = [*self.dir.job_logs.glob("*.log"), *self.dir.path.glob("attempts/*/logs/*.log")]
        for log in sorted(logs):
            lines += [f"--- {log}", *log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]]
        return "\n".join(lines)
