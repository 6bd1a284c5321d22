"""What status shows of a run, gathered from its files: progress, checkpoint, attempts.

Owns: reading. Only ends of files are read, so that a long run costs no more than a short one. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .run.effective import effective_config
from .run.files import read_json
from .run.layout import AttemptDir, RunDir
from .run.outcome import Outcome
from .run.submissions import series, submissions
from .state import Queue, RunState, front_of, look

_END = 1 << 14  # bytes; a metrics line has a few hundred


@dataclass(frozen=True)
class AttemptSummary:
    number: int
    submission: int | None
    job_id: str | None
    nodes: str
    started: float | None  # Unix seconds
    ended: float | None
    first_step: int | None  # first and last optimizer step it did
    last_step: int | None
    cause: str | None  # None: no outcome (yet)
    reason: str
    culprit: str  # rank and node, where there is one


@dataclass(frozen=True)
class Summary:
    run: RunDir
    name: str
    state: RunState
    job_id: str | None
    attempts: int
    step: int | None
    total: int | None
    loss: float | None
    tokens_per_second: float | None
    checkpoint: int | None  # step of the newest
    progress: float | None  # Unix seconds of the last step
    warning: str = ""  # what its newest attempt said at its start that it will not be able to do
    is_own_script: bool = False  # task.cmd: only the script knows how many steps there will be, and its checkpoints


def summarize(run: RunDir, queue: Queue | None) -> Summary:
    found = submissions(run)
    attempts = run.all_attempts()
    last = last_metric(attempts)
    is_own = _is_own_script(run)
    checkpoints = [c for c in run.all_checkpoints() if (run.checkpoint(c) / "manifest.json").is_file()]
    return Summary(
        run=run,
        name=run.path.name,
        state=look(run, queue),
        job_id=front_of(series(found), queue).job_id if found else None,
        attempts=len(attempts),
        step=_number(last, "step", int),
        total=None if is_own else _total(run),
        loss=_number(last, "loss", float),
        tokens_per_second=_number(last, "tokens_per_second", float),
        checkpoint=checkpoints[0].step if checkpoints else None,
        progress=_progress(attempts, _number(last, "time", float)),
        warning=_warning(attempts),
        is_own_script=is_own,
    )


def _warning(attempts: list[AttemptDir]) -> str:
    for attempt in attempts[-1:]:
        with contextlib.suppress(OSError), open(attempt.events("supervisor"), "rb") as f:
            for record in _objects(f.read(_END)):
                if record.get("event") == "no_scontrol":
                    return f"no scontrol on its first node: {record.get('consequence', '')}"
    return ""


def _progress(attempts: list[AttemptDir], said: float | None) -> float | None:
    """When the last step was done. The clock of the node that said it may be ahead; then the file's time is right."""
    for attempt in reversed(attempts):
        changed = [path.stat().st_mtime for _, path in attempt.all_metrics()]
        if changed:
            return None if said is None else min(said, max(changed))
    return said


def _is_own_script(run: RunDir) -> bool:
    try:
        return bool(effective_config(run).get("task", {}).get("cmd"))
    except (OSError, ValueError, AttributeError):
        return False


def _total(run: RunDir) -> int | None:
    try:
        return int(effective_config(run)["train"]["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _number(record: dict[str, Any], key: str, kind: type[Any]) -> Any:
    value = record.get(key)
    return kind(value) if isinstance(value, (int, float)) else None


def last_metric(attempts: list[AttemptDir]) -> dict[str, Any]:
    """The newest line of metrics of the newest attempt that has one, {} if none has."""
    for attempt in reversed(attempts):
        for _, path in reversed(attempt.all_metrics()):
            lines = _records(_end_of(path))
            if lines:
                return lines[-1]
    return {}


def _first_metric(attempt: AttemptDir) -> dict[str, Any]:
    for _, path in attempt.all_metrics():
        with open(path, "rb") as f:
            lines = _records(f.read(_END))
        if lines:
            return lines[0]
    return {}


def _end_of(path: Path) -> bytes:
    with open(path, "rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - _END))
        return f.read()


def _records(text: bytes) -> list[dict[str, Any]]:
    """The lines of metrics in a piece of a file."""
    return [record for record in _objects(text) if "step" in record]


def tail_records(path: Path) -> list[dict[str, Any]]:
    """The newest lines of a file of JSON lines, oldest first."""
    return _objects(_end_of(path))


def _objects(text: bytes) -> list[dict[str, Any]]:
    """The whole lines in a piece of a file; a torn one at either end is no record."""
    found = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def attempt_summaries(run: RunDir) -> list[AttemptSummary]:
    """Oldest first."""
    return [attempt_summary(a) for a in run.all_attempts()]


def attempt_summary(attempt: AttemptDir) -> AttemptSummary:
    """Raises OSError, ValueError."""
    try:
        start = read_json(attempt.start)
    except (FileNotFoundError, ValueError):
        start = {}
    outcome = Outcome.read(attempt)
    last = last_metric([attempt])
    place = [
        f"rank {outcome.rank}" if outcome and outcome.rank is not None else "",
        outcome.node or "" if outcome else "",
    ]
    return AttemptSummary(
        number=attempt.number,
        submission=_number(start, "submission", int),
        job_id=str(start["job_id"]) if start.get("job_id") else None,
        nodes=str(start.get("nodes", "")),
        started=_number(start, "time", float),
        ended=outcome.time if outcome else None,
        first_step=_number(_first_metric(attempt), "step", int),
        last_step=_number(last, "step", int),
        cause=outcome.cause.value if outcome else None,
        reason=outcome.reason if outcome else "",
        culprit=", ".join(filter(None, place)),
    )
