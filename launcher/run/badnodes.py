"""Nodes learnt to be bad: one small file per finding, shared by all runs below a run root.

    <run_root>/.bad-nodes/<node>-<milliseconds>-<run>-a0003.json    the fields of Finding

Owns: writing and reading findings, and how many nodes may be avoided. No file has two writers and none is rewritten;
what has expired is ignored, and swept by whoever reads. What is evidence against a node is policy's to say.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .files import create_json, read_json
from .layout import RunDir

MOST = 0.5  # share of the nodes that a job could use which may be avoided at once
MOST_UNKNOWN = 1  # nodes, where it is not known how many there are
_KEPT = 24 * 3600.0  # seconds that an expired finding stays for people to read
_ODD = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class Finding:
    node: str
    reason: str  # one sentence for people
    cause: str  # outcome.Cause
    run: str  # id of the run that found it
    attempt: int
    time: float  # Unix seconds
    until: float
    is_own: bool = False  # holds for that run alone


def directory_of(run: RunDir) -> Path:
    return run.path.parent / ".bad-nodes"


def note(directory: Path, finding: Finding) -> None:
    """Write a finding down. Raises OSError."""
    directory.mkdir(exist_ok=True)
    name = f"{finding.node}-{int(finding.time * 1000)}-{finding.run}-a{finding.attempt:04d}"
    create_json(directory / f"{_ODD.sub('_', name)}.json", asdict(finding))


def known(directory: Path, run: str | None = None, now: float | None = None) -> dict[str, Finding]:
    """The newest finding of each node that still holds, for a run (its id) or for any. Never raises."""
    now = time.time() if now is None else now
    found: dict[str, Finding] = {}
    for finding, path in _all(directory):
        if finding.until <= now:
            if finding.until + _KEPT < now:
                with contextlib.suppress(OSError):
                    path.unlink()
            continue
        if finding.is_own and finding.run != run:
            continue
        if finding.node not in found or found[finding.node].time < finding.time:
            found[finding.node] = finding
    return found


def _all(directory: Path) -> Iterable[tuple[Finding, Path]]:
    try:
        paths = sorted(directory.glob("*.json"))
    except OSError:
        return
    for path in paths:
        with contextlib.suppress(OSError, ValueError, TypeError):
            yield Finding(**read_json(path)), path


def to_avoid(findings: Mapping[str, Finding], asked_for: Sequence[str], needed: int, usable: int | None) -> list[str]:
    """The nodes to exclude, by name: the newest findings first, and never so many that the job could not run.

    Args:
        asked_for: nodes that the user wants (cluster.nodelist); they are not avoided.
        needed: nodes of the job.
        usable: nodes that the job could get, if that is known.
    """
    most = MOST_UNKNOWN if usable is None else max(0, min(max(1, int(MOST * usable)), usable - needed))
    newest = sorted(findings.values(), key=lambda f: -f.time)
    return sorted([f.node for f in newest if f.node not in asked_for][:most])
