"""The mixture of experts against a plain formulation: every expert on every token, masked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stoker.conf.schema import Balance, ModelConfig, Router
from stoker.kernels import select
from stoker.train.linear import WeightGradients
from stoker.train.model import Parts
from stoker.train.model.forward_pass import TokenRows
from stoker.train.model.moe import MixtureOfExperts, moved_bias
from torch import Tensor

CONFIG = ModelConfig(
    hidden_size=12, ffn_size=10, num_experts=6, experts_per_token=2, balance_weight=0.1, router_z_loss=0.01
)
LENGTH = 8


def build(config: ModelConfig, queue: WeightGradients | None = None, dtype: torch.dtype = torch.float64) -> Any:
    moe = MixtureOfExperts(Parts.of(config, select(), queue or WeightGradients(), dtype=dtype), layer=0)
    generator = torch.Generator().manual_seed(3)
    for parameter in moe.parameters():
        parameter.data = torch.empty(parameter.shape).normal_(0, 0.5, generator=generator).to(dtype)
    return moe


def token_rows(sequences: int, padding: tuple[int, ...] = ()) -> TokenRows:
    sequence_T = torch.arange(sequences).repeat_interleave(LENGTH)
    is_real_T = None if not padding else ~torch.isin(sequence_T, torch.tensor(padding))
    return TokenRows(sequence_T, is_real_T, sequences, LENGTH)


def plain(config: ModelConfig, weights: dict[str, Tensor], x_TD: Tensor, bias_E: Tensor | None = None) -> Any:
    """(outputs, auxiliary terms) of whole sequences, none of them padding, in the papers' formulas."""
    logits = x_TD @ weights["router"].T
    scores = logits.softmax(-1) if config.router is Router.softmax else logits.sigmoid()
    ranking = scores if bias_E is None else scores + bias_E
    mask = torch.zeros_like(scores).scatter(-1, ranking.topk(config.experts_per_token).indices, 1.0)
    chosen = scores * mask
    if config.router_normalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    each = torch.stack(
        [
            (F.silu(x_TD @ gate.T) * (x_TD @ up.T)) @ down.T
            for gate, up, down in zip(
                weights["experts.gate"], weights["experts.up"], weights["experts.down"], strict=True
            )
        ],
        1,
    )
    y = (each * (chosen * config.router_scale)[..., None]).sum(1)
    shares = (scores / scores.sum(-1, keepdim=True)).unflatten(0, (-1, LENGTH))
    fractions = mask.unflatten(0, (-1, LENGTH)).mean(1) / config.experts_per_token
    balance = config.num_experts * (fractions * shares.mean(1)).sum() * LENGTH
    z = logits.logsumexp(-1).square().sum()
    weight = config.balance_weight if config.balance is Balance.loss else 0.0
    return y, weight * balance + config.router_z_loss * z


FAMILIES = {
    "mixtral": CONFIG,
    "not_normalized": replace(CONFIG, router_normalize=False, experts_per_token=3),
    "deepseek": replace(CONFIG, router=Router.sigmoid, router_scale=2.5),
    "bias": replace(CONFIG, router=Router.sigmoid, balance=Balance.bias),
    "one_of_six": replace(CONFIG, experts_per_token=1, router_normalize=False, balance=Balance.none),
    "narrow_experts": replace(CONFIG, expert_ffn_size=4, router_z_loss=0.0),
}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_outputs_auxiliary_terms_and_gradients_are_those_of_all_experts_masked(config: ModelConfig) -> None:
    moe, scale = build(config), 0.25
    if moe.router_bias is not None:
        moe.router_bias = torch.randn(6)
    x = torch.randn(3 * LENGTH, 12, dtype=torch.float64, requires_grad=True)
    coefficients = torch.randn(3 * LENGTH, 12, dtype=torch.float64)
    weights = {n: p.detach().clone().requires_grad_() for n, p in moe.named_parameters() if n != "norm"}
    y, auxiliary = plain(config, weights, x, moe.router_bias)
    expected = torch.autograd.grad((y * coefficients).sum() + scale * auxiliary, [x, *weights.values()])

    found = moe(x, token_rows(3), scale)
    (found * coefficients).sum().backward()
    torch.testing.assert_close(found, y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(moe.statistics.auxiliary, auxiliary.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(x.grad, expected[0], rtol=1e-10, atol=1e-10)
    for name, gradient in zip(weights, expected[1:], strict=True):
        torch.testing.assert_close(moe.get_parameter(name).grad, gradient, rtol=1e-10, atol=1e-10, msg=name)
    assert int(moe.statistics.load_E.sum()) == 3 * LENGTH * config.experts_per_token


def test_tokens_that_only_fill_up_go_nowhere_and_count_nowhere() -> None:
    x = torch.randn(3 * LENGTH, 12, dtype=torch.float64)
    real = torch.cat([x[:LENGTH], x[2 * LENGTH :]])
    whole, part = build(CONFIG), build(CONFIG)
    x.requires_grad_()
    with_padding = whole(x, token_rows(3, padding=(1,)))
    with_padding.square().sum().backward()
    part(real, token_rows(2)).square().sum().backward()
    assert not with_padding[LENGTH : 2 * LENGTH].any()
    assert not x.grad[LENGTH : 2 * LENGTH].any()
    assert torch.equal(whole.statistics.load_E, part.statistics.load_E)
    torch.testing.assert_close(whole.statistics.auxiliary, part.statistics.auxiliary)
    for name, parameter in part.named_parameters():
        if name != "norm":
            torch.testing.assert_close(whole.get_parameter(name).grad, parameter.grad, rtol=1e-10, atol=1e-10)


def test_a_batch_of_nothing_but_padding_gives_every_parameter_a_gradient_of_zero() -> None:
    moe = build(CONFIG)
    y = moe(torch.randn(LENGTH, 12, dtype=torch.float64, requires_grad=True), token_rows(1, padding=(0,)))
    y.sum().backward()
    assert not y.any()
    assert all(p.grad is not None and not p.grad.any() for n, p in moe.named_parameters() if n != "norm")


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    x = torch.randn(4 * LENGTH, 12, dtype=torch.float64)
    whole, parts = build(CONFIG), build(CONFIG)
    whole(x, token_rows(4), 0.5).sum().backward()
    for part in x.split(2 * LENGTH):
        parts(part, token_rows(2), 0.5).sum().backward()
    torch.testing.assert_close(whole.statistics.auxiliary, parts.statistics.auxiliary, rtol=1e-12, atol=0)
    assert torch.equal(whole.statistics.load_E, parts.statistics.load_E)
    for name, parameter in whole.named_parameters():
        if name != "norm":
            torch.testing.assert_close(parts.get_parameter(name).grad, parameter.grad, rtol=1e-10, atol=1e-10)


def test_an_even_load_costs_the_balance_weight_per_token() -> None:
    moe = build(replace(CONFIG, experts_per_token=6, router_z_loss=0.0))
    moe(torch.randn(2 * LENGTH, 12, dtype=torch.float64, requires_grad=True), token_rows(2)).sum().backward()
    assert float(moe.statistics.auxiliary) == pytest.approx(0.1 * 2 * LENGTH)


def test_evaluation_leaves_no_statistics() -> None:
    moe = build(CONFIG)
    with torch.no_grad():
        moe(torch.randn(LENGTH, 12, dtype=torch.float64), token_rows(1))
    assert not moe.statistics.load_E.any()


def test_deferred_weight_gradients_have_the_same_bits() -> None:
    queue = WeightGradients(is_deferred=True)
    at_once, later = build(CONFIG, dtype=torch.float32), build(CONFIG, queue, torch.float32)
    x = torch.randn(2 * LENGTH, 12)
    for moe in (at_once, later):
        moe(x, token_rows(2)).square().sum().backward()
    assert later.experts.gate.grad is None
    queue.drain()
    for name, parameter in at_once.named_parameters():
        if name != "norm":
            assert torch.equal(later.get_parameter(name).grad, parameter.grad)


def test_the_bias_moves_experts_towards_the_mean_load_and_changes_no_weight() -> None:
    moved = moved_bias(torch.tensor([0.0, 0.5, -0.5, 0.0]), torch.tensor([4, 10, 6, 4]), 0.25)
    assert moved.tolist() == [0.25, 0.25, -0.5, 0.25]
    moe = build(FAMILIES["bias"])
    scores = torch.rand(5, 6, dtype=torch.float64)
    moe.router_bias = torch.tensor([9.0, 0.0, 0.0, 9.0, 0.0, 0.0])
    choice, weights = moe._choose(scores)
    assert sorted(set(choice.flatten().tolist())) == [0, 3]
    chosen = scores.gather(1, choice)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True))


def test_balancing_by_bias_evens_out_the_load() -> None:
    moe = build(FAMILIES["bias"])
    x = torch.randn(32 * LENGTH, 12, dtype=torch.float64) + 0.5
    loads = []
    for _ in range(150):
        moe.statistics.clear()
        moe(x, token_rows(32)).sum().backward()
        loads.append(moe.statistics.load_E.max())
        moe.router_bias = moved_bias(moe.router_bias, moe.statistics.load_E, 0.01)
    mean = 32 * LENGTH * 2 / 6
    assert loads[0] > 1.5 * mean
    assert loads[-1] < 1.1 * mean


def test_the_bias_keeps_float32_in_a_narrow_model() -> None:
    moe = build(FAMILIES["bias"], dtype=torch.bfloat16)
    assert moe.router.dtype == torch.bfloat16
    assert moe.router_bias.dtype == torch.float32
    y = moe(torch.randn(LENGTH, 12, dtype=torch.bfloat16, requires_grad=True), token_rows(1))
    y.sum().backward()
    assert y.dtype == torch.bfloat16


def test_one_kernel_for_all_experts_has_the_orientation_of_ours() -> None:
    """What CUDA takes for bfloat16 (torch._grouped_mm), tried on the CPU, where it exists too."""
    from stoker.train.grouped import grouped_mm
    from stoker.train.parallel.experts import Groups

    groups = Groups((3, 0, 5), torch.tensor([3, 3, 8], dtype=torch.int32))
    x, weight = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(3, 24, 16, dtype=torch.bfloat16)
    ours = grouped_mm(x, weight.transpose(1, 2), groups)
    theirs = torch._grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def transformers_block(family: str, config: ModelConfig) -> Any:
    """(their mixture of experts in float64, attributes of its experts)."""
    import transformers

    common = {"hidden_size": 12, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        settings = transformers.MixtralConfig(intermediate_size=10, num_local_experts=6, **common)
        return MixtralSparseMoeBlock(settings).double()
    if family == "qwen3":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        settings = transformers.Qwen3MoeConfig(
            moe_intermediate_size=10, num_experts=6, norm_topk_prob=config.router_normalize, **common
        )
        return Qwen3MoeSparseMoeBlock(settings).double()
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    settings = transformers.DeepseekV3Config(
        moe_intermediate_size=10, n_routed_experts=6, n_group=1, topk_group=1, routed_scaling_factor=2.5, **common
    )
    return DeepseekV3MoE(settings).double()


@pytest.mark.parametrize("family", ["mixtral", "qwen3", "qwen3_not_normalized", "deepseek"])
def test_outputs_are_those_of_transformers(family: str) -> None:
    config = replace(CONFIG, router_normalize=not family.endswith("not_normalized"))
    if family == "deepseek":
        config = replace(config, router=Router.sigmoid, balance=Balance.bias, router_scale=2.5)
    theirs = transformers_block(family.split("_")[0], config)
    ours = build(config)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router)
        theirs.experts.gate_up_proj.copy_(torch.cat([ours.experts.gate, ours.experts.up], 1))
        theirs.experts.down_proj.copy_(ours.experts.down)
        if family == "deepseek":
            ours.router_bias = torch.randn(6) * 0.1
            theirs.gate.e_score_correction_bias.copy_(ours.router_bias)
            for parameter in theirs.shared_experts.parameters():
                parameter.zero_()
    x = torch.randn(2 * LENGTH, 12, dtype=torch.float64)
    # They form scores in float32.
    torch.testing.assert_close(ours(x, token_rows(2)), theirs(x[None])[0], rtol=1e-5, atol=1e-6)
