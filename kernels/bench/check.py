"""An implementation against float64, with inputs that it has not seen: outputs and gradients, and how far off they are.

The measure is the largest difference over the largest value of a tensor: results of half precision are rounded once, so
that a rounding of the largest is what is to be expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .case import Case, Function, Maker, widened

# Half a unit in the last place, twice that where a sum over many tokens is behind it, and float32's own sums.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass(frozen=True)
class Verdict:
    """errors: of outputs, then of gradients, each the largest difference over the largest value. bound: for them."""

    errors: tuple[float, ...]
    bound: float

    @property
    def is_right(self) -> bool:
        # Not `max(errors) <= bound`: a NaN is on no side.
        return all(error <= self.bound for error in self.errors)


def check(case: Case, function: Function, maker: Maker) -> Verdict:
    """Fresh inputs by `maker`, made twice: for the function, and for the reference in float64."""
    found = _results(case, function, case.make(maker), maker)
    again = Maker(maker.device, maker.dtype, maker.seed)
    wanted = _exact(case, case.make(again), again)
    errors = tuple(_error(a, b) for a, b in zip(found, wanted, strict=True))
    return Verdict(errors, case.tolerance or case.slack * TOLERANCE[maker.dtype])


def _results(case: Case, function: Function, inputs: list[Any], maker: Maker) -> list[Tensor]:
    if not case.gradients:
        return list(case.call(function, inputs))
    leaves = [inputs[i].requires_grad_() for i in case.gradients]
    outputs = case.call(function, inputs)
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, upstream(outputs, maker))]


def _exact(case: Case, inputs: list[Any], maker: Maker) -> list[Tensor]:
    if case.exact is not None and not case.gradients:
        return list(case.exact(inputs))
    wide = widened(inputs)
    leaves = [wide[i].requires_grad_() for i in case.gradients]
    outputs = case.call(getattr(reference, case.op), wide) if case.exact is None else case.exact(wide)
    if not leaves:
        return list(outputs)
    grads = torch.autograd.grad(outputs, leaves, [g.double() for g in upstream(outputs, maker)])
    return [*(o.detach() for o in outputs), *grads]


def upstream(outputs: Sequence[Tensor], maker: Maker) -> list[Tensor]:
    """Gradients of the outputs: ones for a loss that is summed already, else random in the maker's dtype."""
    if all(o.dim() == 0 for o in outputs):
        return [torch.ones_like(o) for o in outputs]
    random = Maker(maker.device, maker.dtype, maker.seed + 1)
    return [random.normal(*o.shape).to(o.dtype) for o in outputs]


def _error(found: Tensor, wanted: Tensor) -> float:
    scale = float(wanted.abs().max()) or 1.0
    # In pieces: float64 copies of logits of a whole vocabulary are large.
    pieces = zip(found.detach().reshape(-1).split(2**24), wanted.reshape(-1).split(2**24), strict=True)
    worst = [float((a.double() - b.double()).abs().max()) for a, b in pieces]
    return float(torch.tensor(worst).max()) / scale
