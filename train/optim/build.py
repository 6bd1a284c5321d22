"""From a configuration to an optimizer over this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ...conf.schema import Config, OptimizerKind
from ...kernels import Ops, select
from ..box import Box
from ..grid import Grid
from ..params import ParamTable
from .adamw import AdamW
from .muon import Muon, takes
from .offload import Offloaded
from .weights import Optimizer, Weights


def optimizer_of(
    shards: Mapping[str, Tensor],
    box: Callable[[str], Box],
    table: ParamTable,
    config: Config,
    ops: Ops,
    grid: Grid,
) -> Optimizer:
    """shards: what this rank updates, detached, by parameter; box: where each lies in its logical tensor. table: the
    parameters of this rank's pipeline stages. Collective over the ranks that have the same ones; raises PeerLostError.
    """
    boxes = {name: box(name) for name in shards}
    facts = table.owned()
    if config.memory.offload_optimizer and grid.device.type != "cpu":
        on_host = select(device="cpu")
        return Offloaded(shards, lambda host: AdamW(Weights.of(host, boxes, facts, config), config.optim, on_host))
    if config.optim.kind is OptimizerKind.adamw:
        return AdamW(Weights.of(shards, boxes, facts, config), config.optim, ops)
    matrices = [f for f in facts if takes(f)]
    rest = [f for f in facts if not takes(f)]
    others = AdamW(Weights.of(shards, boxes, rest, config), config.optim, ops)
    weights = Weights.of(shards, boxes, matrices, config)
    return Muon(weights, matrices, config.optim, grid.comms["stage"], others, ops)
