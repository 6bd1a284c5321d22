"""Muon for the matrices of the blocks, AdamW for everything else.

Owns: momentum, the scale of the update, and the order of a step. Does not own: how shards become whole matrices and
back (exchange.py), or the orthogonalisation itself (newton_schulz.py).

Sources: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
scalable for LLM training" (arXiv:2502.16982).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import sqrt

import torch
from torch import Tensor

from ...conf.schema import OptimConfig
from ...kernels import Ops
from ..box import Box
from ..comm import Communicator
from ..linear import gradient_dtype
from ..params import ParamFacts, Role
from .adamw import AdamW
from .exchange import Exchange
from .newton_schulz import orthogonalize
from .weights import Group, Weights, groups


def takes(facts: ParamFacts) -> bool:
    """Whether Muon updates it: hidden matrices and experts; not embeddings, the head, routers, norms or biases."""
    return facts.role is Role.MATRIX


class Muon:
    """An `Optimizer` (weights.py). Momentum is an average of gradients in their dtype.

    With m = momentum m + (1 - momentum) g and u = (1 - momentum) g + momentum m (Nesterov):
    w = w (1 - lr weight_decay) - lr 0.2 sqrt(max(R, C)) orthogonal(u). By that factor (Liu et al., section 2.2) an
    update's elements are as large as AdamW's for any shape, so that one learning rate and one decay serve both.
    The orthogonalised updates of this rank's shards exist beside the momentum during a step.
    """

    def __init__(
        self,
        weights: Weights,
        facts: list[ParamFacts],
        config: OptimConfig,
        comm: Communicator,
        others: AdamW,
        ops: Ops,
    ) -> None:
        """weights: those that Muon takes; facts: all of these in the group of ranks `comm` that holds whole layers, in
        one order; others: updates the rest. Collective; raises PeerLostError.
        """
        self._weights, self._config, self._others, self._ops = weights, config, others, ops
        self._groups = groups(weights.facts, config)
        self._momentum = {n: torch.zeros_like(p, dtype=gradient_dtype(p.dtype)) for n, p in weights.shards.items()}
        self._rate = 1.0 if config.muon_lr is None else config.muon_lr / config.lr
        wide = next((m.dtype for m in self._momentum.values()), torch.float32)
        # Tensor cores take bfloat16, which the iteration forgives; without them it would only lose digits.
        self._dtype = torch.bfloat16 if comm.device.type == "cuda" and wide == torch.float32 else wide
        self._exchange = Exchange(facts, weights.boxes, comm, self._dtype)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """See Optimizer."""
        theirs = self._others.state()
        ours = {"momentum": self._momentum, "master": self._weights.masters}
        kinds = {kind: ours.get(kind, {}) | theirs.get(kind, {}) for kind in [*ours, *theirs]}
        return {kind: tensors for kind, tensors in kinds.items() if tensors}

    def step(self, gradients: Mapping[str, Tensor], rate: float, update: int, grad_scale: float) -> None:
        """See Optimizer."""
        with torch.no_grad():
            orthogonal = self._orthogonalized(gradients, grad_scale)
            # From here on nothing communicates: a step that loses a peer changed nothing.
            for group in self._groups:
                for name in group.names:
                    self._momentum[name].lerp_(gradients[name] * grad_scale, 1 - self._config.muon_momentum)
                    self._update(name, orthogonal.pop(name), group, rate * self._rate * group.factor, update)
            masters = self._weights.masters
            self._ops.cast_copy([self._weights.shards[name] for name in masters], list(masters.values()))
        self._others.step(gradients, rate, update, grad_scale)

    def _orthogonalized(self, gradients: Mapping[str, Tensor], grad_scale: float) -> dict[str, Tensor]:
        """By parameter, of the shards' shapes."""
        results = {n: torch.empty_like(p, dtype=self._dtype) for n, p in self._weights.shards.items()}
        momentum, boxes = self._config.muon_momentum, self._weights.boxes

        def read(name: str, box: Box) -> Tensor:
            place = box.slices_in(boxes[name])
            gradient = gradients[name][place] * grad_scale
            # In two steps, and not by a formula of m alone, so that nothing is written to the momentum yet.
            return gradient.lerp(self._momentum[name][place].lerp(gradient, 1 - momentum), momentum)

        def write(name: str, box: Box, values: Tensor) -> None:
            results[name][box.slices_in(boxes[name])] = values

        self._exchange.apply(read, partial(orthogonalize, steps=self._config.muon_steps), write)
        return results

    def _update(self, name: str, orthogonal: Tensor, group: Group, rate: float, update: int) -> None:
        weights = self._weights
        shard = weights.shards[name]
        rounding = weights.rounding([name], update)
        target = weights.updated(name) if rounding is None else shard.float()
        step = rate * 0.2 * sqrt(max(weights.shape(name)[-2:]))
        target.mul_(1 - rate * group.weight_decay).sub_(orthogonal.to(target.dtype), alpha=step)
        if rounding is not None:
            self._ops.stochastic_round([shard], [target], rounding)
