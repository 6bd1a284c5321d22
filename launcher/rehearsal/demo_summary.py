"""The last screen of the demonstration, and what must be true of its run. Reads the run directory only."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from ..run import views
from ..run.layout import RunDir
from ..run.outcome import Cause
from ..summary import AttemptSummary, attempt_summaries
from . import measure

_SOME = 10  # steps over which a loss is averaged


def screen(run: RunDir, picture: str, event: float) -> str:
    """One screen for people. `event`: when the node was lost, Unix seconds."""
    records = views.metrics(run)
    lost = measure.cost(measure.passes(run), event)
    validations = [r["eval_loss"] for r in records if r.get("eval_loss") is not None]
    rows = [("", "NODES", "STEPS", "END"), *map(_attempt, attempt_summaries(run))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    validation = f"{validations[0]:.3f} -> {validations[-1]:.3f}" if validations else "-"
    lines = [
        "",
        f"run directory   {shown(run.path)}",
        f"loss plot       {picture}",
        "attempts",
        *("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows),
        f"steps lost      {lost.steps_lost} (done, and done again from the checkpoint before)",
        f"recovery        {_seconds(lost.seconds)} from the loss of the node to the next new step",
        *(f"                {line}" for line in _recovery(run, event, lost)),
        f"speed           {median(r['tokens_per_second'] for r in records):,.0f} tokens/s (median)" if records else "",
        f"loss            {_early(records):.3f} -> {_late(records):.3f} (first and last {_SOME} steps)"
        if records
        else "",
        f"validation      {validation}",
        "",
        f"look closer:    stoker status {shown(run.path)}",
        f"                stoker logs {shown(run.path)}",
    ]
    return "\n".join(lines)


def shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _attempt(a: AttemptSummary) -> tuple[str, ...]:
    steps = "-" if a.first_step is None else f"{a.first_step}-{a.last_step}"
    return (str(a.number), a.nodes, steps, f"{a.cause or 'ended without a word'}: {a.reason}".rstrip(": "))


def _recovery(run: RunDir, event: float, lost: measure.Cost) -> list[str]:
    """Where the time went, if it was one attempt that ended and one that went on."""
    attempts, found = attempt_summaries(run), measure.passes(run)
    if len(attempts) != 2 or len(found) != 2 or lost.seconds is None:
        return []
    ended, started = attempts[0].ended, attempts[1].started
    if ended is None or started is None:
        return []
    ends = [event, ended, started, found[1].began, event + lost.seconds]
    parts = [f"{max(0.0, b - a):.0f} s" for a, b in pairwise(ends)]
    what = ("until it was noticed", "in the queue", "to start", f"for {lost.steps_lost} steps once more")
    return [", ".join(f"{part} {text}" for part, text in zip(parts, what, strict=True))]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"


def _early(records: list[dict[str, Any]]) -> float:
    return float(mean(r["loss"] for r in records[:_SOME]))


def _late(records: list[dict[str, Any]]) -> float:
    return float(mean(r["loss"] for r in records[-_SOME:]))


def problems(run: RunDir, steps: int, victim: str, is_on_slurm: bool) -> list[str]:
    """What did not go as a demonstration must: a line each, empty if all is well."""
    found = []
    last = views.last_outcome(run)
    outcome = None if last is None else last[1]
    if outcome is None or outcome.cause is not Cause.FINISHED:
        found.append(f"the run did not finish: {outcome.cause.value + ': ' + outcome.reason if outcome else 'no word'}")
    events = views.events(run)
    if not any(e["event"] == "restored" for e in events):
        found.append("the run did not go on from a checkpoint")
    attempts = run.all_attempts()
    if len(attempts) < 2:
        found.append(f"the loss of {victim} did not lead to a second attempt")
    later = {node for e in events if e["event"] == "form" and e["attempt"] > 1 for node in e["nodes"]}
    if is_on_slurm and victim in later:
        found.append(f"{victim}, which was lost, took part in a later attempt")
    records = views.metrics(run)
    missing = sorted(set(range(1, steps + 1)) - {r["step"] for r in records})
    if missing:
        found.append(f"{len(missing)} of {steps} steps have no metrics, the first of them {missing[0]}")
    if records and not _late(records) < _early(records):
        found.append(f"the loss did not fall: {_early(records):.3f} -> {_late(records):.3f}")
    return found
