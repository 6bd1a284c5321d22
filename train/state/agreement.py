"""Work that every rank does alone and whose result all ranks must know: the same decision everywhere, or a hang.

Owns: turning storage errors into values that travel, and naming rank and node in them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from ...launcher.run.attempts import SupersededError
from ...launcher.run.manifest import InvalidCheckpointError
from ..grid import Grid

Status = dict[str, Any]
SHOWN = 5  # items of a list that a message names


def exchange(grid: Grid, work: Callable[[], Status]) -> list[Status]:
    """Run `work` on every rank; every rank gets all results, by rank.

    A storage error, a bad checkpoint or a lack of memory becomes {"error": text}, and that there is a later attempt
    {"superseded": text}.

    Raises:
        PeerLostError: another rank is gone.
    """
    try:
        status = work()
    except SupersededError as e:
        status = {"superseded": str(e)}
    except (InvalidCheckpointError, MemoryError) as e:
        status = {"error": f"{place(grid)}: {str(e) or 'out of memory'}"}
    except OSError as e:
        what = e.strerror if e.filename is None else f"{e.filename}: {e.strerror}"
        status = {"error": f"{place(grid)}: {what}"}
    return grid.control.all_gather_json(status)


def first_rank(grid: Grid, work: Callable[[], Status]) -> Status:
    """Like `exchange`, for work that only rank 0 does: every rank gets its result."""
    return exchange(grid, work if grid.rank == 0 else dict)[0]


def errors(statuses: Sequence[Status]) -> list[str]:
    return [s["error"] for s in statuses if "error" in s]


def summary(items: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = f" (and {len(items) - SHOWN} more)" if len(items) > SHOWN else ""
    return "; ".join(items[:SHOWN]) + more


def place(grid: Grid) -> str:
    return f"rank {grid.rank} on {os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
