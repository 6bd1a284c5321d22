"""Gradients in buckets: the right sums, reduced once per step, in one order, while the backward pass goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from stoker.conf.schema import ModelConfig
from stoker.kernels import select
from stoker.train.comm import Communicator, Work
from stoker.train.data.dataset import Batch
from stoker.train.grid import Grid, Membership, form, single
from stoker.train.init import initialize
from stoker.train.linear import WeightGradients
from stoker.train.model import Decoder, whole_model
from stoker.train.parallel.ddp import DistributedDataParallel
from stoker.train.params import decoder_table
from torch import Tensor

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_size=48)
TIED = ModelConfig(**{**vars(CONFIG), "tied_embeddings": True})


class Spy(Communicator):
    """Pretends to be one of two ranks, and notes how large each reduction is."""

    def __init__(self) -> None:
        super().__init__(None, 0, 2, torch.device("cpu"))
        self.sizes: list[int] = []

    def all_reduce_async(self, tensor: Tensor, *args: Any) -> Work:
        self.sizes.append(tensor.numel())
        return Work(None)


def spied(spy: Spy) -> Grid:
    """A grid whose gradients are reduced by the spy."""
    return replace(single(), comms=single().comms | {"dense": spy})


def make_batch(seed: int, rows: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, 64, (rows, 9), generator=generator) for _ in range(2))
    return Batch(tokens, targets, torch.arange(9).repeat(rows, 1), None, torch.arange(rows))


def build(config: ModelConfig, grid: Grid, bucket_bytes: int) -> tuple[Decoder, DistributedDataParallel]:
    ops, queue = select(), WeightGradients()
    model = whole_model(config, ops, queue)
    initialize(model, decoder_table(config), single(), seed=0)
    reducer = DistributedDataParallel(model, decoder_table(config), grid, ops, bucket_bytes)
    queue.sink = reducer.sink
    return model, reducer


def step(model: Decoder, reducer: DistributedDataParallel, batches: list[Batch]) -> dict[str, Tensor]:
    reducer.begin_step(len(batches))
    for batch in batches:
        model(batch).objective.backward()
    reducer.finish()
    return {name: gradient.clone() for name, gradient in reducer.gradients.items()}


def plain_gradients(config: ModelConfig, batches: list[Batch]) -> dict[str, Tensor]:
    model = whole_model(config, select())
    initialize(model, decoder_table(config), single(), seed=0)
    for batch in batches:
        model(batch).objective.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_gradients_are_the_sum_over_micro_steps_and_steps_do_not_mix(config: ModelConfig) -> None:
    model, reducer = build(config, single(), 1000)
    step(model, reducer, [make_batch(9)])  # must leave no trace in the next step
    found = step(model, reducer, [make_batch(1), make_batch(2)])
    expected = plain_gradients(config, [make_batch(1), make_batch(2)])
    assert set(found) == set(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_buckets_are_reduced_once_and_only_in_the_last_micro_step(config: ModelConfig) -> None:
    spy = Spy()
    model, reducer = build(config, spied(spy), 8000)
    reducer.begin_step(2)
    model(make_batch(1)).objective.backward()
    assert spy.sizes == []
    model(make_batch(2)).objective.backward()
    assert len(spy.sizes) > 3
    assert sum(spy.sizes) == reducer.flat.numel()
    reducer.finish()
    assert sum(spy.sizes) == reducer.flat.numel()


def test_reductions_begin_while_the_backward_pass_goes_on() -> None:
    spy = Spy()
    model, reducer = build(CONFIG, spied(spy), 4000)
    reduced_at: list[int] = []
    # The first block is the last to get its gradients.
    model.blocks["0"].register_full_backward_hook(lambda *_: reduced_at.append(len(spy.sizes)))
    step(model, reducer, [make_batch(1)])
    assert 1 < reduced_at[0] < len(spy.sizes)


def test_buckets_go_out_in_order_even_if_a_later_one_is_full_first() -> None:
    spy = Spy()
    model, reducer = build(CONFIG, spied(spy), 4000)
    sizes = [bucket.flat.numel() for bucket in reducer._buckets]
    reducer.begin_step(1)
    for parameter in model.parameters():  # forward order: the last bucket fills first
        reducer.target(parameter)
        reducer.ready(parameter)
        assert spy.sizes == sizes[: len(spy.sizes)]
    assert spy.sizes == sizes


def test_a_missing_or_a_doubled_gradient_is_noticed() -> None:
    model, reducer = build(CONFIG, spied(Spy()), 4000)
    reducer.begin_step(1)
    with pytest.raises(AssertionError, match="too few gradients"):
        reducer.finish()
    reducer.ready(model.norm)
    with pytest.raises(AssertionError, match="norm: more gradients than uses"):
        reducer.ready(model.norm)


def test_gaps_between_gradients_stay_zero() -> None:
    config = ModelConfig(**{**vars(CONFIG), "hidden_size": 12, "head_dim": 4})
    model, reducer = build(config, single(), 1000)
    found = step(model, reducer, [make_batch(1)])
    exact = torch.cat([g.flatten() for g in found.values()]).double().norm()
    assert reducer.flat.numel() > sum(g.numel() for g in found.values())
    assert float(reducer.flat.double().norm()) == pytest.approx(float(exact), rel=1e-12)


def _reduced(member: Membership) -> dict[str, list[float]]:
    grid = form(member)
    try:
        model, reducer = build(CONFIG, grid, 4000)
        found = step(model, reducer, [make_batch(10 * member.rank), make_batch(10 * member.rank + 1)])
        return {name: gradient.flatten()[:50].tolist() for name, gradient in found.items()}
    finally:
        grid.close()


def test_ranks_hold_the_same_sum_over_all_ranks(run_ranks: Any) -> None:
    first, second = run_ranks(2, _reduced)
    assert first == second
    expected = plain_gradients(CONFIG, [make_batch(seed) for seed in (0, 1, 10, 11)])
    for name, values in first.items():
        torch.testing.assert_close(torch.tensor(values), expected[name].flatten()[:50], rtol=1e-5, atol=1e-6)
