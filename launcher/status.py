"""`stoker status [RUN|JOB|ROOT ...]`: a line per run, one screen for one run, or JSON.

Owns: the arguments and the layout of the text. Reads files and asks squeue once; never fails for want of Slurm.
Standard library only: it must answer at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import slurm
from .find import DEFAULT_ROOT, find_runs, is_root
from .run.layout import RunDir
from .run.outcome import EXIT_FAILED
from .run.submissions import submissions
from .state import State, queue_of
from .summary import AttemptSummary, Summary, attempt_summaries, summarize

_HEADINGS = ("RUN", "STATE", "ATTEMPT", "STEP", "LOSS", "TOKENS/S", "CHECKPOINT", "PROGRESS", "")
_RIGHT = {2, 3, 4, 5, 6, 7}  # columns of numbers


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("stoker status", description="Show runs.")
    parser.add_argument("what", nargs="*", metavar="RUN|JOB|ROOT", help=f"default: the runs below ./{DEFAULT_ROOT}")
    parser.add_argument("--json", action="store_true", help="one JSON list, for programs")
    arguments = parser.parse_args(argv)
    runs = find_runs(arguments.what)
    found, damaged = _summaries(runs)
    for path, error in damaged:
        print(f"stoker status: {path}: cannot be read: {error}", file=sys.stderr)
    if arguments.json:
        print(json.dumps([_as_json(s) for s in found], indent=2))
    elif not found and not damaged:
        where = ", ".join(arguments.what) or f"./{DEFAULT_ROOT}"
        print(f"no runs in {where}; name a run directory, a directory of runs, or a job id")
    elif not found:
        return EXIT_FAILED
    elif len(found) == 1 and arguments.what and not is_root(arguments.what[0]):
        print(one_screen(found[0], attempt_summaries(found[0].run), time.time()))
    else:
        print(table(found, time.time()))
    return 0


def _summaries(runs: list[RunDir]) -> tuple[list[Summary], list[tuple[Path, str]]]:
    """Of the runs that can be read; and what is wrong with the others, so that one of them hides no other."""
    damaged: list[tuple[Path, str]] = []
    readable = []
    for run in runs:
        try:
            run.run.stat()  # a directory that one may not look into seems empty to the rest
            submitted = submissions(run)
            for submission in submitted:
                submission.intention, submission.job_id  # noqa: B018 (read for their errors)
            readable.append(run)
        except (OSError, ValueError, KeyError) as e:
            damaged.append((run.path, str(e)))
    queue = queue_of(readable, slurm.AT_ONCE)  # before any other file is read: see state.py
    if queue is None and slurm.is_available():
        print("stoker status: Slurm does not answer; what follows is from the files alone", file=sys.stderr)
    found = []
    for run in readable:
        try:
            found.append(summarize(run, queue))
        except (OSError, ValueError, KeyError, TypeError) as e:
            damaged.append((run.path, str(e)))
    return found, damaged


def _as_json(s: Summary) -> dict[str, Any]:
    plain = asdict(s) | {"run": str(s.run.path), "state": s.state.state.value, "detail": s.state.detail}
    plain["exit_code"] = s.state.exit_code
    plain["attempts"] = [asdict(a) for a in attempt_summaries(s.run)]
    return plain


def table(summaries: list[Summary], now: float) -> str:
    """One line per run, columns aligned; the last one says why it waits or how it ended."""
    rows = [_HEADINGS, *(_row(s, now) for s in summaries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    lines = []
    for row in rows:
        cells = (c.rjust(w) if i in _RIGHT else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(s: Summary, now: float) -> tuple[str, ...]:
    detail = _short(s.state.detail)
    return (
        s.name,
        s.state.state.value,
        str(s.attempts or "-"),
        _step(s),
        _loss(s.loss),
        _speed(s.tokens_per_second),
        "-" if s.checkpoint is None else str(s.checkpoint),
        "-" if s.progress is None else f"{duration(now - s.progress)} ago",
        detail,
    )


def one_screen(s: Summary, attempts: list[AttemptSummary], now: float) -> str:
    """What a person wants to know of one run, the newest attempts last."""
    state = f"{s.state.state.value} {s.state.detail}".rstrip()
    lines = [f"run         {s.name}", f"directory   {s.run.path}", f"state       {state}"]
    if s.job_id:
        lines.append(f"job         {s.job_id}")
    if s.warning and not s.state.is_over:
        lines.append(f"warning     {s.warning}")
    if s.progress is not None:
        figures = [f"step {_step(s)}"]
        figures += [] if s.is_own_script and s.loss is None else [f"loss {_loss(s.loss)}"]
        is_told = s.tokens_per_second is not None or not s.is_own_script
        figures += [f"{_speed(s.tokens_per_second)} tokens/s"] if is_told else []
        lines.append(f"progress    {', '.join(figures)}, {duration(now - s.progress)} ago")
    if not s.is_own_script:
        lines.append(f"checkpoint  {'none' if s.checkpoint is None else f'step {s.checkpoint}'}")
    shown = attempts[-15:]
    if shown:
        left_out = f" (the last {len(shown)} of {len(attempts)})" if len(shown) < len(attempts) else ""
        lines += ["", f"attempts{left_out}", *_attempt_lines(shown, s, now)]
    return "\n".join(lines)


def _attempt_lines(attempts: list[AttemptSummary], s: Summary, now: float) -> list[str]:
    headings = ("", "STARTED", "SECONDS", "STEPS", "JOB", "NODES", "END", "")
    rows = [headings, *(_attempt_row(a, a is attempts[-1] and not s.state.is_over, s, now) for a in attempts)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(headings))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _attempt_row(a: AttemptSummary, is_current: bool, s: Summary, now: float) -> tuple[str, ...]:
    end = a.ended if a.ended is not None else (now if is_current else s.progress)
    seconds = "-" if a.started is None or end is None else f"{max(0.0, end - a.started):.0f}"
    steps = "-" if a.first_step is None else f"{a.first_step}-{a.last_step}"
    started = "-" if a.started is None else time.strftime("%m-%d %H:%M:%S", time.localtime(a.started))
    is_running = is_current and s.state.state in (State.RUNNING, State.SUSPENDED)
    said = a.cause or ("running" if is_running else "ended without a word")
    reason = _short(f"{a.culprit}: {a.reason}" if a.culprit else a.reason)
    return (f"  {a.number}", started, seconds, steps, a.job_id or "-", a.nodes or "-", said, reason)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else text[:97] + "..."


def _step(s: Summary) -> str:
    if s.step is None and s.total is None:
        return "-"
    if s.is_own_script:
        return str(s.step)
    return f"{s.step or 0}/{s.total if s.total is not None else '?'}"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _speed(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:,.0f}"


def duration(seconds: float) -> str:
    """`3 s`, `5 min`, `2.1 h`, `3.5 d`."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"
