"""AdamW over a model: updates as torch, decay and rates by role, masters or random rounding under narrow weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stoker.conf.schema import Config, ModelConfig, OptimConfig, OptimizerKind, PrecisionConfig
from stoker.kernels import select
from stoker.train.box import Box
from stoker.train.grid import single
from stoker.train.init import initialize
from stoker.train.model import Decoder, whole_model
from stoker.train.optim.adamw import AdamW
from stoker.train.optim.build import optimizer_of
from stoker.train.optim.weights import Group, Optimizer, Weights, groups
from stoker.train.params import ParamFacts, Role, decoder_table
from torch import Tensor

CONFIG = ModelConfig(vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=24)


def build(dtype: torch.dtype = torch.float32, rounds: bool = False, **optim: Any) -> tuple[Decoder, Optimizer]:
    ops, table, grid = select(), decoder_table(CONFIG), single()
    model = whole_model(CONFIG, ops)
    initialize(model, table, grid, seed=0)
    model.to(dtype)
    shards = {f.name: table.local(model, f.name).detach() for f in table.owned()}
    config = Config(optim=OptimConfig(**optim), precision=PrecisionConfig(stochastic_rounding=rounds))
    return model, optimizer_of(shards, lambda name: table.box(name, grid), table, config, ops, grid)


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
    master = optimizer.state()["master"]["norm"]
    assert master.dtype == torch.float32
    assert torch.equal(model.norm, master.to(torch.bfloat16))


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


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_with_stochastic_rounding_there_are_no_masters_and_small_updates_add_up(kind: str) -> None:
    model, optimizer = build(torch.bfloat16, rounds=True, kind=OptimizerKind(kind), weight_decay=0.0)
    before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    assert "master" not in optimizer.state()
    for update in range(1, 101):
        optimizer.step({n: torch.ones(p.shape) for n, p in model.named_parameters()}, 1e-4, update, 1.0)
    moved = torch.cat([(before["norm"] - model.norm).flatten(), (before["head"] - model.head).flatten()])
    assert float(moved.mean().detach()) == pytest.approx(0.01, rel=0.05)


def test_roles_decide_decay_and_learning_rate() -> None:
    facts = decoder_table(ModelConfig(num_layers=1)).owned()
    config = OptimConfig(
        weight_decay=0.1, decay_embeddings=False, lr_factors={"embedding": 0.5, "norm": 2.0, "head": 3.0}
    )
    norms = ("blocks.0.attention.norm", "blocks.0.ffn.norm", "norm")
    matrices = [f.name for f in facts if f.name not in ("embedding", "head", *norms)]
    assert sorted(groups(facts, config), key=lambda g: g.factor) == [
        Group(("embedding",), 0.0, 0.5),
        Group(tuple(matrices), 0.1, 1.0),
        Group(norms, 0.0, 2.0),
        Group(("head",), 0.1, 3.0),
    ]
    assert [g.weight_decay for g in groups(facts, OptimConfig())] == [0.1, 0.0]  # by default embeddings decay


def test_a_factor_slows_only_its_role() -> None:
    (plain, one), (slowed, other) = build(), build(lr_factors={"embedding": 0.25})
    before = plain.embedding.detach().clone()
    for optimizer, model in ((one, plain), (other, slowed)):
        optimizer.step(random_gradients(model, 1), 1e-2, 1, 1.0)
    torch.testing.assert_close(4 * (slowed.embedding - before), plain.embedding - before, rtol=1e-4, atol=1e-7)
    assert torch.equal(slowed.norm, plain.norm)


def test_random_rounding_gives_the_same_bits_however_weights_are_cut() -> None:
    """Rows as by ZeRO, columns as by a row-parallel layer, against the whole."""
    facts = [ParamFacts("w", (12, 20), Role.MATRIX, 0.02)]
    config = Config(precision=PrecisionConfig(stochastic_rounding=True), seed=4)
    start, gradients = torch.randn(12, 20).bfloat16(), torch.randn(3, 12, 20)

    def updated(box: Box) -> Tensor:
        place = box.slices_in(Box.whole((12, 20)))
        shard = start[place].clone()
        optimizer = AdamW(Weights.of({"w": shard}, {"w": box}, facts, config), OptimConfig(), select())
        for update, gradient in enumerate(gradients, 1):
            optimizer.step({"w": gradient[place].clone()}, 1e-3, update, 1.0)
        return shard

    whole = updated(Box.whole((12, 20)))
    for box in (Box((5, 0), (7, 20)), Box((0, 3), (12, 9))):
        assert torch.equal(updated(box), whole[box.slices_in(Box.whole((12, 20)))])
    assert not torch.equal(whole, start)
