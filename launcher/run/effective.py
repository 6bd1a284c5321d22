"""What a submission works with: the frozen configuration and script, or what `stoker resume` changed for it.

    submissions/0002.config.json    the whole plain configuration from submission 2 on
    submissions/0002.sbatch         its script, where that differs from submit.sbatch

config.json and submit.sbatch are never rewritten. A change holds for the later submissions too, until the next one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .files import read_json
from .layout import RunDir


def config_path(run: RunDir, submission: int) -> Path:
    """Where a changed configuration of this submission stands, if there is one."""
    return run.submissions / f"{submission:04d}.config.json"


def script_path(run: RunDir, submission: int) -> Path:
    return run.submissions / f"{submission:04d}.sbatch"


def effective_config(run: RunDir, submission: int | None = None) -> dict[str, Any]:
    """The plain configuration (conf.schema.Config as JSON) in force for a submission; None means the newest.

    Raises:
        FileNotFoundError, ValueError: the file is missing or damaged; names it.
    """
    return read_json(_newest(run, r"(\d{4,})\.config\.json", submission) or run.config_json)


def effective_script(run: RunDir, submission: int | None = None) -> Path:
    """The batch script in force for a submission; None means the newest."""
    return _newest(run, r"(\d{4,})\.sbatch", submission) or run.script


def _newest(run: RunDir, pattern: str, submission: int | None) -> Path | None:
    if not run.submissions.is_dir():
        return None
    matches = ((re.fullmatch(pattern, p.name), p) for p in run.submissions.iterdir())
    found = {int(m[1]): p for m, p in matches if m and (submission is None or int(m[1]) <= submission)}
    return found[max(found)] if found else None
