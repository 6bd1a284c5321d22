"""Compiled blocks on the tensor axis against the same blocks run eagerly, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stoker.conf.layout import Layout
from stoker.conf.schema import MemoryConfig, ModelConfig, QkNorm, Recompute
from stoker.kernels import select
from stoker.train.data.dataset import Batch
from stoker.train.grid import Grid, Membership, form
from stoker.train.init import initialize
from stoker.train.linear import WeightGradients
from stoker.train.model import Decoder, Parts
from stoker.train.parallel.stages import whole
from torch import Tensor
from traced import Traced, tells_outputs

CONFIG = ModelConfig(
    vocab_size=67,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=50,
    qk_norm=QkNorm.full,
    qkv_bias=True,
    linear_bias=True,
)


def build(grid: Grid, sequence: bool) -> Decoder:
    memory = MemoryConfig(recompute=Recompute.full, recompute_every=2)
    parts = Parts.of(CONFIG, select(), WeightGradients(), grid, sequence=sequence, dtype=torch.float64, memory=memory)
    model = Decoder(parts, whole(2))
    initialize(model, parts.table, grid, seed=0)
    return model


def outcome(model: Decoder) -> dict[str, Tensor]:
    tokens = torch.randint(0, 67, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).repeat(2, 1)
    sums = model(Batch(tokens, tokens.roll(-1, 1), positions, positions // 6, torch.arange(2)), 0.01)
    sums.objective.backward()
    return {"loss": sums.loss, **{name: p.grad for name, p in model.named_parameters()}}


def rank_compiled(member: Membership, compiler: str) -> float:
    """The largest distance, of both forms of the residual stream."""
    from stoker.train.compile import compile_blocks

    grid = form(member, Layout(tensor=2), backend="gloo")
    furthest = 0.0
    for sequence in (True, False):
        expected, compiled = outcome(build(grid, sequence)), build(grid, sequence)
        compile_blocks(compiled.blocks.values(), compiler)
        found = outcome(compiled)
        assert set(found) == set(expected)
        furthest = max([furthest, *(float((found[n] - expected[n]).abs().max()) for n in expected)])
    grid.close()
    return furthest


def rank_traced(member: Membership) -> list[str]:
    """Outputs of autograd.Functions that have two names, of both forms of the residual stream."""
    from stoker.train.compile import compile_blocks

    grid, traced = form(member, Layout(tensor=2), backend="gloo"), Traced()
    for sequence in (True, False):
        model = build(grid, sequence)
        compile_blocks(model.blocks.values(), traced)
        outcome(model)
    grid.close()
    assert traced.functions > 20
    return traced.ambiguous


@tells_outputs
def test_outputs_of_blocks_have_one_name(run_ranks: Any) -> None:
    assert run_ranks(2, rank_traced, timeout=120) == [[], []]


@pytest.mark.full
def test_compiled_blocks_have_the_same_gradients(run_ranks: Any) -> None:
    """Traced forward and backward, as for any compiler behind it; what the default one makes of it takes minutes."""
    assert max(run_ranks(2, rank_compiled, timeout=300, compiler="aot_eager")) < 1e-10
