"""A progress bar of bytes on standard error, if that is a terminal."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]


def byte_bar(total: int | None, what: str) -> Any:
    """A context manager; `.update(count)` counts. Nothing is shown where standard error is not a terminal."""
    # disable=None is tqdm's way to say: only on a terminal.
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None, file=sys.stderr, leave=False)
