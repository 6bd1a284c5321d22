"""Attempts and fencing: of all processes that ever believe they work on a run, only the newest may publish.

An attempt is taken by exclusive mkdir; its number is the fencing token. After a network cut the processes of an old
attempt run on for a while beside the new one, so every writer asks `Fence.check` right before it publishes, and
what it publishes carries its attempt number in the name: a writer that was frozen between check and rename can
then at worst add a file under its own number, never replace a newer attempt's.
"""

from __future__ import annotations

from dataclasses import dataclass

from .files import fsync_dir
from .layout import AttemptDir, RunDir


class SupersededError(Exception):
    """A higher attempt exists: this process is a leftover and must stop without publishing anything."""


@dataclass(frozen=True)
class Fence:
    """The right to publish for `attempt`, as long as it is the highest."""

    run: RunDir
    attempt: int

    def is_current(self) -> bool:
        # One stat, not a listing: attempts are numbered without gaps because `claim` takes highest + 1.
        return not self.run.attempt(self.attempt + 1).path.exists()

    def check(self) -> None:
        """Raises SupersededError if a higher attempt exists."""
        if not self.is_current():
            raise SupersededError(f"attempt {self.attempt} of {self.run.path} was superseded by a later one")


def claim(run: RunDir) -> AttemptDir:
    """Take the next attempt number for this process; safe against any number of processes claiming at once."""
    run.attempts.mkdir(exist_ok=True)
    while True:
        existing = run.all_attempts()
        attempt = run.attempt(existing[-1].number + 1 if existing else 1)
        try:
            attempt.path.mkdir()
        except FileExistsError:
            continue
        for sub in ("events", "logs"):
            (attempt.path / sub).mkdir()
        fsync_dir(run.attempts)
        return attempt
