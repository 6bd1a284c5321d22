"""AdamW over a model: the same as torch's, which parameters decay, and float32 masters under narrow weights."""

from __future__ import annotations

import pytest
import torch
from stoker.conf.schema import ModelConfig, OptimConfig
from stoker.kernels import select
from stoker.train.grid import single
from stoker.train.init import initialize
from stoker.train.model import Decoder, whole_model
from stoker.train.optim import AdamW
from stoker.train.params import decoder_table
from torch import Tensor

CONFIG = ModelConfig(vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=24)
OPTIM = OptimConfig(weight_decay=0.1)


def build(dtype: torch.dtype = torch.float32) -> tuple[Decoder, AdamW]:
    ops = select()
    model = whole_model(CONFIG, ops)
    initialize(model, decoder_table(CONFIG), single(), seed=0)
    shards = {name: parameter.detach() for name, parameter in model.to(dtype).named_parameters()}
    return model, AdamW(shards, decoder_table(CONFIG), OPTIM, ops)


def random_gradients(model: Decoder, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}


def test_updates_are_those_of_torch_with_decay_on_matrices_only() -> None:
    model, optimizer = build()
    reference, _ = build()
    groups = [
        {"params": [p for p in reference.parameters() if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    theirs = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    for update in (1, 2, 3):
        rate = 1e-2 / update
        for name, gradient in random_gradients(model, update).items():
            reference.get_parameter(name).grad = 0.5 * gradient
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        optimizer.step(random_gradients(model, update), rate, update, grad_scale=0.5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name), rtol=1e-5, atol=1e-7)


def test_small_updates_do_not_vanish_in_half_precision() -> None:
    model, optimizer = build(torch.bfloat16)
    before = model.norm.detach().clone()
    gradients = {n: torch.ones(p.shape) for n, p in model.named_parameters()}
    for update in range(1, 101):
        optimizer.step({n: g.clone() for n, g in gradients.items()}, 1e-4, update, 1.0)
        if update == 1:
            assert torch.equal(model.norm, before)  # 1 - 1e-4 is 1 in bfloat16
    assert float((before - model.norm).float().detach().mean()) == pytest.approx(0.01, abs=0.004)
    assert optimizer.masters["norm"].dtype == torch.float32
    assert torch.equal(model.norm, optimizer.masters["norm"].to(torch.bfloat16))


def test_state_is_kept_in_float32_and_by_name() -> None:
    for dtype, kinds in (
        (torch.float32, {"exp_avg", "exp_avg_sq"}),
        (torch.bfloat16, {"exp_avg", "exp_avg_sq", "master"}),
    ):
        model, optimizer = build(dtype)
        state = optimizer.state()
        assert set(state) == kinds
        for tensors in state.values():
            assert set(tensors) == dict(model.named_parameters()).keys()
            assert {t.dtype for t in tensors.values()} == {torch.float32}
