"""What a rehearsal came to: results as a table, as JSON, as a dated report. Pure but for what is said of the machine.

Owns: the texts. Verdicts are verdict.py's.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ... import __version__
from . import programs
from .lab import HANG_TIMEOUT, LEASE, SAVE_EVERY, STEPS, Lab


@dataclass(frozen=True)
class Result:
    """One drill's verdict. `problems` empty: PASS; `skipped`: why it did not take place. Seconds are wall time."""

    name: str
    what: str
    problems: tuple[str, ...] = ()
    skipped: str = ""
    steps_lost: int | None = None
    seconds: float | None = None  # from the event to the next new step
    attempts: int | None = None
    total_seconds: float | None = None
    run: str = ""  # its directory

    @property
    def verdict(self) -> str:
        return "SKIP" if self.skipped else "FAIL" if self.problems else "PASS"


_HEADINGS = ("DRILL", "VERDICT", "STEPS LOST", "SECONDS TO NEXT NEW STEP", "ATTEMPTS", "WHAT")


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    return [
        (r.name, r.verdict, _number(r.steps_lost), _tenths(r.seconds), _number(r.attempts), r.what) for r in results
    ]


def table(results: Sequence[Result]) -> str:
    """For people: a row per drill that took place, the reasons of those that failed, and what was left out."""
    held = [r for r in results if not r.skipped]
    cells = [_HEADINGS, *rows(held)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADINGS))]
    right = {2, 3, 4}
    lines = []
    for row in cells:
        aligned = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(aligned).rstrip())
    for r in held:
        lines += [f"{r.name}: {problem}" for problem in r.problems]
        lines += [f"{r.name}: the run is kept in {r.run}"] if r.problems and r.run else []
    for reason in dict.fromkeys(r.skipped for r in results if r.skipped):
        lines.append(f"left out: {', '.join(r.name for r in results if r.skipped == reason)}: {reason}")
    return "\n".join(lines)


def markdown(results: Sequence[Result]) -> str:
    """The same rows as a Markdown table."""
    head = ("Drill", "Verdict", "Steps lost", "Seconds to next new step", "Attempts", "What happens")
    rule = ("---", "---", "--:", "--:", "--:", "---")
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows(results)))


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _tenths(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def as_json(results: Sequence[Result], began: float) -> dict[str, Any]:
    return {
        "stoker": __version__,
        "time": began,
        "settings": _settings(),
        "drills": [asdict(r) | {"verdict": r.verdict} for r in results],
    }


def _settings() -> dict[str, int]:
    return {"steps": STEPS, "checkpoint_interval": SAVE_EVERY, "lease": LEASE, "hang_timeout": HANG_TIMEOUT}


def report(results: Sequence[Result], began: float, parallel: int, lab: Lab) -> str:
    """Markdown: where and with what it was measured, and the table."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    python = f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the end"
    day = time.strftime("%Y-%m-%d", time.localtime(began))
    slurm = "no Slurm" if lab.cluster is None else _slurm_words(lab)
    command = f"stoker rehearse --parallel {parallel}" + (" --here" if lab.cluster is None else "")
    return f"""# Drills, {day}

    {command}

One small run, broken in every way and compared, bit by bit, with one that was left alone. Steps lost were done and had
to be done again; the time runs from the event to the end of the first step that nobody had done before.

- Machine: {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, {python}
- {slurm}
- Run: {STEPS} steps of about 0.1 s on {lab.nodes} nodes, a checkpoint every {SAVE_EVERY}; {parallel} drills at a time
- Settings: resilience.lease={LEASE}, resilience.hang_timeout={HANG_TIMEOUT}, resilience.warning=60

{markdown([r for r in results if not r.skipped])}

Times were seen on that machine and promise nothing: they hold Slurm's own (above), the start of Python and torch on the
nodes, and the steps that were lost. Where the time limit ends the run its steps take 2 s, so that it lasts that long.
"""


def _slurm_words(lab: Lab) -> str:
    spec = lab.own_cluster.spec
    year, month = programs.slurm_version(programs.search_path(spec))
    return (
        f"Slurm {year:02d}.{month:02d}, {spec.nodes} {'isolated' if spec.isolate else 'plain'} nodes\n"
        f"- Slurm's times: SlurmdTimeout {spec.slurmd_timeout} s, MessageTimeout {spec.message_timeout} s, KillWait "
        f"{spec.kill_wait} s, preemption's grace {spec.grace_time} s;\n"
        f"  a requeued job waits {spec.cred_expire} s (cred_expire; 120 s by default)"
    )
