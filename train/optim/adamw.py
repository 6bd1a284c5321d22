"""AdamW over shards: its two averages and the update.

Does not own: the arithmetic (kernels.adamw), the learning rate (schedule.py), whether a step is taken at all and with
which scale (loop.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...conf.schema import OptimConfig
from ...kernels import Ops
from ..linear import gradient_dtype
from .weights import Weights, groups


class AdamW:
    """An `Optimizer` (weights.py) whose averages have the gradient's dtype. No step communicates."""

    def __init__(self, weights: Weights, config: OptimConfig, ops: Ops) -> None:
        self._weights, self._config, self._ops = weights, config, ops
        self._groups = groups(weights.facts, config)
        self._exp_avg = {n: torch.zeros_like(p, dtype=gradient_dtype(p.dtype)) for n, p in weights.shards.items()}
        self._exp_avg_sq = {name: torch.zeros_like(m) for name, m in self._exp_avg.items()}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """See Optimizer."""
        kinds = {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq, "master": self._weights.masters}
        return {kind: tensors for kind, tensors in kinds.items() if tensors}

    def step(self, gradients: Mapping[str, Tensor], rate: float, update: int, grad_scale: float) -> None:
        """See Optimizer."""
        c, weights = self._config, self._weights
        for group in self._groups:
            self._ops.adamw(
                [weights.shards[n] for n in group.names],
                [gradients[n] for n in group.names],
                [self._exp_avg[n] for n in group.names],
                [self._exp_avg_sq[n] for n in group.names],
                [weights.masters[n] for n in group.names] if weights.masters else None,
                rate * group.factor,
                c.beta1,
                c.beta2,
                c.eps,
                group.weight_decay,
                update,
                grad_scale,
                weights.rounding(group.names, update),
            )
