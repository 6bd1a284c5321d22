"""Each family of published models against transformers: logits, loss and every gradient of a small random one.

Weights go there by an export and gradients come back by the reader of imports, so those are under test too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_models import build, exported, relative, whole_weights
from stoker.conf.schema import Activation, Balance, ModelConfig, Norm, NormOrder, Positions, QkNorm, RopeScaling
from stoker.kernels import select
from stoker.train.compile import compile_blocks
from stoker.train.data.dataset import Batch
from stoker.train.hf.config import differences, read_config
from stoker.train.model import whole_model
from stoker.train.params import decoder_table

VOCABULARY, ROWS, LENGTH = 61, 2, 24

BASE = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=48,
    norm_eps=1e-6,
    init_std=0.2,  # so large that scores are far from equal
)
# What all of transformers' configurations but GPT-2's call the same.
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,  # else its embedding has no gradient
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Family:
    """Our configuration and theirs. `matters`: fields whose change must show in the logits."""

    ours: ModelConfig
    theirs: Callable[[], Any]
    matters: dict[str, Any] = field(default_factory=dict)


def scaled(kind: str, theta: float, **parameters: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **parameters}


def llama() -> Any:
    # The original context is so short that frequencies of all three ranges are among the eight.
    rope = scaled(
        "llama3",
        500.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    config = transformers.LlamaConfig(**COMMON, num_hidden_layers=2, head_dim=16, rope_parameters=rope)
    return transformers.LlamaForCausalLM(config)


def mistral() -> Any:
    config = transformers.MistralConfig(
        **COMMON, num_hidden_layers=2, head_dim=16, sliding_window=7, rope_parameters=scaled("default", 10000.0)
    )
    return transformers.MistralForCausalLM(config)


def qwen2() -> Any:
    config = transformers.Qwen2Config(**COMMON, num_hidden_layers=2, rope_parameters=scaled("default", 1e6))
    return transformers.Qwen2ForCausalLM(config)


def qwen3() -> Any:
    rope = scaled("yarn", 1e4, factor=4.0, original_max_position_embeddings=2048)
    config = transformers.Qwen3Config(
        **COMMON, num_hidden_layers=2, head_dim=16, rope_parameters=rope, max_position_embeddings=8192
    )
    return transformers.Qwen3ForCausalLM(config)


def olmo2() -> Any:
    config = transformers.Olmo2Config(**COMMON, num_hidden_layers=2, rope_parameters=scaled("default", 5e5))
    return transformers.Olmo2ForCausalLM(config)


def gemma2() -> Any:
    config = transformers.Gemma2Config(
        **COMMON,
        num_hidden_layers=2,
        head_dim=16,
        query_pre_attn_scalar=25,
        sliding_window=7,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        rope_parameters=scaled("default", 10000.0),
    )
    return transformers.Gemma2ForCausalLM(config)


def gemma3() -> Any:
    rope = {"full_attention": scaled("linear", 1000.0, factor=8.0), "sliding_attention": scaled("default", 100.0)}
    config = transformers.Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=3,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=7,
        sliding_window_pattern=3,
        rope_parameters=rope,
    )
    return transformers.Gemma3ForCausalLM(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **COMMON,
        num_hidden_layers=2,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        experts_implementation="eager",
        sliding_window=None,
        rope_parameters=scaled("default", 10000.0),
    )
    return transformers.MixtralForCausalLM(config)


def qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        **COMMON,
        num_hidden_layers=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        experts_implementation="eager",
        rope_parameters=scaled("default", 10000.0),
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=40,
        n_inner=48,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)


GEMMA = replace(
    BASE,
    activation=Activation.geglu,
    norm_order=NormOrder.both,
    norm_offset=1.0,
    sliding_window=7,
    embedding_scale=32**0.5,
    tied_embeddings=True,
)
FAMILIES = {
    "llama 3": Family(
        replace(BASE, rope_theta=500.0, rope_scaling=RopeScaling.llama3, rope_factor=8.0, rope_original_length=64),
        llama,
        matters={"rope_scaling": RopeScaling.none, "rope_high_freq_factor": 2.0, "activation": Activation.geglu},
    ),
    "mistral": Family(replace(BASE, sliding_window=7), mistral, matters={"sliding_window": 8}),
    "qwen2": Family(replace(BASE, head_dim=None, qkv_bias=True, rope_theta=1e6), qwen2, matters={"rope_theta": 1e4}),
    "qwen3 with yarn": Family(
        replace(BASE, qk_norm=QkNorm.head, rope_scaling=RopeScaling.yarn, rope_factor=4.0, rope_original_length=2048),
        qwen3,
        matters={"rope_scaling": RopeScaling.linear, "rope_beta_fast": 4.0},
    ),
    "olmo2": Family(
        replace(BASE, head_dim=None, norm_order=NormOrder.post, qk_norm=QkNorm.full, rope_theta=5e5),
        olmo2,
    ),
    "gemma2": Family(
        replace(GEMMA, global_every=2, attention_scale=0.2, attention_softcap=2.0, logit_softcap=3.0),
        gemma2,
        matters={
            "global_every": 0,
            "attention_scale": None,
            "attention_softcap": 0.0,
            "logit_softcap": 0.0,
            "embedding_scale": 1.0,
            "norm_offset": 0.0,
            "activation": Activation.swiglu,
        },
    ),
    "gemma3": Family(
        replace(
            GEMMA,
            num_layers=3,
            global_every=3,
            qk_norm=QkNorm.head,
            rope_theta=1000.0,
            rope_theta_local=100.0,
            rope_scaling=RopeScaling.linear,
            rope_factor=8.0,
        ),
        gemma3,
        matters={"rope_theta_local": None, "rope_factor": 1.0, "global_every": 2},
    ),
    # Balance terms are off: they are defined otherwise.
    "mixtral": Family(
        replace(BASE, num_experts=6, experts_per_token=2, balance=Balance.none),
        mixtral,
        matters={"experts_per_token": 3, "router_normalize": False},
    ),
    "qwen3-moe": Family(
        replace(
            BASE,
            qk_norm=QkNorm.head,
            num_experts=6,
            experts_per_token=3,
            expert_ffn_size=24,
            router_normalize=False,
            balance=Balance.none,
        ),
        qwen3_moe,
        matters={"router_normalize": True},
    ),
    "gpt2": Family(
        replace(
            BASE,
            num_kv_heads=4,
            head_dim=None,
            activation=Activation.gelu,
            norm=Norm.layernorm,
            norm_eps=1e-5,
            positions=Positions.learned,
            max_positions=40,
            qkv_bias=True,
            linear_bias=True,
            tied_embeddings=True,
        ),
        gpt2,
        matters={"norm_eps": 1e-2},
    ),
}


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))
    targets[1, 3:9] = -100
    return Batch(tokens, targets, torch.arange(LENGTH).repeat(ROWS, 1), None, torch.arange(ROWS))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_what_transformers_makes_of_it(name: str, tmp_path: Path) -> None:
    family, batch = FAMILIES[name], make_batch()
    model, table = build(family.ours), decoder_table(family.ours)
    family.theirs().save_pretrained(tmp_path / "described")
    assert differences(family.ours, read_config(tmp_path / "described").model) == {}
    theirs = exported(model, family.ours, tmp_path / "exported")
    parameters = dict(theirs.named_parameters())
    assert table.numel == sum(p.numel() for p in parameters.values())
    logits = theirs(batch.tokens).logits
    found = model.logits(batch).detach()
    assert relative(found, logits.detach()) < 1e-5
    sums, loss = model(batch), F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    assert float(sums.loss) == pytest.approx(float(loss.detach()), rel=1e-6)
    sums.objective.backward()
    loss.backward()
    # Not by its own norm alone: a bias of the keys has no influence without rotation, and its gradient is noise.
    norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm()
    expected = whole_weights(gradients_as_weights(theirs, tmp_path / "gradients"))
    for facts in table.owned():
        gradient = expected[facts.name]
        error = (table.local(model, facts.name).grad - gradient).norm() / torch.maximum(gradient.norm(), norm / 1000)
        assert float(error) < 1e-5, facts.name
    for changed, value in family.matters.items():
        other = whole_model(replace(family.ours, **{changed: value}), select())
        other.load_state_dict(model.state_dict())
        assert relative(other.logits(batch).detach(), found) > 1e-3, changed


def gradients_as_weights(theirs: Any, directory: Path) -> Path:
    """A directory whose weights are the gradients."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(directory)
    return directory


@pytest.mark.full
@pytest.mark.parametrize("name", ["olmo2", "gemma3", "gpt2"])
def test_blocks_of_a_family_compile_as_graphs_without_breaks(name: str) -> None:
    family, batch = FAMILIES[name], make_batch()
    eager, compiled = build(family.ours), build(family.ours)
    compile_blocks(compiled.blocks.values(), backend="aot_eager")
    for model in (eager, compiled):
        model(batch).objective.backward()
    torch._dynamo.reset()
    for facts in decoder_table(family.ours).owned():
        expected = eager.get_parameter(facts.name).grad
        torch.testing.assert_close(compiled.get_parameter(facts.name).grad, expected, rtol=1e-4, atol=1e-5)
