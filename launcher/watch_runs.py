"""`stoker watch [RUN|ROOT ...]`: one line for each thing that is wrong with a run; nothing when all is well.

Owns: the verb's arguments, the loop, and the lines. The checks are watch_checks.py's, the facts watch_facts.py's, what
`--fix` does watch_fix.py's. (Waiting for one run's end is watch.py's.)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .cancel import learn_jobs
from .errors import UserError
from .find import DEFAULT_ROOT, check_readable, find_runs
from .run.layout import RunDir
from .run.outcome import EXIT_FAILED, EXIT_FINISHED
from .watch_checks import Facts, Finding, Fix, Limits, findings
from .watch_facts import ask, gather, is_settled

EVERY = 300.0  # seconds between two looks without --once
LONGEST = 1e8  # seconds; time.sleep() takes no more than some hundred years
LEAST_SILENCE = 60.0  # seconds; a healthy supervisor gives a sign of life every 30


@dataclass(frozen=True)
class Line:
    """One finding, and what was done about it."""

    run: str
    check: str
    text: str
    is_fixed: bool | None = None  # None: nothing was tried
    action: str = ""

    def __str__(self) -> str:
        done = "" if self.is_fixed is None else f" -> {'' if self.is_fixed else 'not fixed: '}{self.action}"
        return f"{self.run}: {self.check}: {self.text}{done}"


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        "stoker watch", description="Look for runs that have a problem; silent when all is well."
    )
    p.add_argument("what", nargs="*", metavar="RUN|ROOT", help=f"default: the runs below ./{DEFAULT_ROOT}")
    p.add_argument("--once", action="store_true", help="look once and exit: 0 if all is well, else 1 (for cron)")
    p.add_argument("--fix", action="store_true", help="release, resume or replace what can be, and say so")
    p.add_argument("--json", action="store_true", help="one JSON list per look, for programs")
    p.add_argument("--every", type=_positive, default=EVERY, metavar="SECONDS", help="pause between two looks")
    for name in ("silence", "stalled", "pending"):
        default = getattr(Limits, name)
        kind, least = (_silence, f", at least {LEAST_SILENCE:.0f}") if name == "silence" else (_positive, "")
        text = f"default: {default:.0f}{least}"
        p.add_argument(f"--{name}", type=kind, default=default, metavar="SECONDS", help=text)
    arguments = p.parse_args(argv)
    if not arguments.what and not Path(DEFAULT_ROOT).is_dir():
        # From cron in another directory silence would pass for health.
        raise UserError(f"no ./{DEFAULT_ROOT} in {Path.cwd()}; name the runs, or the directory of runs, to watch")
    limits = Limits(silence=arguments.silence, stalled=arguments.stalled, pending=arguments.pending)
    while True:
        lines = look_once(find_runs(arguments.what), limits, arguments.fix)
        if arguments.json:
            print(json.dumps([vars(line) for line in lines], indent=2))
        else:
            for line in lines:
                print(line)
        sys.stdout.flush()
        if arguments.once:
            return EXIT_FAILED if lines else EXIT_FINISHED
        time.sleep(arguments.every)


def _positive(text: str) -> float:
    seconds = _number(text)
    if not 0 < seconds <= LONGEST:  # NaN neither
        raise argparse.ArgumentTypeError(f"{text}: expected a number of seconds above 0, up to {LONGEST:.0f}")
    return seconds


def _silence(text: str) -> float:
    seconds = _number(text)
    if not LEAST_SILENCE <= seconds <= LONGEST:
        raise argparse.ArgumentTypeError(
            f"{text}: expected at least {LEAST_SILENCE:.0f} seconds: a healthy job is silent for up to 30, "
            "and --fix ends one that is silent for longer than this"
        )
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def look_once(runs: Sequence[RunDir], limits: Limits, is_fixing: bool = False) -> list[Line]:
    """All findings of all runs; one damaged run hides no other."""
    lines: list[Line] = []
    runs = [run for run in runs if _is_of_interest(run, lines)]
    queue = ask(runs)
    if queue is None and runs:
        lines.insert(0, Line("Slurm", "no answer", "squeue does not answer; what follows is from the files alone"))
    told: set[str] = set()
    for run in runs:
        try:
            facts = gather(run, queue, limits)
            found = findings(facts, limits)
            if queue is not None and any(f.check == "lost" for f in found) and learn_jobs(run):
                facts = gather(run, ask([run]), limits)
                found = findings(facts, limits)
        except (OSError, ValueError, KeyError, TypeError) as e:
            lines.append(Line(run.path.name, "damaged", str(e)))
            continue
        if found:
            lines += _lines(run, facts, found, is_fixing, told)
    return lines


def _is_of_interest(run: RunDir, lines: list[Line]) -> bool:
    """Whether a run is to be looked at; what is wrong with the files of one that cannot be is added to the lines."""
    try:
        check_readable(run)
    except (OSError, ValueError) as e:
        lines.append(Line(run.path.name, "damaged", str(e)))
        return False
    return not is_settled(run)


def _lines(run: RunDir, facts: Facts, found: Sequence[Finding], is_fixing: bool, told: set[str]) -> list[Line]:
    lines: list[Line] = []
    fix = next((f.fix for f in found if f.fix), None) if is_fixing else None
    for finding in found:
        if finding.check == "disk" and finding.text in told:
            continue  # runs share a file system
        told.add(finding.text)
        is_fixed, action = _fix(finding.fix, run, facts) if fix is not None and finding.fix is fix else (None, "")
        fix = None if is_fixed is not None else fix
        lines.append(Line(facts.name, finding.check, finding.text, is_fixed, action))
    return lines


def _fix(fix: Fix, run: RunDir, facts: Facts) -> tuple[bool, str]:
    from .watch_fix import try_to  # submitting imports much, and is seldom needed

    return try_to(fix, run, facts)
