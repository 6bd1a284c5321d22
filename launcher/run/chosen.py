"""From what a person types to a checkpoint: DIR, RUN, RUN/step-00001000-a0001 or RUN:1000.

Owns: that notation, for tools on both sides (`stoker checkpoint`). Does not own: what a run may be called besides its
directory (launcher/find.py). Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .layout import CheckpointName, RunDir
from .manifest import MANIFEST
from .verdict_note import newest_valid

RUNS = "runs"  # where runs are looked for by name: conf.schema.Config.run_root
NOTATION = "a checkpoint's directory, RUN (its newest valid one), RUN/step-... or RUN:STEP"

FindRun = Callable[[str], RunDir]


def run_at(text: str) -> RunDir:
    """The run in this directory, or of this name below ./runs.

    Raises:
        ValueError: there is none.
    """
    for path in (Path(text), Path(RUNS) / text):
        if (path / "run.json").is_file():
            return RunDir(path.resolve())
    raise ValueError(f"{text}: no checkpoint and no run directory; expected {NOTATION}")


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is one of a checkpoint, whole or not."""
    return path.is_dir() and (CheckpointName.parse(path.name) is not None or (path / MANIFEST).is_file())


def find_checkpoint(text: str, find_run: FindRun = run_at) -> Path:
    """The absolute directory of the checkpoint that is meant; it may be damaged if it was named.

    Raises:
        ValueError: there is none; and what `find_run` raises.
    """
    path = Path(text)
    if is_checkpoint(path):
        return path.absolute()
    head, _, tail = text.rstrip("/").rpartition("/")
    name = CheckpointName.parse(tail)
    if head and name is not None:
        return _existing(find_run(head), name)
    head, _, tail = text.rpartition(":")
    if head and tail.isdecimal() and not path.exists():
        return _of_step(find_run(head), int(tail))
    run = find_run(text)
    for name, _ in newest_valid(run):
        return run.checkpoint(name)
    raise ValueError(
        f"{text}: {run.checkpoints} has no valid checkpoint; `stoker checkpoint ls {text}` shows what is there"
    )


def _existing(run: RunDir, name: CheckpointName) -> Path:
    if name not in run.all_checkpoints():
        raise ValueError(f"{run.checkpoint(name)}: no such checkpoint; `stoker checkpoint ls {run.path}` lists them")
    return run.checkpoint(name)


def _of_step(run: RunDir, step: int) -> Path:
    """The newest attempt's."""
    found = [name for name in run.all_checkpoints() if name.step == step]
    if not found:
        raise ValueError(
            f"{run.checkpoints}: no checkpoint of step {step}; `stoker checkpoint ls {run.path}` lists them"
        )
    return run.checkpoint(found[0])
