"""What every module of the model is built from: settings, operations, the queue of weight gradients, and the axes.

Owns: making parameters of the right local shape. Which shape that is stands in the parameter table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ...conf.schema import ContextMethod, MemoryConfig, ModelConfig
from ...kernels import Ops
from ..grid import Grid, single
from ..linear import WeightGradients
from ..parallel.context import ContextAxis
from ..parallel.experts import ExpertAxis
from ..parallel.tensor import TensorAxis
from ..params import ParamTable, decoder_table
from ..recompute import Recompute


@dataclass(frozen=True)
class Parts:
    """`device` may be meta: the model then has shapes and no values."""

    config: ModelConfig
    ops: Ops
    queue: WeightGradients
    table: ParamTable
    grid: Grid
    tensor: TensorAxis
    context: ContextAxis
    experts: ExpertAxis
    recompute: Recompute
    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(
        config: ModelConfig,
        ops: Ops,
        queue: WeightGradients,
        grid: Grid | None = None,
        table: ParamTable | None = None,
        sequence: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        context_method: ContextMethod = ContextMethod.ring,
        memory: MemoryConfig | None = None,
    ) -> Parts:
        """On `grid` (None: a single process), device None: the grid's; memory None: nothing is recomputed."""
        grid = grid or single()
        axis = TensorAxis(grid.tensor, sequence)
        table = table or decoder_table(config, axis.cuts_tokens, grid.pipeline.size > 1)
        context = ContextAxis(grid.context, context_method, ops.attention)
        recompute = Recompute.of(memory or MemoryConfig(), ops)
        experts, device = ExpertAxis(grid.expert, ops), device or grid.device
        return Parts(config, recompute.ops, queue, table, grid, axis, context, experts, recompute, device, dtype)

    def parameter(self, name: str) -> nn.Parameter:
        """This rank's part of the named parameter, without values yet."""
        return nn.Parameter(torch.empty(self.table.box(name, self.grid).shape, dtype=self.dtype, device=self.device))

    def optional(self, name: str) -> nn.Parameter | None:
        """The same, None for one that this model does not have."""
        return self.parameter(name) if name in self.table else None

    def first_row(self, name: str) -> int:
        """Where this rank's rows of the named parameter begin in the whole one."""
        return self.table.box(name, self.grid).start[0]
