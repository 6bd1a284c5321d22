"""What the benchmarks of training steps share: steps taken in turn, their times, ratios, and where it was measured."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import permutations
from pathlib import Path

import torch


@dataclass(frozen=True)
class Times:
    """Of one variant: seconds by round, and the losses of all its steps, warm-up included."""

    wall: list[float]
    cpu: list[float]
    losses: list[float]


def measure(
    steps: Mapping[str, Callable[[], float | None]], rounds: int, warmup: int, minutes: float = math.inf
) -> dict[str, Times]:
    """One step of each in every round, in an order that changes. A step returns its loss, or None.

    Fewer rounds when `minutes` are over before; three at least.
    """
    ends = time.monotonic() + 60 * minutes
    orders = list(permutations(steps))
    times = {name: Times([], [], []) for name in steps}
    for number in range(warmup + rounds):
        if time.monotonic() > ends and number >= warmup + 3:
            break
        for name in orders[number % len(orders)]:
            wall, cpu = time.perf_counter(), time.process_time()
            loss = steps[name]()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if loss is not None:
                times[name].losses.append(loss)
            if number >= warmup:
                times[name].wall.append(wall)
                times[name].cpu.append(cpu)
    return times


def ratio(of: Sequence[float], over: Sequence[float]) -> str:
    """How many times as fast as `over`: median of the per-round ratios, with their quartiles."""
    ratios = [b / a for a, b in zip(of, over, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def median_ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}"


def machine() -> str:
    """Where and when, with the load at this moment."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}"
    load = f"load average {os.getloadavg()[0]:.1f} at the end"
    return f"{date.today()}; {cpu}, {os.cpu_count()} cores, {system}, one thread; {load}"
