"""The mixtures of experts of a model over one optimizer step: how tokens were shared out, and what follows from it.

Owns: the sums over ranks, the figures for the metrics, and the biases that balance the load, which are persistent
state. Does not own: a layer's mathematics (model/moe.py), or when a step is good (loop.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..conf.schema import ModelConfig
from .box import Replica
from .grid import Grid
from .model.moe import MixtureOfExperts, moved_bias
from .params import ParamTable, has_experts
from .state.entry import Entry


class Routing:
    """All mixtures of experts of the stages on this rank; of a dense model: nothing, at no cost."""

    def __init__(self, model: nn.Module, config: ModelConfig, table: ParamTable, grid: Grid) -> None:
        self._config, self._table, self._grid = config, table, grid
        self._layers = {m.layer: m for m in model.modules() if isinstance(m, MixtureOfExperts)}
        # Every layer of the whole model has a row, so that one sum over all ranks serves every stage.
        self._all = [i for i in range(config.num_layers) if has_experts(config, i)]
        self._load_LE = torch.zeros(len(self._all), config.num_experts, dtype=torch.int64, device=grid.device)

    def begin_step(self) -> None:
        """Forget the last step."""
        for layer in self._layers.values():
            layer.statistics.clear()

    def sums(self) -> Tensor:
        """What is to be summed over all ranks after the last backward pass: float64, flat, [] of a dense model."""
        if not self._all:
            return torch.zeros(0, dtype=torch.float64, device=self._grid.device)
        load_LE = torch.zeros_like(self._load_LE)
        auxiliary = torch.zeros(1, dtype=torch.float64, device=load_LE.device)
        for i, layer in self._layers.items():
            load_LE[self._all.index(i)] = layer.statistics.load_E
            auxiliary += layer.statistics.auxiliary
        return torch.cat([auxiliary, load_LE.flatten().double()])  # float64 holds such counts exactly

    def figures(self, sums: Tensor) -> Tensor:
        """`sums`, summed over all ranks -> what the host is to read, for RoutingFigures.of. Needs no collective."""
        if not self._all:
            return sums
        self._load_LE = sums[1:].round().long().view_as(self._load_LE)
        relative_LE = self._load_LE / self._load_LE.double().mean(1, keepdim=True)
        return torch.stack([sums[0], relative_LE.max(), relative_LE.min()])

    def commit(self) -> None:
        """Move the biases by the load of the whole batch; the state that changes. After `figures`, in good steps."""
        for i, layer in self._layers.items():
            if layer.router_bias is not None:
                load_E = self._load_LE[self._all.index(i)]
                layer.router_bias.copy_(moved_bias(layer.router_bias, load_E, self._config.balance_rate))

    def entries(self) -> list[Entry]:
        """The biases, as all ranks of a stage hold them."""
        return [
            Entry.whole(f"model/{layer.name}.router_bias", layer.router_bias, self._replica(layer))
            for layer in self._layers.values()
            if layer.router_bias is not None
        ]

    def _replica(self, layer: MixtureOfExperts) -> Replica:
        return self._table.replica(f"{layer.name}.router", self._grid)  # held by the same ranks
