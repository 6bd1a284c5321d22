"""`stoker checkpoint ls [RUN]`: a line per checkpoint.

Owns: the arguments and the layout of the text. Standard library only: it must answer at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import interval_facts
from .checkpoint_look import MANY, Found, Health, look_around, reasons, retention_of, settings_of
from .errors import UserError
from .find import DEFAULT_ROOT, find_run, runs_below
from .run.interval import Advice, sentence
from .run.layout import CheckpointName, RunDir
from .run.outcome import EXIT_FINISHED
from .status import duration

EPILOG = """examples:
  stoker checkpoint ls runs/llama-261130-104733-x7q2
  stoker checkpoint ls 12345 --json          (a job id)
  stoker checkpoint ls                       (all runs below ./runs)
STATE: `valid` at a look at manifest and sizes; `verified`: `stoker checkpoint verify` has read every block since;
`damaged` also if it has found a bad one since.
KEPT FOR: why retention (checkpoint.keep, keep_every, keep_best) keeps it; `-`: it would go after the next save."""
_HEADINGS = ("CHECKPOINT", "STEP", "ATTEMPT", "AGE", "SIZE", "STATE", "VALIDATION", "KEPT FOR")
_RIGHT = {1, 2, 3, 4, 6}  # columns of numbers

Why = Mapping[CheckpointName, Sequence[str]]


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        "stoker checkpoint ls",
        description="List a run's checkpoints, newest first.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "run", nargs="?", metavar="RUN", help=f"run directory, or job id; default: the runs below ./{DEFAULT_ROOT}"
    )
    p.add_argument("--json", action="store_true", help="one JSON object per run, in a list, for programs")
    arguments = p.parse_args(argv)
    runs = [find_run(arguments.run)] if arguments.run else runs_below_here()
    gc.disable()  # it would look through what 10,000 manifests leave in memory again and again
    listed = [(run, *_look(run)) for run in runs]
    if arguments.json:
        print(json.dumps([_as_json(run, found, why) for run, found, why in listed], allow_nan=False))
        return EXIT_FINISHED
    for number, (run, found, why) in enumerate(listed):
        if not arguments.run:
            print("\n" * (number > 0) + str(run.path))
        if run.checkpoints.is_symlink() and not run.checkpoints.exists():
            print(f"cannot be seen: {run.checkpoints} leads to {run.checkpoints.readlink()}, which is not there")
            continue
        print(table(found, why, time.time()))
        if arguments.run and (told := _advice(run)) is not None:
            print(sentence(told))
    return EXIT_FINISHED


def _advice(run: RunDir) -> Advice | None:
    """None also for a run whose files do not say."""
    try:
        return interval_facts.advice(run)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def runs_below_here() -> list[RunDir]:
    from pathlib import Path

    runs = runs_below(Path(DEFAULT_ROOT))
    if not runs:
        raise UserError(f"no run below ./{DEFAULT_ROOT}; name a run directory or a job id")
    return runs


def _look(run: RunDir) -> tuple[list[Found], Why]:
    found = look_around(run)
    return found, reasons(retention_of(settings_of(run), found), found)


def table(found: Sequence[Found], why: Why, now: float) -> str:
    """One line each, columns aligned, and a last one that adds up."""
    if not found:
        return "no checkpoints"
    rows = [_HEADINGS, *(_row(f, why.get(f.name, ()), now) for f in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{'>' if i in _RIGHT else '<'}{w}}}" for i, w in enumerate(widths)).format
    lines = [form(*row).rstrip() for row in rows]
    valid = sum(f.is_valid for f in found)
    total = sum(f.size or 0 for f in found)
    care = " (of so many, manifests' own checksums were not looked at)" if len(found) > MANY else ""
    return "\n".join([*lines, f"{len(found)} checkpoints, {valid} valid, {amount(total)}{care}"])


def _row(f: Found, why: Sequence[str], now: float) -> tuple[str, ...]:
    state = f"{f.health.value}: {f.problem}" if f.problem else f.health.value
    kept = "" if f.health is Health.UNFINISHED else ", ".join(why) or "-"
    loss = f.validation
    return (
        str(f.name),
        str(f.name.step),
        str(f.name.attempt),
        "?" if f.time is None else duration(now - f.time),
        "?" if f.size is None else amount(f.size),
        state if len(state) <= 60 else f"{state[:57]}...",
        "-" if loss is None else f"{loss.loss:.4f}",
        kept,
    )


def _as_json(run: RunDir, found: Sequence[Found], why: Why) -> dict[str, Any]:
    advice = _advice(run)
    plain = None if advice is None else advice.to_json()
    return {"run": str(run.path), "interval": plain, "checkpoints": [_plain(f, why.get(f.name, ())) for f in found]}


def _plain(f: Found, why: Sequence[str]) -> dict[str, Any]:
    loss = f.validation
    return {
        "name": str(f.name),
        "directory": str(f.directory),
        "step": f.name.step,
        "attempt": f.name.attempt,
        "time": f.time,
        "bytes": f.size,
        "state": f.health.value,
        "problem": f.problem or None,
        "verified": f.verified,
        "validation": None if loss is None else {"step": loss.step, "loss": loss.loss},
        "kept_for": None if f.health is Health.UNFINISHED else list(why),
    }


def amount(count: float) -> str:
    """Bytes for people: `512 B`, `1.4 kB`, `2.6 GB`; powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
