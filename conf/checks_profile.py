"""Rules of `profile`: which steps and ranks are traced.

Owns: `profile_rules`. Nothing here raises.
"""

from __future__ import annotations

from collections.abc import Iterator

from .problems import Problem
from .schema import Config

_LONG = 20  # steps


def profile_rules(config: Config) -> Iterator[Problem]:
    """What is wrong with the steps, ranks and the rest of a trace that is asked for."""
    profile = config.profile
    if not profile.steps:
        if profile.memory:
            yield Problem("profile.memory", "true", "has no effect without profile.steps", "warning")
        return
    yield from _steps(config)
    yield from _ranks(config)
    if profile.memory and config.cluster.gpus_per_node == 0:
        message = "has no effect on the CPU (cluster.gpus_per_node=0)"
        yield Problem("profile.memory", "true", message, "warning")


def _steps(config: Config) -> Iterator[Problem]:
    steps, total = config.profile.steps, config.train.steps
    shown = f"[{', '.join(map(str, steps))}]"
    if config.task.cmd:
        message = "has no effect with task.cmd: a script of your own has to profile itself"
        yield Problem("profile.steps", shown, message, "warning")
    elif len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        yield Problem("profile.steps", shown, "expected the first and the last step to trace, from 1, like [10,12]")
    elif steps[1] > total > 0:
        yield Problem("profile.steps", shown, f"beyond the last step: train.steps={total}")
    elif steps[1] - steps[0] >= _LONG:
        message = "a trace of so many steps is too large for most viewers; a few say as much"
        yield Problem("profile.steps", shown, message, "warning")


def _ranks(config: Config) -> Iterator[Problem]:
    ranks, count = config.profile.ranks, config.cluster.nodes * config.cluster.procs_per_node
    if not ranks:
        yield Problem("profile.ranks", "[]", "expected at least one rank, like [0]")
    for position, rank in enumerate(ranks):
        if not 0 <= rank < count:
            yield Problem(f"profile.ranks.{position}", str(rank), f"no such rank; there are 0 to {count - 1}")
        elif rank in ranks[:position]:
            yield Problem(f"profile.ranks.{position}", str(rank), "is there twice")
