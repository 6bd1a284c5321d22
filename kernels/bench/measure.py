"""One case after another: right or not, then how long forwards and backwards take, beside what the device could do."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .case import Case, Function, Maker, backward_bytes, bytes_of, forward_bytes
from .check import Verdict, check, upstream
from .contenders import OTHERS
from .timing import copies_needed, seconds

Times = tuple[float, float, float]
"""Median, least and most, seconds."""


@dataclass(frozen=True)
class Result:
    """Of one contender in one case. verdict: None if it was not asked for. error: why there is no time."""

    op: str
    title: str
    dtype: str
    contender: str
    forward: Times | None = None
    backward: Times | None = None
    verdict: Verdict | None = None
    error: str = ""
    forward_bytes: int = 0
    backward_bytes: int = 0
    flops: int = 0
    backward_flops: int = 0

    @property
    def microseconds(self) -> float:
        """Both directions."""
        return 1e6 * sum(times[0] for times in (self.forward, self.backward) if times is not None)


@dataclass(frozen=True)
class Plan:
    """device, dtype, rounds, whether to look at results first and whether to time them, seed of the inputs. say: gets a
    line per contender."""

    device: torch.device
    dtype: torch.dtype
    rounds: int = 10
    is_checked: bool = True
    is_timed: bool = True
    seed: int = 0
    say: Callable[[str], None] = field(default=lambda _: None)


def measure(case: Case, contender: str, function: Function, plan: Plan) -> Result:
    """Right or not, and how long. Others' functions are not checked: they promise less."""
    about: dict[str, Any] = {"op": case.op, "title": case.title, "dtype": _name(plan.dtype), "contender": contender}
    try:
        verdict = None
        if plan.is_checked and contender not in OTHERS:
            verdict = check(case, function, Maker(plan.device, plan.dtype, plan.seed + 1000))
        times = _times(case, function, plan) if plan.is_timed else {}
        return Result(**about, **times, verdict=verdict, flops=case.flops, backward_flops=case.backward_flops)
    # One contender that fails must not take the others' figures along.
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, ImportError) as e:
        return Result(**about, error=f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e) else ''}"[:300])
    finally:
        if plan.device.type == "cuda":
            # After an illegal access every call fails; what was measured before is still worth having.
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


def _times(case: Case, function: Function, plan: Plan) -> dict[str, Any]:
    sets = [case.make(Maker(plan.device, plan.dtype, plan.seed))]
    for i in range(1, copies_needed(bytes_of(sets[0]), plan.device)):
        sets.append(case.make(Maker(plan.device, plan.dtype, plan.seed + i)))
    with torch.no_grad():
        outputs = case.call(function, sets[0])  # compiles, if that is needed
        calls = [partial(case.call, function, v) for v in sets]
        forward = seconds(calls, plan.device, plan.rounds)
    found: dict[str, Any] = {"forward": _spread(forward), "forward_bytes": forward_bytes(case, sets[0], outputs)}
    if case.gradients:
        found["backward"] = _spread(_backward(case, function, sets, plan))
        found["backward_bytes"] = backward_bytes(case, sets[0], outputs)
    return found


def _backward(case: Case, function: Function, sets: list[list[Any]], plan: Plan) -> list[float]:
    leaves = [[v[i].requires_grad_() for i in case.gradients] for v in sets]
    times = []
    for number in range(plan.rounds + 1):
        held = [case.call(function, v) for v in sets]
        grads = upstream(held[0], Maker(plan.device, plan.dtype, plan.seed))
        calls = [partial(torch.autograd.grad, o, ls, grads) for o, ls in zip(held, leaves, strict=True)]
        took = seconds(calls, plan.device, 1)
        times += took if number else []  # the first compiles
    return times


def _spread(times: list[float]) -> Times:
    return statistics.median(times), min(times), max(times)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
