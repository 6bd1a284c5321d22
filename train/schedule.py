"""The learning rate as a pure function of the step.

Owns: the four shapes. Steps count from 1: `rate(1)` is used by the first optimizer step, `rate(steps)` by the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

from ..conf.schema import OptimConfig, Schedule


@dataclass(frozen=True)
class LearningRate:
    """Warm-up to `peak`, then one of the shapes, down to `lowest` at the last step.

    cosine: half a cosine from the end of the warm-up to the last step (Loshchilov and Hutter 2017).
    linear: a straight line over the same steps.
    wsd: peak until `decay_steps` before the end, then a straight line (Hu et al. 2024, MiniCPM).
    constant: peak; `lowest` is not used.
    """

    shape: Schedule
    peak: float
    lowest: float
    steps: int
    warmup_steps: int = 0
    decay_steps: int = 0

    @staticmethod
    def of(config: OptimConfig, steps: int) -> LearningRate:
        """Raises ValueError: see `__post_init__`."""
        return LearningRate(config.schedule, config.lr, config.min_lr, steps, config.warmup_steps, config.decay_steps)

    def __post_init__(self) -> None:
        """Raises ValueError where the parts do not fit into the steps."""
        decay = self.decay_steps if self.shape is Schedule.wsd else 0
        if self.warmup_steps < 0 or self.decay_steps < 0 or self.warmup_steps + decay > self.steps:
            raise ValueError(
                f"optim.warmup_steps = {self.warmup_steps} and optim.decay_steps = {self.decay_steps} must be positive "
                f"and fit into train.steps = {self.steps}"
            )
        if self.shape is not Schedule.constant and self.lowest > self.peak:
            raise ValueError(f"optim.min_lr = {self.lowest} is above optim.lr = {self.peak}: lower it")

    def rate(self, step: int) -> float:
        """For optimizer step `step` (1 is the first). Warm-up is linear and reaches peak at step `warmup_steps`; past
        the last step the rate stays what it was there."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.shape is Schedule.constant:
            return self.peak
        first = self.steps - self.decay_steps if self.shape is Schedule.wsd else self.warmup_steps
        if step <= first:
            return self.peak
        done = min(1.0, (step - first) / (self.steps - first)) if self.steps > first else 1.0
        left = (1 + cos(pi * done)) / 2 if self.shape is Schedule.cosine else 1 - done
        return self.lowest + (self.peak - self.lowest) * left
