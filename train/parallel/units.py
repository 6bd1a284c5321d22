"""Units of a model: the parameters that a rank needs from one moment of the forward pass on.

Owns: which those are, and where that moment can be seen. Whoever brings parameters to the ranks just in time (zero1.py,
fsdp.py) goes by these.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..model import Decoder
from ..params import ParamTable


@dataclass(frozen=True)
class Unit:
    """`names` are needed when `module` is called; or, where is_after, when it has returned."""

    module: nn.Module
    names: tuple[str, ...]
    is_after: bool = False


def stages_of(model: nn.Module) -> list[Decoder]:
    """The pipeline stages that a rank's model is made of."""
    return [module for module in model.modules() if isinstance(module, Decoder)]


def units(model: nn.Module, table: ParamTable) -> list[Unit]:
    """In the order of the forward pass: what a stage begins with, each block, what a stage ends with."""
    return [unit for stage in stages_of(model) for unit in _of_stage(stage, table)]


def _of_stage(stage: Decoder, table: ParamTable) -> list[Unit]:
    used = [f for f in table if f.is_on(stage.stage)]
    first = tuple(f.tied_to or f.name for f in used if f.layer is None and not f.is_output)
    last = tuple(f.tied_to or f.name for f in used if f.layer is None and f.is_output)
    blocks = {i: tuple(f.name for f in used if f.layer == i) for i in stage.stage.layers}
    modules = [stage.blocks[str(i)] for i in stage.stage.layers]
    end = Unit(modules[-1], last, is_after=True) if modules else Unit(stage, last)
    found = [Unit(stage, first), *(Unit(stage.blocks[str(i)], names) for i, names in blocks.items()), end]
    return [unit for unit in found if unit.names]
