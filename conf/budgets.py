"""How often a run is started again, per cause: the names and defaults of `resilience.budgets`.

Owns: that table. An attempt counts against the budget of its own cause alone, and only in a row: one that got further
than any before it gives all budgets back. Standard library only: the supervisor reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .problems import Problem, nearest

UNLIMITED = -1
# Attempts in a row that ended so and made no progress; one more, and the run stops.
BUDGETS: Mapping[str, int] = {
    "time_limit": 5,  # a limit too short to get anywhere
    "preempted": 100,
    "requeued": 100,  # by an administrator, or Slurm does not say why
    "requested": 100,  # by a script of the user's own
    "node_failure": 20,
    "hardware_fault": 5,
    "launch_failed": 10,
    "no_word": 10,  # killed before it could say why: power cut of the batch host, kill -9
    "hang": 2,
    "crash": 2,
    # What would only happen again: a person has to act first.
    "out_of_memory": 0,
    "storage": 0,
    "diverged": 0,
    "bad_config": 0,
}
# After these the next start is delayed, twice as long with each in a row: what failed a moment ago may fail again.
BACK_OFF = frozenset(("node_failure", "hardware_fault", "launch_failed", "no_word", "hang", "crash"))


def budget_problems(budgets: Mapping[str, int]) -> Iterator[Problem]:
    """What is wrong with `resilience.budgets`."""
    for name, value in budgets.items():
        if name not in BUDGETS:
            near = nearest(name, BUDGETS)
            hint = f"did you mean {near}?" if near else f"known: {', '.join(BUDGETS)}"
            yield Problem(f"resilience.budgets.{name}", None, f"no cause that has a budget; {hint}")
        elif value < UNLIMITED:
            yield Problem(f"resilience.budgets.{name}", str(value), "expected 0 or more, or -1 for any number")
