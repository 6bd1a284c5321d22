"""When a run saves its state, and what a training step does for it.

Owns: the policy (every so many steps or minutes, on a stop, at the end), and what follows from the outcome of a save.
Does not own: how a checkpoint comes to be (state/checkpointer.py), or what it holds (loop.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..conf.schema import Config
from ..launcher.run.heartbeat import Save
from .context import RunContext
from .grid import Grid
from .metrics import Clock
from .state.checkpointer import Checkpointer, Ended
from .state.entry import Entry
from .state.persist_remote import LOST

Snapshot = Callable[[], tuple[int, Sequence[Entry], dict[str, Any]]]  # step, entries, state


def _nothing() -> tuple[int, Sequence[Entry], dict[str, Any]]:
    raise AssertionError("a closed trainer is not saved")


class Saving:
    """One per trainer. All ranks make the same decisions: by steps, or by sums over all ranks.

    The decisions need no collective of their own: `numbers` go into a step's reduction, and their sums to `boundary`.
    """

    NUMBERS = 3

    def __init__(self, config: Config, grid: Grid, context: RunContext, clock: Clock, snapshot: Snapshot) -> None:
        """`snapshot`: of the state as it is when it is called."""
        self._settings, self._grid, self._context, self._clock = config.checkpoint, grid, context, clock
        self._snapshot = snapshot
        self.checkpointer = Checkpointer(context, grid, config.checkpoint, config.resilience.save_timeout)
        self.saved_step: int | None = None  # newest that is on stable storage, of this process
        self._is_postponed = False
        self._last = time.monotonic()

    def prepare(self) -> None:
        """After the first step: fetch memory, if saves are to come while it trains. Raises PeerLostError."""
        if self._settings.asynchronous and (self._settings.interval or self._settings.minutes):
            self.checkpointer.prepare(self._snapshot()[1])

    def numbers(self) -> torch.Tensor:
        """float64 [3], to be summed over all ranks: parts written, failures, and whether rank 0's clock asks for a
        save."""
        minutes = self._settings.minutes
        is_due = self._grid.rank == 0 and minutes > 0 and time.monotonic() - self._last >= 60 * minutes
        numbers = torch.zeros(self.NUMBERS, dtype=torch.float64, device=self._grid.device)
        for i, number in enumerate((*self.checkpointer.counts(), int(is_due))):
            if number:
                numbers[i] = float(number)  # filled there: a copy from the host would wait for the device
        return numbers

    def settle(self) -> None:
        """Before the state changes: wait until it is copied."""
        if not self.checkpointer.is_settled:
            with self._clock.measure("save_wait"):
                self.checkpointer.settle()

    def boundary(self, step: int, is_bad: bool, sums: Sequence[float]) -> None:
        """After a step: go on with the save under way, and begin one if it is due. `sums`: of `numbers`.

        After a bad step nothing is saved: whether the weights are sound shows only in the next good step.

        Raises:
            SupersededError: a later attempt has begun.
            PeerLostError: another rank is gone.
        """
        done, failed, by_clock = map(round, sums)
        self._note(self.checkpointer.advance(done, failed))
        interval = self._settings.interval
        is_due = bool(interval) and step % interval == 0
        if is_bad:
            if is_due:
                self._report("checkpoint_skipped", step=step, reason="the step was bad")
            return
        if not (is_due or by_clock or self._is_postponed):
            return
        if self.checkpointer.in_flight is None:
            self._begin()
        elif not self._is_postponed:
            self._is_postponed = True
            self._report("checkpoint_late", step=step, behind=self.checkpointer.in_flight)

    def finish(self, is_urgent: bool = False) -> None:
        """Wait for the save under way. is_urgent: as of `now`. Raises as `boundary`."""
        if is_urgent:
            self.checkpointer.spare()
        with self._clock.measure("save"):
            self._note(self.checkpointer.finish())

    def stop(self, step: int, is_bad: bool, time_for: Save) -> None:
        """Save what there is time for before this process is ended. Raises as `boundary`."""
        if time_for is Save.UNDER_WAY:
            self.finish(is_urgent=True)
            return
        is_older = self.checkpointer.in_flight not in (None, step)
        if time_for is Save.OWN and is_older and not is_bad and not self.checkpointer.is_publishing:
            self._report("checkpoint_abandoned", step=self.checkpointer.in_flight, for_step=step)
            self.checkpointer.abandon()
        self.now(step, is_bad, is_urgent=True)

    def now(self, step: int, is_bad: bool, is_urgent: bool) -> str | None:
        """Have the state after `step` on stable storage; why it is not, the same on all ranks.

        A save of an older step that is still being written is finished first. is_urgent: somebody may end this process
        soon, so that nothing is done but writing. Raises as `boundary`.
        """
        self.finish(is_urgent)
        if self.saved_step == step:
            return None
        if is_bad:
            self._report("checkpoint_skipped", step=step, reason="the step was bad")
            return f"step {step} was bad"
        problem = self._begin(wait=True, is_urgent=is_urgent)
        if problem is not None and LOST in problem:  # nothing is wrong with the storage, and the workers write now
            problem = self._begin(wait=True, is_urgent=is_urgent)
        return problem

    def close(self) -> None:
        """Abandon what is under way. Safe after an error, and twice."""
        self.checkpointer.close()
        self._snapshot = _nothing  # it holds the trainer, which holds this

    def _begin(self, wait: bool = False, is_urgent: bool = False) -> str | None:
        self._is_postponed, self._last = False, time.monotonic()
        step, entries, state = self._snapshot()
        with self._clock.measure("save"):
            if not self.checkpointer.begin(step, entries, state, prune=not is_urgent):
                self.saved_step = step
                return None
        if wait or not self._settings.asynchronous:
            with self._clock.measure("save"):
                return self._note(self.checkpointer.finish())
        return None

    def _note(self, ended: Ended | None) -> str | None:
        if ended is None:
            return None
        if ended.problem is None:
            self.saved_step = max(ended.step, self.saved_step or 0)
        return ended.problem

    def _report(self, event: str, **fields: Any) -> None:
        if self._grid.rank == 0:
            self._context.report(event, **fields)
