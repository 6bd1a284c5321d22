"""Putting a trainer together: which stages, model, data parallelism, optimizer and engine a configuration asks for.

Owns: the choices, one function each. Does not own: any of the parts, or the order of a step (loop.py).
"""

from __future__ import annotations

import torch
from torch import nn

from ..conf.schema import Config, Fp8, ParamDtype
from ..conf.schema import DataParallel as Kind
from ..kernels import Ops
from .engine import Accumulation, Engine
from .grid import Grid
from .linear import WeightGradients
from .metrics import Clock
from .model import Decoder, Parts, Stages
from .optim.build import optimizer_of
from .optim.weights import Optimizer
from .parallel.data import DataParallel
from .parallel.ddp import DistributedDataParallel
from .parallel.stages import StageSpec, are_ends_apart, local_specs
from .parallel.zero1 import Zero1
from .params import ParamTable, decoder_table
from .pulse import Pulse

_DTYPES = {
    ParamDtype.float64: torch.float64,
    ParamDtype.float32: torch.float32,
    ParamDtype.bfloat16: torch.bfloat16,
}

# What torch.distributed.pipelining sends, and which gradients it expects, is told otherwise before that.
_PIPELINES_FROM = (2, 12)


def param_dtype(config: Config) -> torch.dtype:
    """Of the weights."""
    return _DTYPES[config.precision.params]


def stages_of(config: Config, grid: Grid) -> list[StageSpec]:
    """The pipeline stages of this rank, in the order of the forward pass."""
    return local_specs(config, grid.pipeline.rank)


def table_of(config: Config, grid: Grid) -> ParamTable:
    """The parameters of the whole model, and how this layout cuts them."""
    sequence = config.parallel.sequence and grid.tensor.size > 1
    return decoder_table(config.model, sequence, are_ends_apart(config.parallel))


def build_stages(
    config: Config, grid: Grid, ops: Ops, queue: WeightGradients, table: ParamTable, stages: list[StageSpec]
) -> list[Decoder]:
    """The modules of this rank's stages, without values yet."""
    p = config.parallel
    dtype = param_dtype(config)
    parts = Parts.of(
        config.model, ops, queue, grid, table, p.sequence, dtype, context_method=p.context_method, memory=config.memory
    )
    built = [Decoder(parts, stage) for stage in stages]
    blocks = [block for stage in built for block in stage.blocks.values()]
    if config.precision.fp8 is not Fp8.none:
        from .float8 import use_float8  # loads torchao, and that the compiler

        use_float8(blocks, config.precision.fp8, grid.device)
    if config.kernels.compile:
        from .compile import compile_blocks  # loads the compiler

        compile_blocks(blocks)
    return built


def join(stages: list[Decoder]) -> nn.Module:
    """One module with all of a rank's parameters, by their names in the whole model."""
    return stages[0] if len(stages) == 1 else Stages(stages)


def build_data_parallel(config: Config, grid: Grid, ops: Ops, table: ParamTable, model: nn.Module) -> DataParallel:
    """How this rank's weights, gradients and optimizer state lie over the ranks that read other samples. `model` has
    its values already; where an axis has one rank there is nothing to shard."""
    kind, bucket_bytes = config.parallel.data, int(config.parallel.bucket_mb * 2**20)
    axis = "shard" if kind is Kind.hsdp else "dense"
    if kind in (Kind.fsdp, Kind.hsdp) and grid.comms[axis].size > 1:
        from .parallel.fsdp import FullySharded  # torch's FSDP2 takes two seconds to import

        # A pipeline runs many passes before a weight changes: gathered once, weights stay until their backward pass.
        reshard = grid.pipeline.size == 1
        return FullySharded(model, table, grid, ops, axis, config.parallel.reduce_each, reshard)
    if kind is Kind.zero1 and any(grid.comms[f.reduce_over].size > 1 for f in table.owned()):
        return Zero1(model, table, grid, ops, bucket_bytes)
    return DistributedDataParallel(model, table, grid, ops, bucket_bytes)


def build_optimizer(config: Config, grid: Grid, ops: Ops, table: ParamTable, share: DataParallel) -> Optimizer:
    """Of this rank's shards. Collective; raises PeerLostError."""
    return optimizer_of(share.shards, share.box, table, config, ops, grid)


def build_engine(
    config: Config,
    grid: Grid,
    stages: list[Decoder],
    queue: WeightGradients,
    pulse: Pulse,
    clock: Clock,
) -> Engine:
    """What runs forward and backward passes.

    Raises:
        ValueError: the number of micro-batches does not go with the pipeline's schedule; torch is too old for it.
    """
    if grid.pipeline.size == 1:
        return Accumulation(stages[0], queue, grid, pulse, clock)
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < _PIPELINES_FROM:
        raise ValueError(
            f"parallel.pipeline={grid.pipeline.size} needs torch 2.12 or newer, here is {torch.__version__}; "
            "install a newer one, or set parallel.pipeline=1"
        )
    from .pipeline_engine import Pipelined  # torch's part of it takes a second to import

    return Pipelined(config, grid, stages, queue, param_dtype(config), pulse, clock)
