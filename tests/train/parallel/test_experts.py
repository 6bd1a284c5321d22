"""Experts on several ranks against the same layer in one process: outputs, gradients, loads, auxiliary terms."""

from __future__ import annotations

import gc
import hashlib
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from stoker.conf.layout import Layout
from stoker.conf.schema import Balance, ModelConfig, Router
from stoker.kernels import select
from stoker.train.grid import Grid, Membership, form, single
from stoker.train.linear import WeightGradients
from stoker.train.model import Parts
from stoker.train.model.forward_pass import TokenRows
from stoker.train.model.moe import MixtureOfExperts, moved_bias
from torch import Tensor

CONFIG = ModelConfig(
    hidden_size=10, ffn_size=6, num_experts=8, experts_per_token=3, balance_weight=0.1, router_z_loss=0.01
)
SEQUENCES, LENGTH = 4, 8
SCALE = 0.5
LAYOUTS = {
    "expert 2 over data": Layout(data=2, expert=2),
    "expert 2 over tensor": Layout(tensor=2, expert=2),
    "expert 2 over context": Layout(context=2, expert=2),
    "expert 4 over data and tensor": Layout(data=2, tensor=2, expert=4),
}
FULL = {
    "expert 4 over data": Layout(data=4, expert=4),
    "expert 2 over tensor, twice": Layout(data=2, tensor=2, expert=2),
    "expert 4 over context and tensor": Layout(context=2, tensor=2, expert=4),
}
CASES = {
    "balance loss": (CONFIG, 0.0, ()),
    "most experts without tokens": (replace(CONFIG, balance=Balance.bias), 100.0, ()),
    "padding": (replace(CONFIG, router=Router.sigmoid), 0.0, (2, 3)),
    "bias": (replace(CONFIG, router=Router.sigmoid, balance=Balance.bias), 0.01, (3,)),
}


def build(config: ModelConfig, bias: float, grid: Grid, queue: WeightGradients | None = None) -> MixtureOfExperts:
    parts = Parts.of(config, select(), queue or WeightGradients(), grid, dtype=torch.float64)
    moe = MixtureOfExperts(parts, layer=0)
    generator = torch.Generator().manual_seed(3)
    size, rank = grid.expert.size, grid.expert.rank
    for name, parameter in moe.named_parameters():
        is_expert = name.startswith("experts")
        shape = (parameter.shape[0] * size, *parameter.shape[1:]) if is_expert else parameter.shape
        whole = torch.empty(shape, dtype=torch.float64).normal_(0, 0.5, generator=generator)
        parameter.data = whole.chunk(size)[rank].clone() if is_expert else whole
    if moe.router_bias is not None:
        moe.router_bias[:3] = bias
    return moe


def token_rows(padding: tuple[int, ...]) -> TokenRows:
    sequence_T = torch.arange(SEQUENCES).repeat_interleave(LENGTH)
    return TokenRows(sequence_T, ~torch.isin(sequence_T, torch.tensor(padding)), SEQUENCES, LENGTH)


def mine(tensor_T: Tensor, grid: Grid) -> Tensor:
    """This rank's rows of [SEQUENCES x LENGTH, ...]: sequences over data, parts over context, flat rows over tensor."""
    sequences = tensor_T.unflatten(0, (SEQUENCES, LENGTH)).chunk(grid.data.size)[grid.data.rank]
    part = sequences.chunk(grid.context.size, 1)[grid.context.rank].flatten(0, 1)
    return part.chunk(grid.tensor.size)[grid.tensor.rank].clone()


def run(moe: MixtureOfExperts, x: Tensor, rows: TokenRows, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs, gradient of the input)"""
    x.requires_grad_()
    y = moe(x, rows, SCALE)
    (y * coefficients).sum().backward()
    moe.queue.drain()
    return y.detach(), x.grad


def _differences(member: Membership, layout: dict[str, int]) -> dict[str, float]:
    """By case, the largest difference of anything from what one process finds."""
    grid = form(member, Layout(**layout))
    try:
        return {name: _difference(grid, *case) for name, case in CASES.items()}
    finally:
        grid.close()


def _difference(grid: Grid, config: ModelConfig, bias: float, padding: tuple[int, ...]) -> float:
    generator = torch.Generator().manual_seed(5)
    x, coefficients = torch.randn(2, SEQUENCES * LENGTH, 10, dtype=torch.float64, generator=generator)
    rows = token_rows(padding)
    one = build(config, bias, single())
    y, dx = run(one, x.clone(), rows, coefficients)

    moe = build(config, bias, grid, WeightGradients(is_deferred=True))
    local = TokenRows(mine(rows.sequence_T, grid), mine(rows.is_real_T, grid), SEQUENCES, LENGTH)
    found, found_dx = run(moe, mine(x, grid), local, mine(coefficients, grid))
    pairs = [(found, mine(y, grid)), (found_dx, mine(dx, grid))]
    for name, parameter in moe.named_parameters():
        if name == "norm":
            continue
        whole = one.get_parameter(name).grad
        is_expert = name.startswith("experts")
        summed = grid.comms["expert_data" if is_expert else "stage"].all_reduce(parameter.grad.clone())
        pairs.append((summed, whole.chunk(grid.expert.size)[grid.expert.rank] if is_expert else whole))
    load_E = grid.comms["stage"].all_reduce(moe.statistics.load_E.clone())
    assert torch.equal(load_E, one.statistics.load_E)
    pairs.append((grid.comms["stage"].all_reduce(moe.statistics.auxiliary.clone()), one.statistics.auxiliary))
    if moe.router_bias is not None:
        assert torch.equal(moved_bias(moe.router_bias, load_E, 0.1), moved_bias(one.router_bias, load_E, 0.1))
        assert (load_E == 0).any() == (bias == 100.0)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_a_layer_cut_over_ranks_is_the_layer_of_one_process(run_ranks: Any, name: str) -> None:
    layout = (LAYOUTS | FULL)[name]
    sizes = {axis: layout.sizes[axis] for axis in ("data", "context", "tensor", "expert")}
    for differences in run_ranks(layout.world, _differences, layout=sizes):
        assert max(differences.values()) < 1e-10, differences
        assert differences.keys() == CASES.keys()


def test_copies_of_tokens_are_let_go_with_their_graph() -> None:
    moe, rows = build(CONFIG, 0.0, single()), token_rows(())
    choice_TK = torch.zeros(SEQUENCES * LENGTH, 1, dtype=torch.int64)
    routes = moe.axis.routes(choice_TK, CONFIG.num_experts, rows.is_real_T)
    transfer = moe.axis.dispatch(torch.ones(SEQUENCES * LENGTH, 10, requires_grad=True), routes)
    sent = weakref.ref(transfer.rows)
    gc.disable()  # it is not to be the garbage collector's work
    try:
        y = moe.axis.combine(transfer.arrive(), torch.ones(SEQUENCES * LENGTH, 1), routes)
        y.sum().backward()
        del transfer, y
        assert sent() is None
    finally:
        gc.enable()


def _digest(member: Membership) -> str:
    grid = form(member, Layout(data=2, expert=2))
    try:
        moe = build(CONFIG, 0.0, grid).float()
        generator = torch.Generator().manual_seed(member.rank)
        x = torch.randn(SEQUENCES * LENGTH, 10, generator=generator)
        y, dx = run(moe, x, token_rows((1,)), torch.ones(SEQUENCES * LENGTH, 10))
        results = [y, dx, *(p.grad for n, p in moe.named_parameters() if n != "norm")]
        return hashlib.sha256(b"".join(r.numpy().tobytes() for r in results)).hexdigest()
    finally:
        grid.close()


def test_two_runs_have_the_same_bits(run_ranks: Any) -> None:
    assert run_ranks(2, _digest) == run_ranks(2, _digest)


def _backward_of_transfers(member: Membership) -> list[list[int]]:
    """How many collectives had begun when the work between start and arrival ran, forward and backward."""
    began: list[int] = []
    grid = form(member, Layout(data=2, expert=2), on_collective=lambda: began.append(1))
    try:
        seen: list[int] = []

        class Shared(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                seen.append(len(began))
                y = 2 * x
                y.register_hook(lambda _: seen.append(len(began)))
                return y

        moe = build(replace(CONFIG, balance=Balance.none), 0.0, grid)
        moe.shared = Shared()
        x = torch.randn(SEQUENCES * LENGTH, 10, dtype=torch.float64)
        begin = len(began)
        run(moe, x, token_rows(()), torch.ones_like(x))
        return [[n - begin for n in seen], [len(began) - begin]]
    finally:
        grid.close()


def test_the_shared_expert_runs_while_tokens_are_on_their_way_in_both_passes(run_ranks: Any) -> None:
    # Forward: counts, tokens | shared | back. Backward: to the experts, back | shared.
    for seen, total in run_ranks(2, _backward_of_transfers):
        assert (seen, total) == ([2, 5], [5])
