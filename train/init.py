"""Initial values: a function of the seed and a parameter's name, never of rank, grid or order of creation.

Owns: the generator's key and the distributions. Which standard deviation a parameter has stands in the table.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from .box import Box
from .grid import Grid
from .params import ParamFacts, ParamTable


def initialize(model: nn.Module, table: ParamTable, grid: Grid, seed: int) -> None:
    """Fill every parameter of `model` with this rank's part of its initial value."""
    with torch.no_grad():
        for facts in table.owned():
            whole = initial_value(facts, seed)
            table.local(model, facts.name).copy_(whole[table.box(facts.name, grid).slices_in(Box.whole(facts.shape))])


def initial_value(facts: ParamFacts, seed: int) -> Tensor:
    """The whole parameter in float32 on the CPU, so that every device and layout starts from the same bits.

    Normal with `facts.init_mean` and `facts.init_std`; that mean alone where the deviation is 0.
    """
    if facts.init_std == 0.0:
        return torch.full(facts.shape, facts.init_mean)
    generator = torch.Generator().manual_seed(_key(seed, facts.name))
    return torch.empty(facts.shape).normal_(facts.init_mean, facts.init_std, generator=generator)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes a signed 64-bit seed
