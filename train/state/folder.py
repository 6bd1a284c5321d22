"""The checkpoints folder: names of what is unfinished or going, what is removed when, and the last step of publishing.

Owns: temporary names and atomic removal. A directory with a checkpoint's name appears
and disappears in one rename, so nobody ever sees half of one. Does not own: when these happen (checkpointer.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from pathlib import Path

from ...launcher.run.layout import CheckpointName
from ...launcher.run.manifest import InvalidCheckpointError, check_sizes, read_manifest, verify

_UNFINISHED = re.compile(r"\.tmp-(step-\d{8,}-a\d{4,})-g\d{4,}-[0-9a-f]+")
_GOING = ".tmp-deleting-"


def unfinished_name(name: CheckpointName, generation: int) -> str:
    """A fresh name for a checkpoint under preparation; tells whose it is, so that a later attempt can clear it away."""
    return f".tmp-{name}-g{generation:04d}-{secrets.token_hex(4)}"


def remove(directory: Path) -> None:
    """Take a directory away at once, then delete it; whatever cannot be deleted is left to the next `sweep`.

    Raises:
        OSError: it could not be renamed and is still there.
    """
    going = directory.with_name(f"{_GOING}{directory.name.removeprefix('.tmp-')}-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory, going)
        shutil.rmtree(going, ignore_errors=True)


def sweep(checkpoints: Path, attempt: int) -> None:
    """Remove what attempts below `attempt` left unfinished, and what was on its way out. Errors are passed over.

    It is renamed before it is deleted: a writer of such an attempt that was frozen just before its rename could
    otherwise publish a directory that is half deleted.
    """
    with contextlib.suppress(OSError):
        for path in list(checkpoints.iterdir()):
            unfinished = _UNFINISHED.fullmatch(path.name)
            name = CheckpointName.parse(unfinished[1]) if unfinished else None
            if path.name.startswith(_GOING):
                shutil.rmtree(path, ignore_errors=True)
            elif name is not None and name.attempt < attempt:
                with contextlib.suppress(OSError):
                    remove(path)


def publish(finished: Path, target: Path) -> None:
    """Give a finished checkpoint its name. If a good one has that name already, that one stays and this one goes.

    Raises:
        OSError: could not be renamed.
    """
    try:
        os.rename(finished, target)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if _is_whole(target):
            remove(finished)
        else:
            remove(target)
            os.rename(finished, target)


def _is_whole(directory: Path) -> bool:
    try:
        verify(directory)
    except InvalidCheckpointError:
        return False
    return True


def is_plausible(directory: Path) -> bool:
    """Whether manifest, sizes and small files are right (kilobytes are read)."""
    try:
        check_sizes(directory, read_manifest(directory))
    except InvalidCheckpointError:
        return False
    return True
