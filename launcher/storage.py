"""`checkpoint.storage`: checkpoints of a new run in a directory of their own elsewhere, or in an object store.

Owns: what is checked at launch, and the directory behind the link RUN/checkpoints. What lies in it is the trainer's
(train/storage); so are object stores, which are asked by a process of its own: the launcher imports no client.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .errors import environment_error
from .run.files import fsync_dir
from .run.layout import RunDir

_SCHEME = "s3://"
_TIMEOUT = 90.0  # seconds for the store's answer
_NO_CLIENT = 3  # exit code of stoker.train.storage.probe without s3fs


def is_directory(storage: str | None) -> bool:
    return storage is not None and not storage.startswith(_SCHEME)


def problems(storage: str | None, python: str) -> tuple[list[str], list[str]]:
    """(errors, warnings) of where checkpoints shall lie. `python`: of the job; a store is asked if that is ours too."""
    if storage is None:
        return [], []
    if is_directory(storage):
        return _problems_of_directory(Path(storage)), []
    if python != sys.executable:
        return [], []
    command = [sys.executable, "-m", "stoker.train.storage.probe", storage]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return [], [_silent(storage, f"no answer in {_TIMEOUT:.0f} s")]
    said = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    if done.returncode == _NO_CLIENT:
        return [f"checkpoint.storage={storage}: {said}"], []
    return [], [_silent(storage, said)] if done.returncode else []


def _problems_of_directory(place: Path) -> list[str]:
    if not place.is_dir():
        return [f"checkpoint.storage={place}: no such directory; make it, on a file system that all nodes see"]
    if not os.access(place, os.W_OK | os.X_OK):
        return [f"checkpoint.storage={place}: may not be written; choose a directory of your own"]
    return []


def _silent(storage: str, said: str) -> str:
    return (
        f"checkpoint.storage={storage}: cannot be used from here: {said}; if that is so on the nodes, the run will end "
        "at its start (credentials and AWS_ENDPOINT_URL come from the environment, which the job inherits)"
    )


@contextlib.contextmanager
def place(run: RunDir, storage: str | None, name: str) -> Iterator[None]:
    """Make the place of the checkpoints of `run`, which is under preparation and will be called `name`: a directory in
    it, or a link to a new one in `storage`, which is taken away again if the body fails.

    Raises:
        UserError: the directory is there already, or cannot be made.
    """
    if storage is None or not is_directory(storage):
        run.checkpoints.mkdir()
        yield
        return
    elsewhere = Path(storage) / name
    try:
        elsewhere.mkdir()
        fsync_dir(elsewhere.parent)
    except FileExistsError:
        raise environment_error(
            f"checkpoint.storage={storage}: {elsewhere} exists already; it is another run's. Choose another --run-dir, "
            "or take it away"
        ) from None
    except OSError as e:
        raise environment_error(f"checkpoint.storage={storage}: {elsewhere}: {e.strerror}") from e
    try:
        run.checkpoints.symlink_to(elsewhere, target_is_directory=True)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            elsewhere.rmdir()
        raise


def take_back(run: RunDir) -> None:
    """Take away the directory behind the link, if it is still empty: no job was made of the run."""
    if run.checkpoints.is_symlink():
        with contextlib.suppress(OSError):
            run.checkpoints.resolve().rmdir()
