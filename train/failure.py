"""How an exception that ended a worker is named to the supervisor, and whether a person needs its traceback.

Owns: the cause, the words, and telling a mistake of the user's from a defect of ours. Writing the words into the node's
log, once for all ranks that say the same, is the agent's (launcher/node.py).
"""

from __future__ import annotations

import dis
import errno
import traceback
from dataclasses import dataclass
from types import TracebackType

from ..conf.layout import LayoutError
from ..launcher.run.attempts import SupersededError
from ..launcher.run.outcome import Cause

TRACEBACK_LINES = 40
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_RAISE = dis.opmap["RAISE_VARARGS"]


@dataclass(frozen=True)
class Failure:
    """The fields of a worker's `failed`. traceback: its tail; None where `error` says all that there is to know."""

    cause: Cause
    error: str
    traceback: str | None


def failure_of(error: BaseException) -> Failure:
    """Name an exception. Without a traceback: those that our own code raises on purpose and that name their cause."""
    cause = _cause_of(error)
    if _names_cause(error) and _is_raised_by_us(_origin(error)):
        return Failure(cause, str(error), None)
    text = "".join(traceback.format_exception(error)).rstrip()
    return Failure(cause, f"{type(error).__name__}: {error}", "\n".join(text.splitlines()[-TRACEBACK_LINES:]))


def _cause_of(error: BaseException) -> Cause:
    import torch

    if isinstance(error, SupersededError):
        return Cause.SUPERSEDED
    if isinstance(error, LayoutError):
        return Cause.BAD_CONFIG
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Cause.OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return Cause.STORAGE
    # Errors carry their cause where the class knows it (`cause` attribute): diverged, storage, bad_config.
    named = getattr(error, "cause", None)
    return named if isinstance(named, Cause) else Cause.CRASH


def _names_cause(error: BaseException) -> bool:
    return isinstance(error, LayoutError | SupersededError) or isinstance(getattr(error, "cause", None), Cause)


def _origin(error: BaseException) -> BaseException:
    """What a BadInputError was made of: a ValueError may be a reader's sentence about a file, or a slip of ours."""
    return error.__cause__ if isinstance(error.__cause__, ValueError | OSError) else error


def _is_raised_by_us(error: BaseException) -> bool:
    """Whether it comes from a `raise` in this package. `int("x")` or an unpacking that does not fit raises too, and so
    does a library, but not with words for the user."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and _is_ours(last) and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


def _is_ours(place: TracebackType) -> bool:
    assert __package__ is not None
    return str(place.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == __package__.partition(".")[0]
