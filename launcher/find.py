"""From what a person types (a directory, a job id) to a run.

Standard library only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from ..conf.slurm_jobid import parse_job_id
from . import slurm
from .errors import UserError
from .run.files import read_json
from .run.layout import RunDir, open_run
from .run.submissions import submissions

DEFAULT_ROOT = "runs"  # conf.schema.Config.run_root


def find_run(text: str) -> RunDir:
    """The run named by its directory, by its name below ./runs, or by the id of one of its jobs.

    Raises:
        UserError: there is none.
    """
    for path in (Path(text), Path(DEFAULT_ROOT) / text):
        if _is_run(path):
            return RunDir(path.resolve())
    if not _is_job(text):
        raise UserError(f"{text}: no run directory (no run.json in it) and no job id; `stoker status` lists runs")
    for run in runs_below(Path(DEFAULT_ROOT)):
        with contextlib.suppress(PermissionError):
            if any(s.job_id == text for s in submissions(run)):
                return run
    # A job works in its run directory.
    for job in slurm.squeue([text], timeout=slurm.AT_ONCE) or []:
        if _is_run(Path(job.workdir)):
            return open_run(job.workdir)
    raise UserError(
        f"job {text}: no run below ./{DEFAULT_ROOT} has it, and Slurm knows no such job; name the directory"
    )


def runs_below(root: Path) -> list[RunDir]:
    """The runs directly below a directory, by name."""
    if not root.is_dir():
        return []
    return [RunDir(p.resolve()) for p in sorted(root.iterdir()) if p.name[0] != "." and _is_run(p)]


def check_readable(run: RunDir) -> None:
    """Whether a run's two oldest files can be read; most verbs could do without, and would not notice.

    Raises:
        OSError, ValueError: one cannot, or is torn; names it.
    """
    read_json(run.run)
    read_json(run.config_json)


def _is_run(path: Path) -> bool:
    """Also a directory that one may not look into: it may be one, and who asks is told instead of seeing nothing."""
    try:
        return (path / "run.json").is_file()
    except PermissionError:
        return True


def _is_job(text: str) -> bool:
    try:
        return parse_job_id(text).is_job
    except ValueError:
        return False


def find_runs(texts: Iterable[str]) -> list[RunDir]:
    """Every run that is meant: each text a run, a job id, or a directory of runs; none: those below ./runs.

    Raises:
        UserError: a text names nothing.
    """
    found: dict[Path, RunDir] = {}
    for text in list(texts) or [DEFAULT_ROOT]:
        for run in runs_below(Path(text)) if is_root(text) else [] if text == DEFAULT_ROOT else [find_run(text)]:
            found.setdefault(run.path, run)
    return list(found.values())


def is_root(text: str) -> bool:
    """Whether a directory of runs is meant, rather than a run or a job."""
    path = Path(text)
    return path.is_dir() and not _is_run(path) and not _is_job(text)
