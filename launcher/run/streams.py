"""Standard output and error of a command that may be closed, full, or read by somebody who has gone.

Owns: what is done before and after a command for that. Nothing else may be imported from here: help must be instant.
"""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """`>&-` leaves None, to which nobody can write or flush; and the next file that is opened would get its number."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_WRONLY)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 (lives as long as we)


def let_go() -> None:
    """What could not be written stays in a stream's buffer; Python would try again at its exit, and end with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
