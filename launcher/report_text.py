"""A run's story as Markdown, from its files alone: attempts, causes, what each interruption cost, goodput.

Owns: the figures and the layout. A file that cannot be read costs its part of the story, which says so. Standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from . import interval_facts
from .rehearsal.measure import Pass, passes, steps_lost
from .run import views
from .run.effective import effective_config
from .run.files import read_json, read_lines
from .run.interval import sentence
from .run.layout import AttemptDir, RunDir
from .run.manifest import InvalidCheckpointError, check_sizes, read_manifest
from .state import RunState, State
from .status import duration
from .summary import AttemptSummary, attempt_summary

T = TypeVar("T")
# Events that a person looks for; the rest is in the files.
_TOLD = ("trouble", "hung_at", "slow", "agent_lost", "bad_step", "packages_changed", "settings_changed",
         "checkpoint_skipped", "checkpoint_failed", "checkpoint_late", "checkpoint_abandoned", "checkpoint_interval",
         "requeue_refused", "supervisor_failed", "profiled")  # fmt: skip
_AT_WORK = (State.RUNNING, State.SUSPENDED)
_MOST = 60  # lines of any list


@dataclass(frozen=True)
class Goodput:
    """Where the time went, seconds."""

    wall: float  # from the first attempt's start to the last sign of life
    steps: float | None  # in steps that count; None: nobody said how long they took
    redone: float  # in steps that were done again later, or whose result was lost

    @property
    def share(self) -> float | None:
        return self.steps / self.wall if self.wall > 0 and self.steps is not None else None


@dataclass(frozen=True)
class Interruption:
    """Between two passes of workers. `seconds`: from the last step before to the first that nobody had done."""

    attempt: int
    generation: int
    steps_lost: int
    seconds: float | None


@dataclass
class Problems:
    """What could not be read."""

    lines: list[str] = field(default_factory=list)

    def read(self, what: str, call: Callable[[], T], instead: T) -> T:
        try:
            return call()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidCheckpointError) as e:
            self.lines.append(f"{what}: {' '.join(str(e).split()) or type(e).__name__}")
            return instead


def interruptions(found: Sequence[Pass]) -> list[Interruption]:
    costs = []
    reached = 0
    for at, p in enumerate(found[:-1]):
        reached = max(reached, p.last)
        new = [when for later in found[at + 1 :] for step, when in later.steps if step > reached]
        seconds = new[0] - p.steps[-1][1] if new else None
        costs.append(Interruption(p.attempt, p.generation, steps_lost(found[at : at + 2]), seconds))
    return costs


def goodput(run: RunDir, attempts: Sequence[AttemptSummary], found: Sequence[Pass]) -> Goodput | None:
    """None before the first step."""
    starts = [a.started for a in attempts if a.started is not None]
    if not found or not starts:
        return None
    ends = [a.ended for a in attempts if a.ended is not None] + [p.steps[-1][1] for p in found]
    wall = max(ends) - min(starts)
    kept = _seconds(views.metrics(run))
    if not kept:  # a script of the user's own need not say
        return Goodput(wall, None, 0.0)
    every = sum(sum(_seconds(read_lines(run.attempt(p.attempt).metrics(p.generation)))) for p in found)
    return Goodput(wall, sum(kept), max(0.0, every - sum(kept)))


def _seconds(lines: Iterable[Mapping[str, Any]]) -> list[float]:
    """How long the steps took that say it."""
    return [float(m["step_seconds"]) for m in lines if isinstance(m.get("step_seconds"), (int, float))]


def summary(run: RunDir, state: RunState) -> str:
    """The whole page."""
    problems = Problems()
    nothing: dict[str, Any] = {}
    identity = problems.read("run.json", lambda: read_json(run.run), nothing)
    config = problems.read("config.json", lambda: effective_config(run), nothing)
    attempts: list[AttemptSummary] = []
    for a in run.all_attempts():
        attempts += problems.read(f"attempt {a.number}", partial(_summaries, a), [])
    all_passes: list[Pass] = problems.read("metrics", lambda: passes(run), [])
    spent: Goodput | None = problems.read("metrics", lambda: goodput(run, attempts, all_passes), None)
    lines = [f"# {run.path.name}", "", *_head(run, state, identity, config)]
    lines += ["", "## Attempts", "", *_attempts(attempts, interruptions(all_passes), state.state in _AT_WORK)]
    is_own_script = bool(config.get("task", {}).get("cmd"))
    lines += ["", "## Time", "", *_time(spent, all_passes, is_own_script)]
    checkpoints = _checkpoints(run)
    advice = problems.read("interval of checkpoints", lambda: interval_facts.advice(run), None)
    checkpoints += ["", f"- {sentence(advice)}"] if advice is not None else []
    if checkpoints or not is_own_script:  # only the script knows its checkpoints
        lines += ["", "## Checkpoints", "", *(checkpoints or ["none"])]
    told: list[str] = []
    before = len(problems.lines)
    for attempt in run.all_attempts():
        told += problems.read(f"events of attempt {attempt.number}", partial(_events, attempt), [])
    left_out = [f"- ({len(told) - _MOST} more before these)"] if len(told) > _MOST else []
    none = "none of note" if len(problems.lines) == before else "none of note in what could be read; see below"
    lines += ["", "## Events", "", *([*left_out, *told[-_MOST:]] or [none])]
    if problems.lines:
        lines += ["", "## Could not be read", "", *(f"- {line}" for line in problems.lines)]
    return "\n".join(lines) + "\n"


def _summaries(attempt: AttemptDir) -> list[AttemptSummary]:
    return [attempt_summary(attempt)]


def _head(run: RunDir, state: RunState, identity: dict[str, Any], config: dict[str, Any]) -> list[str]:
    cluster = config.get("cluster", {})
    git = identity.get("git") or {}
    rows = [
        ("state", f"{state.state.value} {state.detail}".strip()),
        ("directory", str(run.path)),
        ("created", _when(identity.get("created"))),
        ("stoker", str(identity.get("stoker_version", "?"))),
        ("code", f"commit {git.get('sha')}{' with changes' if git.get('dirty') else ''}" if git.get("sha") else "?"),
        ("size", f"{cluster.get('nodes', '?')} nodes x {cluster.get('procs_per_node', '?')} processes"),
        *([] if config.get("task", {}).get("cmd") else [("steps", str(config.get("train", {}).get("steps", "?")))]),
        ("command", str(identity.get("command", "?"))),
    ]
    return [f"- {name}: {value}" for name, value in rows]


def _attempts(attempts: Sequence[AttemptSummary], costs: Sequence[Interruption], is_running: bool) -> list[str]:
    """`is_running`: an attempt is at work, the newest."""
    if not attempts:
        return ["none"]
    rows = ["| # | started | lasted | job | nodes | steps | end | steps lost | to the next new step |",
            "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for a in attempts:
        mine = [c for c in costs if c.attempt == a.number]
        lost = sum(c.steps_lost for c in mine)
        waited = [c.seconds for c in mine if c.seconds is not None]
        lasted = "?" if a.started is None or a.ended is None else duration(a.ended - a.started)
        steps = "none" if a.first_step is None else f"{a.first_step}-{a.last_step}"
        end = a.cause or ("running" if is_running and a is attempts[-1] else "no word")
        cells = [str(a.number), _when(a.started), lasted, a.job_id or "-", a.nodes or "-", steps, end]
        cells += [str(lost) if mine else "-", ", ".join(f"{s:.0f} s" for s in waited) or "-"]
        rows.append(f"| {' | '.join(c.replace('|', '/') for c in cells)} |")
    reasons = [f"- {a.number}: {' '.join(a.reason.split())}" for a in attempts if a.reason]
    return [*rows, *(["", *reasons] if reasons else [])]


def _time(spent: Goodput | None, found: Sequence[Pass], is_own_script: bool) -> list[str]:
    if spent is None or spent.wall <= 0:
        return ["no step yet, as far as the script tells" if is_own_script else "no step yet"]
    if spent.steps is None or spent.share is None:
        return [
            "- goodput: not known; the metrics do not say how long steps take (step_seconds)",
            f"- done again: {steps_lost(found)} steps",
            f"- from the first start to the last sign of life: {duration(spent.wall)}",
        ]
    rest = max(0.0, spent.wall - spent.steps - spent.redone)
    steps = len({step for p in found for step, _ in p.steps})
    return [
        f"- goodput: {spent.share:.1%} of {duration(spent.wall)} went into {steps} steps that count",
        f"- done again: {steps_lost(found)} steps, {duration(spent.redone)}",
        f"- the rest, {duration(rest)}: waiting in the queue, starting, saving, validating",
    ]


def _checkpoints(run: RunDir) -> list[str]:
    lines = []
    for name in run.all_checkpoints()[:_MOST]:
        directory = run.checkpoint(name)
        try:
            manifest = read_manifest(directory)
            check_sizes(directory, manifest)
            what = f"{sum(f.size for f in manifest.files) / 2**20:.1f} MiB, sizes right"
        except (InvalidCheckpointError, OSError) as e:
            what = f"INVALID: {e}"
        lines.append(f"- {name}: {what}")
    return lines


def _events(attempt: AttemptDir) -> list[str]:
    hidden = ("time", "writer", "attempt", "event", "traceback")
    with contextlib.suppress(FileNotFoundError):
        os.scandir(attempt.path / "events").close()  # one that may not be read seems empty to a search for files
    lines = []
    for e in views.attempt_events(attempt):
        if e.get("event") in _TOLD:
            fields = ", ".join(f"{k}={v}" for k, v in e.items() if k not in hidden and v not in (None, ""))
            lines.append(f"- {_when(e.get('time'))} attempt {e.get('attempt')}, {e['event']}: {fields[:300]}")
    return lines


def _when(seconds: object) -> str:
    if not isinstance(seconds, (int, float)):
        return "?"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
