"""ZeRO-1's buffers: shards are boxes that fill every parameter, parts lie where they are gathered and reduced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from stoker.conf.schema import ModelConfig
from stoker.kernels import select
from stoker.train.comm import Communicator, Work
from stoker.train.data.dataset import Batch
from stoker.train.grid import Grid, single
from stoker.train.init import initialize
from stoker.train.linear import WeightGradients
from stoker.train.model import Decoder, whole_model
from stoker.train.parallel.zero1 import Zero1
from stoker.train.params import decoder_table
from torch import Tensor

CONFIG = ModelConfig(vocab_size=61, hidden_size=24, num_layers=3, num_heads=4, num_kv_heads=2, ffn_size=35)

EXPERTS = replace(CONFIG, num_experts=4, expert_ffn_size=32)


class Spy(Communicator):
    """Pretends to be one of several ranks, and notes what is sent."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, rank, size, torch.device("cpu"))
        self.scattered: list[int] = []
        self.gathered: list[int] = []
        self.waited = 0

    def reduce_scatter_async(self, tensor: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        assert out is not None
        assert out.numel() * self.size == tensor.numel()
        self.scattered.append(tensor.numel())
        return out, Work(None)

    def all_gather_async(self, tensor: Tensor, out: Tensor | None = None) -> tuple[Tensor, Work]:
        assert out is not None
        assert tensor.data_ptr() == out.data_ptr() + self.rank * tensor.nbytes
        self.gathered.append(out.numel())
        spy = self

        class Noted(Work):
            def wait(self) -> None:
                spy.waited += 1

        return out, Noted()


def build(rank: int, size: int, config: ModelConfig = CONFIG, bucket_bytes: int = 8000) -> tuple[Decoder, Zero1, Spy]:
    ops, queue, spy = select(), WeightGradients(), Spy(rank, size)
    grid: Grid = replace(single(), comms=single().comms | {"dense": spy, "expert_data": spy})
    model, table = whole_model(config, ops, queue), decoder_table(config)
    initialize(model, table, single(), seed=0)
    share = Zero1(model, table, grid, ops, bucket_bytes)
    queue.sink = share.sink
    return model, share, spy


def forward(model: Decoder) -> Any:
    tokens = torch.arange(20).view(2, 10)
    return model(Batch(tokens, tokens, torch.arange(10).repeat(2, 1), None, torch.arange(2)))


def backward(model: Decoder) -> None:
    forward(model).objective.backward()


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 100])
def test_shards_are_boxes_that_fill_every_parameter_once(size: int, config: ModelConfig) -> None:
    plain, table = whole_model(config, select()), decoder_table(config)
    initialize(plain, table, single(), seed=0)
    held = {f.name: torch.zeros(f.shape) for f in table.owned()}
    for rank in range(size):
        _, share, _ = build(rank, size, config)
        assert set(share.shards) == set(share.gradients)
        for name, shard in share.shards.items():
            box = share.box(name)
            assert tuple(shard.shape) == tuple(share.gradients[name].shape) == box.shape
            assert box.shape[-1:] == table[name].shape[-1:] or len(box.shape) == 1  # whole rows
            region = box.slices_in(type(box).whole(table[name].shape))
            assert torch.equal(shard, plain.get_parameter(name)[region])
            held[name][region] += 1
    for name, count in held.items():
        assert torch.equal(count, torch.ones_like(count)), name


def test_experts_fewer_than_ranks_are_cut_inside() -> None:
    name = "blocks.0.ffn.experts.up"
    boxes = [build(rank, 8, EXPERTS)[1].box(name) for rank in range(8)]
    assert [(box.start, box.shape) for box in boxes[:3]] == [
        ((0, 0, 0), (1, 16, 24)),
        ((0, 16, 0), (1, 16, 24)),
        ((1, 0, 0), (1, 16, 24)),
    ]


def test_ranks_hold_about_equally_much() -> None:
    config = replace(CONFIG, hidden_size=64, num_layers=6, ffn_size=176, head_dim=16)
    numels = [sum(s.numel() for s in build(r, 8, config, 100_000)[1].shards.values()) for r in range(8)]
    assert sum(numels) == decoder_table(config).numel
    assert max(numels) < 1.1 * sum(numels) / 8


def test_the_model_computes_with_the_memory_that_is_gathered() -> None:
    model, share, _ = build(1, 2)
    name = "blocks.1.attention.wq"
    share.shards[name].fill_(7.0)
    region = share.box(name).slices_in(type(share.box(name)).whole((24, 24)))
    assert (model.get_parameter(name)[region] == 7.0).all()


def test_buckets_are_reduced_once_per_step_and_begin_while_the_backward_pass_goes_on() -> None:
    model, share, spy = build(0, 2)
    sent: list[int] = []
    model.blocks["0"].register_full_backward_hook(lambda *_: sent.append(len(spy.scattered)))
    share.begin_step(2)
    backward(model)
    assert spy.scattered == []
    backward(model)
    share.finish()
    assert 1 < sent[-1] < len(spy.scattered)
    assert sum(spy.scattered) == sum(b.gradients.numel() for b in share._buckets)


def test_weights_are_waited_for_when_a_module_needs_them() -> None:
    model, share, spy = build(0, 2)
    share.publish()
    assert len(spy.gathered) == len(share._buckets) > 4
    waited: list[int] = []
    for block in model.blocks.values():
        block.register_forward_hook(lambda *_: waited.append(spy.waited))
    with torch.no_grad():
        forward(model)
    assert 0 < waited[0] < waited[1] < waited[2] <= spy.waited == len(spy.gathered)
    assert not model.blocks["0"]._forward_pre_hooks  # nothing is left behind


def test_a_new_exchange_waits_for_the_last_one() -> None:
    _, share, spy = build(0, 2)
    share.publish()
    share.publish()
    assert spy.waited == len(share._buckets)
    assert len(spy.gathered) == 2 * len(share._buckets)
