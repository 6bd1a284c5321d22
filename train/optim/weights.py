"""What an optimizer updates: this rank's shards, and what keeps small updates from vanishing in narrow ones.

Owns: float32 masters or the addresses of stochastic rounding, and which parameters share decay and learning rate. Does
not own: update rules (adamw.py, muon.py), where shards come from (the data-parallel layer).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...conf.schema import Config, OptimConfig
from ...kernels import RoundingAddress
from ..box import Box
from ..linear import gradient_dtype
from ..params import ParamFacts, Role


class Optimizer(Protocol):
    """State and update of some parameters."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What must be kept besides the parameters: kind -> parameter -> tensor of its shard's shape.

        A kind lists only the parameters that have it; kinds without any are left out.
        """

    def step(self, gradients: Mapping[str, Tensor], rate: float, update: int, grad_scale: float) -> None:
        """Update `update` (1 is the first) with `grad_scale` x gradients; gradients are scratch afterwards.

        All collectives come before the first change of state. Raises PeerLostError: nothing has changed.
        """


class Weights:
    """Shards by parameter name, with their masters if they are narrower than their gradients."""

    def __init__(self, shards: Mapping[str, Tensor], boxes: Mapping[str, Box], facts: Sequence[ParamFacts]) -> None:
        """boxes: where each shard lies in its logical tensor."""
        self.facts = [f for f in facts if f.name in shards]
        self.shards = {f.name: shards[f.name] for f in self.facts}
        self.boxes = {f.name: boxes[f.name] for f in self.facts}
        self.masters: dict[str, Tensor] = {}
        self._shapes = {f.name: f.shape for f in self.facts}
        self._seed: int | None = None

    @staticmethod
    def of(
        shards: Mapping[str, Tensor], boxes: Mapping[str, Box], facts: Sequence[ParamFacts], config: Config
    ) -> Weights:
        """With masters or stochastic rounding, as `config.precision` says."""
        weights = Weights(shards, boxes, facts)
        narrow = {name: p for name, p in weights.shards.items() if p.dtype != gradient_dtype(p.dtype)}
        if config.precision.stochastic_rounding:
            weights._seed = config.seed
        else:
            weights.masters = {name: p.to(gradient_dtype(p.dtype)) for name, p in narrow.items()}
        return weights

    def updated(self, name: str) -> Tensor:
        """The master, or the shard itself where it has none."""
        return self.masters.get(name, self.shards[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the logical tensor."""
        return self._shapes[name]

    def rounding(self, names: Sequence[str], update: int) -> list[RoundingAddress] | None:
        """None without stochastic rounding."""
        if self._seed is None:
            return None
        return [RoundingAddress(self._seed, update, _site(n), self.boxes[n].start, self._shapes[n]) for n in names]


@dataclass(frozen=True)
class Group:
    """Parameters of one decay and one learning rate."""

    names: tuple[str, ...]
    weight_decay: float
    factor: float  # of the learning rate


def groups(facts: Sequence[ParamFacts], config: OptimConfig) -> list[Group]:
    """By role, without empty ones. Norms and biases never decay; embeddings do if `decay_embeddings` says so."""
    members: dict[tuple[float, float], list[str]] = {}
    for f in facts:
        decays = f.is_decayed and (config.decay_embeddings or f.role is not Role.EMBEDDING)
        key = (config.weight_decay if decays else 0.0, config.lr_factors.get(f.role.value, 1.0))
        members.setdefault(key, []).append(f.name)
    return [Group(tuple(names), *key) for key, names in members.items()]


def _site(name: str) -> int:
    """A number below 2^31 for stochastic rounding, the same on every rank and in every run."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") >> 1
