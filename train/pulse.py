"""The worker's side of the heartbeat segment: says where it is, and hears where to stop.

Owns: publishing phase, step, micro-batch and collective count, and holding at a proposed stop step (protocol in
launcher/run/heartbeat.py). No thread, no system call on the hot path. Without a segment (tests) it does nothing.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

from ..launcher.run.failpoints import failpoint
from ..launcher.run.heartbeat import NO_STOP, Heartbeat, Phase, Save, Segment


@dataclass(frozen=True)
class Stop:
    """End the run here: every rank has completed the same number of steps."""

    save: Save


class Pulse:
    """One per worker process and generation."""

    def __init__(self, segment: Segment | None, generation: int, rank: int = 0, attempt: int = 0) -> None:
        self._segment, self._generation, self._rank, self._attempt = segment, generation, rank, attempt
        self._phase, self._step, self._micro, self._sequence = Phase.START, 0, 0, 0
        self._began = 0.0
        self._recent: deque[float] = deque(maxlen=31)
        self._median = 0.0
        self._beat()

    def _beat(self) -> None:
        if self._segment is not None:
            self._segment.beat(
                Heartbeat(
                    self._generation,
                    self._phase,
                    self._micro,
                    self._step,
                    self._sequence,
                    time.monotonic(),
                    self._median,
                )
            )

    def enter(self, phase: Phase, micro: int = 0) -> None:
        """Now in `phase` (of micro-batch `micro`)."""
        self._phase, self._micro = phase, micro
        self._beat()

    def collective(self) -> None:
        """A collective begins; given to Communicator as `on_collective`."""
        self._sequence += 1
        self._beat()

    def reach(self, number: int) -> None:
        """Work begins that has this number in the step, on all ranks alike (a pipeline's ranks do different things, so
        that the number of collectives says nothing). Collectives within it count on from there."""
        self._sequence = max(self._sequence, number)
        self._beat()

    def boundary(self, step: int) -> Stop | None:
        """Between steps: `step` steps are complete. Publishes that, and holds while a stop at this step is proposed.

        Returns Stop if the run must end here, None to go on with step `step`.
        """
        now = time.monotonic()
        if self._began and step == self._step + 1:
            self._recent.append(now - self._began)
            self._median = statistics.median(self._recent)
        self._began, self._step, self._phase, self._micro, self._sequence = now, step, Phase.STEP, 0, 0
        self._beat()
        failpoint("step", step=step, rank=self._rank, attempt=self._attempt, generation=self._generation)
        return self._hold(step)

    def _hold(self, step: int) -> Stop | None:
        if self._segment is None:
            return None
        while True:
            control = self._segment.read_control()
            if control.generation != self._generation or control.stop_step == NO_STOP or control.stop_step > step:
                if self._phase is Phase.HOLD:
                    self.enter(Phase.STEP)
                return None
            # A proposal for a step already behind us was missed: the agent sees that and a later one follows.
            if control.stop_step < step and not control.is_committed:
                return None
            if control.is_committed:
                return Stop(control.save)
            if self._phase is not Phase.HOLD:
                self.enter(Phase.HOLD)
            time.sleep(0.002)
