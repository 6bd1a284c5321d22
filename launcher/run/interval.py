"""How often to save: the interval at which saving and work that is lost by failures cost least together.

Owns: the formulas and their words, as pure functions of measured numbers. Does not own: measuring
(launcher/interval_facts.py). Standard library only.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. J. T. Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean, median
from typing import Any

# Of one node, in seconds, where a run has not yet seen failures of its own: 419 unexpected interruptions in 54 days on
# 16,384 GPUs in nodes of 8 ("The Llama 3 Herd of Models", 2024, section 3.3.4): 264 days.
NODE_MTBF = 54 * 86400 * (16384 / 8) / 419
# What is worth a word of its own: a factor between the set interval and the best one, of a run that did so much.
_FAR, _SAVES, _WORKED = 2.0, 3, 600.0


def young(cost: float, mtbf: float) -> float:
    """Seconds of work between two checkpoints: first order, for a cost far below the mean time between failures."""
    return sqrt(2.0 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Seconds of work from the end of one checkpoint to the beginning of the next. Daly's equation 37.

    Args:
        cost: seconds of training lost per checkpoint.
        mtbf: mean seconds between failures; failures come at random times (Poisson).
    """
    if cost >= 2.0 * mtbf:
        return mtbf
    x = cost / (2.0 * mtbf)
    return young(cost, mtbf) * (1.0 + sqrt(x) / 3.0 + x / 9.0) - cost


def lost_share(interval: float, cost: float, mtbf: float) -> float:
    """Part of the time that saving, and work done again after failures, take at this interval (first order)."""
    return cost / interval + interval / (2.0 * mtbf)


@dataclass(frozen=True)
class Save:
    """What one checkpoint took, seconds."""

    blocked: float  # that training stood: the copy, and an optimizer that waited for it
    durable: float  # from its beginning until it was published
    slowed: float = 0.0  # by which the steps meanwhile took longer than others, waiting included


@dataclass(frozen=True)
class History:
    """What a run has seen so far."""

    saves: Sequence[Save]
    step_seconds: float  # of a usual step
    worked: float  # seconds in all attempts
    failures: int  # after which work had to be done again
    nodes: int


@dataclass(frozen=True)
class Advice:
    """The interval, and the numbers that it comes from. Seconds, where not said otherwise."""

    interval: float  # between the beginnings of two checkpoints
    steps: int
    set_interval: float | None  # None: there is none
    set_steps: int | None
    cost: float  # of training per checkpoint
    blocked: float  # part of it
    saves: int  # that it is the mean of
    durable: float  # until one is published
    mtbf: float
    failures: int
    worked: float
    nodes: int
    share: float  # of the time, at the best interval
    set_share: float | None

    @property
    def is_far(self) -> bool:
        """Whether the set interval is off by more than a factor of two, and that costs more than a thousandth; of a
        short trial nothing is said."""
        if self.saves < _SAVES or self.worked < _WORKED:
            return False
        if self.set_interval is None or self.set_share is None:
            return True
        off = max(self.interval / self.set_interval, self.set_interval / self.interval)
        return off > _FAR and self.set_share - self.share > 0.001

    def to_json(self) -> dict[str, Any]:
        """For an event; numbers with as many digits as they mean."""
        return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in asdict(self).items()}


def slowed(during: Sequence[float], others: Sequence[float]) -> float:
    """Seconds by which the steps while one checkpoint was written took longer than a usual one of the others."""
    if not during or len(others) < 3:
        return 0.0
    return max(0.0, sum(during) - len(during) * median(others))


def advise(history: History, interval_steps: int, minutes: float) -> Advice | None:
    """The best interval for a run with these settings (0: none because of that); None before its first checkpoint.

    A run that has seen few failures has a prior: one failure in `NODE_MTBF` of a node. It weighs as one failure does.
    """
    if not history.saves or history.step_seconds <= 0:
        return None
    blocked = fmean(s.blocked for s in history.saves)
    # What the optimizer waited is in the step too: the larger of both, not their sum.
    cost = max(1e-3, fmean(max(s.blocked, s.slowed) for s in history.saves))
    mtbf = (NODE_MTBF / max(history.nodes, 1) + history.worked) / (1 + history.failures)
    durable = fmean(s.durable for s in history.saves)
    # One save at a time: what is not yet on stable storage when the next is due makes that one late.
    interval = max(daly(cost, mtbf) + cost, durable)
    steps = max(1, round(interval / history.step_seconds))
    chosen = [interval_steps * history.step_seconds] * (interval_steps > 0) + [minutes * 60] * (minutes > 0)
    now = min(chosen, default=None)
    return Advice(
        interval=steps * history.step_seconds,
        steps=steps,
        set_interval=now,
        set_steps=None if now is None else max(1, round(now / history.step_seconds)),
        cost=cost,
        blocked=blocked,
        saves=len(history.saves),
        durable=durable,
        mtbf=mtbf,
        failures=history.failures,
        worked=history.worked,
        nodes=history.nodes,
        share=lost_share(steps * history.step_seconds, cost, mtbf),
        set_share=None if now is None else lost_share(now, cost, mtbf),
    )


def sentence(a: Advice) -> str:
    """One line for people: the set interval, the best one, and why."""
    now = "none set"
    if a.set_interval is not None and a.set_steps is not None and a.set_share is not None:
        now = f"set {_steps(a.set_steps, a.set_interval)}, which costs {a.set_share:.2%} of the time"
    nodes = f"{a.nodes} node{'s' * (a.nodes != 1)}"
    return (
        f"interval: {now}; best {_steps(a.steps, a.interval)}, {a.share:.2%} (Daly 2006): a checkpoint costs "
        f"{_time(a.cost)} of training ({_time(a.blocked)} blocked; mean of {a.saves}) and is durable after "
        f"{_time(a.durable)}; a failure every {_time(a.mtbf)} ({a.failures} in {_time(a.worked)} on {nodes}, "
        f"and a prior of one in {NODE_MTBF / 86400:.0f} node-days)"
    )


def _steps(steps: int, seconds: float) -> str:
    return f"{steps} step{'s' * (steps != 1)} ({_time(seconds)})"


def _time(seconds: float) -> str:
    for limit, size, unit in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"
