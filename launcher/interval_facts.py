"""What a run's files say of the cost of its checkpoints and of its failures, for the advice of run/interval.py.

Owns: reading that. Only ends of files are read: the newest checkpoints and steps stand for the run. Standard library
only; the supervisor calls it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from .run.effective import effective_config
from .run.files import read_json
from .run.interval import Advice, History, Save, advise, slowed
from .run.layout import AttemptDir, RunDir
from .run.outcome import Cause, Outcome

_END = 1 << 20  # bytes of a file that are read: thousands of steps or events
_SAVES = 50  # the newest ones count: what a checkpoint costs changes with the layout
# Nothing is lost by these, or nothing that another interval would have saved.
_ORDERLY = (Cause.FINISHED, Cause.CANCELLED, Cause.BAD_CONFIG, Cause.SUPERSEDED, Cause.DIVERGED, Cause.REQUESTED)
_WARNED = (Cause.TIME_LIMIT, Cause.PREEMPTED, Cause.REQUEUED)  # mostly: then the last step is saved


def advice(run: RunDir) -> Advice | None:
    """None if there is nothing to go by yet, or the run is a script of the user's own.

    Raises:
        OSError, ValueError, KeyError, TypeError: files that cannot be read, or are damaged.
    """
    config = effective_config(run)
    if config.get("task", {}).get("cmd"):
        return None
    attempts = run.all_attempts()
    saves, step_seconds = _costs(attempts)
    if not saves:
        return None
    nodes = int(config["cluster"]["nodes"])
    failures = sum(_failures(a, a is attempts[-1]) for a in attempts)
    history = History(saves, step_seconds, sum(map(_worked, attempts)), failures, nodes)
    settings = config["checkpoint"]
    return advise(history, int(settings.get("interval") or 0), float(settings.get("minutes") or 0))


def _costs(attempts: list[AttemptDir]) -> tuple[list[Save], float]:
    """The newest checkpoints, and seconds of a usual step, of the newest attempt that saved any."""
    for attempt in reversed(attempts):
        saved = [e for e in _events(attempt) if e.get("event") == "checkpoint_saved" and "seconds" in e][-_SAVES:]
        lines = [s for _, path in attempt.all_metrics() for s in _tail(path)]
        steps = {int(s["step"]): float(s["step_seconds"]) for s in lines if "step" in s and "step_seconds" in s}
        if saved and steps:
            return _saves(saved, steps), median(steps.values())
    return [], 0.0


def _saves(saved: list[dict[str, Any]], steps: Mapping[int, float]) -> list[Save]:
    """`steps`: seconds by number."""
    meanwhile = [_meanwhile(e, steps) for e in saved]
    touched = {step for during in meanwhile for step in during}
    others = [seconds for step, seconds in steps.items() if step not in touched]
    return [_save(e, slowed([steps[n] for n in during], others)) for e, during in zip(saved, meanwhile, strict=True)]


def _meanwhile(event: Mapping[str, Any], steps: Mapping[int, float]) -> list[int]:
    """The steps that were done while a checkpoint was written."""
    left = float(event["seconds"]) - float(event.get("stall_seconds") or event["seconds"])
    step, found = int(event["step"]) + 1, []
    while left > 0 and step in steps:
        found.append(step)
        left -= steps[step]
        step += 1
    return found


def _save(event: Mapping[str, Any], slower: float) -> Save:
    durable = float(event["seconds"])
    if event.get("stall_seconds") is None:  # a save that training waited for
        return Save(durable, durable)
    stall, waited = float(event["stall_seconds"]), float(event.get("wait_seconds") or 0.0)
    # The stall lies before the steps that were slowed; the wait is in them.
    return Save(stall + waited, durable, stall + slower)


def _failures(attempt: AttemptDir, is_last: bool) -> int:
    """How often work of this attempt had to be done again: workers that started anew in place, and its end."""
    in_place = max(0, len(attempt.all_metrics()) - 1)
    outcome = Outcome.seen(attempt)
    if outcome is None:
        return in_place + (not is_last)  # killed before it could say anything
    is_saved = outcome.step is None or outcome.saved_step == outcome.step
    return in_place + (outcome.cause not in _ORDERLY and not (outcome.cause in _WARNED and is_saved))


def _worked(attempt: AttemptDir) -> float:
    """Seconds from its start to its last sign of life."""
    try:
        began = float(read_json(attempt.start)["time"])
    except (OSError, ValueError, KeyError):
        return 0.0
    outcome = Outcome.seen(attempt)
    if outcome is not None:
        return max(0.0, outcome.time - began)
    last = [float(s["time"]) for _, path in attempt.all_metrics()[-1:] for s in _tail(path) if "time" in s]
    return max(0.0, max(last, default=began) - began)


def _events(attempt: AttemptDir) -> Iterator[dict[str, Any]]:
    """By time; of each writer the newest."""
    found = [e for path in sorted((attempt.path / "events").glob("*.jsonl")) for e in _tail(path)]
    return iter(sorted((e for e in found if "time" in e), key=lambda e: float(e["time"])))


def _tail(path: Path) -> list[dict[str, Any]]:
    with open(path, "rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - _END))
        lines = f.read().splitlines()
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn, at either end
        if isinstance(record, dict):
            found.append(record)
    return found
