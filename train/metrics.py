"""One line of metrics per optimizer step, and the time a step's parts take.

Owns: the line's fields and the clock. The line is appended by rank 0 to the attempt's own file; what users read as
the run's metrics is a view over those files (launcher/run/views.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path

from ..launcher.run.files import append_line, to_json

PARTS = ("data", "forward_backward", "communication", "optimizer", "save_wait", "save")


_NOTHING: AbstractContextManager[object] = nullcontext()


class Clock:
    """Seconds by part since the last `take`, as the host sees them. `tracer`: marks each part for a profiler, too."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.tracer: Callable[[str], AbstractContextManager[object]] | None = None

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count the time inside the block as `part`'s."""
        began = time.perf_counter()
        try:
            with self.trace(part):
                yield
        finally:
            self._seconds[part] += time.perf_counter() - began

    def trace(self, name: str) -> AbstractContextManager[object]:
        """Mark the block for a profiler, if one is at work."""
        return _NOTHING if self.tracer is None else self.tracer(name)

    def take(self) -> dict[str, float]:
        """Seconds by part, which then start at zero again."""
        taken, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return taken


@dataclass(frozen=True)
class RoutingFigures:
    """How a model with experts shared out the tokens of one step."""

    auxiliary_loss: float  # balance and z terms per token, with their weights, summed over layers
    highest_load: float  # of the busiest expert of any layer, as a multiple of that layer's mean
    lowest_load: float

    @staticmethod
    def of(sums: Sequence[float], tokens: int) -> RoutingFigures | None:
        """From what routing.Routing.figures gave; None for a dense model."""
        if not sums:
            return None
        auxiliary, highest, lowest = sums
        return RoutingFigures(auxiliary / tokens if tokens else float("nan"), highest, lowest)


@dataclass(frozen=True)
class StepMetrics:
    """What is known of one step after it. Figures are of the whole run, not of this rank, where not said otherwise."""

    step: int  # optimizer steps completed, this one included
    loss: float  # cross-entropy per target token, nats
    lr: float
    grad_norm: float  # of the mean gradient, before clipping
    tokens: int  # targets that counted
    consumed_samples: int
    step_seconds: float  # on this rank; without saves and validation
    mfu: float | None
    memory_gib: float  # of this rank
    parts: dict[str, float] = field(
        default_factory=dict
    )  # seconds on this rank; `save` lies outside step_seconds, `save_wait` within
    eval_loss: float | None = None
    bubble: float | None = None  # part of the passes' time in which this rank waited for others of its pipeline
    routing: RoutingFigures | None = None

    def line(self) -> str:
        """JSON; numbers that are not finite become null."""
        record = {
            "step": self.step,
            "loss": _number(self.loss),
            "lr": self.lr,
            "grad_norm": _number(self.grad_norm),
            "tokens": self.tokens,
            "consumed_samples": self.consumed_samples,
            "step_seconds": round(self.step_seconds, 6),
            "tokens_per_second": round(self.tokens / self.step_seconds, 3),
            "mfu": None if self.mfu is None else round(self.mfu, 5),
            "memory_gib": round(self.memory_gib, 4),
            "parts": {part: round(seconds, 6) for part, seconds in self.parts.items()},
            "time": round(time.time(), 3),
        }
        if self.eval_loss is not None:
            record["eval_loss"] = _number(self.eval_loss)
        if self.bubble is not None:
            record["bubble"] = round(self.bubble, 4)
        if self.routing is not None:
            record |= {name: _number(value) for name, value in asdict(self.routing).items()}
        return to_json(record)


class StepLog:
    """A line for people now and then: the first step, then at most one every ten seconds, and the last."""

    def __init__(self, steps: int, interval: float = 10.0) -> None:
        self._steps, self._interval, self._next = steps, interval, 0.0

    def step(self, metrics: StepMetrics) -> None:
        """Print it if it is time."""
        now = time.monotonic()
        if now < self._next and metrics.step < self._steps:
            return
        self._next = now + self._interval
        tail = "" if metrics.eval_loss is None else f", validation loss {metrics.eval_loss:.4f}"
        print(
            f"step {metrics.step}/{self._steps}: loss {metrics.loss:.4f}, grad norm {metrics.grad_norm:.3f}, "
            f"{metrics.tokens / metrics.step_seconds:,.0f} tokens/s{tail}",
            flush=True,
        )


def append(path: Path, metrics: StepMetrics) -> None:
    """Raises OSError."""
    append_line(path, metrics.line())


def _number(value: float) -> float | None:
    return value if isfinite(value) else None
