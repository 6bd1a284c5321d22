"""AdamW over a model's parameters: its state, float32 master weights where parameters are narrower, and the update.

Owns: the state tensors and which parameters decay. Does not own: the arithmetic (kernels.adamw), the learning rate
(schedule.py), whether a step is taken at all and with which scale (loop.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..conf.schema import OptimConfig
from ..kernels import Ops
from .linear import gradient_dtype
from .params import ParamFacts, ParamTable


class AdamW:
    """Of the shards that a rank updates (parallel/data.py); state by parameter name, all of the shard's shape and in
    its gradient's dtype."""

    def __init__(self, shards: Mapping[str, Tensor], table: ParamTable, config: OptimConfig, ops: Ops) -> None:
        self._config, self._ops = config, ops
        self._groups = _groups([table[name] for name in shards])
        self._params = dict(shards)
        self._exp_avg = {name: torch.zeros_like(p, dtype=gradient_dtype(p.dtype)) for name, p in self._params.items()}
        self._exp_avg_sq = {name: torch.zeros_like(m) for name, m in self._exp_avg.items()}
        # Wide enough parameters are their own masters.
        self.masters = {
            name: p.to(gradient_dtype(p.dtype))
            for name, p in self._params.items()
            if p.dtype != gradient_dtype(p.dtype)
        }

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What must be kept besides the parameters: kind -> parameter -> tensor (kinds without any are left out)."""
        kinds = {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq, "master": self.masters}
        return {kind: tensors for kind, tensors in kinds.items() if tensors}

    def step(self, gradients: Mapping[str, Tensor], rate: float, update: int, grad_scale: float) -> None:
        """Update `update` (1 is the first) with `grad_scale` x gradients; gradients are scratch afterwards."""
        c = self._config
        for names, decay in self._groups:
            self._ops.adamw(
                [self._params[n] for n in names],
                [gradients[n] for n in names],
                [self._exp_avg[n] for n in names],
                [self._exp_avg_sq[n] for n in names],
                [self.masters[n] for n in names] if self.masters else None,
                rate,
                c.beta1,
                c.beta2,
                c.eps,
                c.weight_decay if decay else 0.0,
                update,
                grad_scale,
            )


def _groups(facts: list[ParamFacts]) -> list[tuple[list[str], bool]]:
    """(names, whether they decay), without empty ones."""
    groups = [([f.name for f in facts if f.is_decayed == decayed], decayed) for decayed in (True, False)]
    return [group for group in groups if group[0]]
