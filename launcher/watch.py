"""Waiting for a run's end: the files are looked at often, Slurm seldom.

Owns: the polling intervals. Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from . import state
from .run.layout import RunDir
from .run.outcome import Next
from .run.views import last_outcome

_FILES_EVERY = 0.5  # seconds; grows to the longest while nothing happens
_FILES_LONGEST = 5.0
_QUEUE_FIRST, _QUEUE_LONGEST = 2.0, 60.0  # seconds between two squeue calls, doubling


def wait_for_end(
    run: RunDir, each_time: Callable[[], bool] = lambda: False, sleep: Callable[[float], None] = time.sleep
) -> state.RunState:
    """Wait until nothing will happen to the run any more without a person.

    Args:
        each_time: called at every look; True if there was something new, which keeps the interval short.
    """
    pause, queue_pause, queue_due = _FILES_EVERY, _QUEUE_FIRST, time.monotonic()
    while True:
        is_news = each_time()
        if _says_end(run) or time.monotonic() >= queue_due:
            found = state.look(run, state.queue_of([run]))
            if found.is_over:
                each_time()
                return found
            queue_due = time.monotonic() + queue_pause
            queue_pause = min(2 * queue_pause, _QUEUE_LONGEST)
        pause = _FILES_EVERY if is_news else min(pause * 1.3, _FILES_LONGEST)
        sleep(min(pause, max(queue_due - time.monotonic(), 0.05)))


def _says_end(run: RunDir) -> bool:
    last = last_outcome(run)
    return last is not None and last[1] is not None and last[1].next is Next.NOTHING
