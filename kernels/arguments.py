"""Types of arguments of `stoker kernels` and `stoker bench kernels`: what is wrong is refused before work begins.

Owns: what each of them takes. Which there are is said by the commands themselves.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def output_file(text: str) -> Path:
    """A file that can be written: minutes of work are not to end in finding that it cannot."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r}; {path.parent} is no directory that is there; make it, or name another"
        )
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a file that can be written")
    return path


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number from 1 on")
    return int(text)


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of minutes above 0")
    return value
