"""Each family of published models against transformers: logits, loss and every gradient of a small random one.

The names of transformers' parameters are kept here; `view` gives the part of one that is a parameter of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from stoker.conf.schema import Activation, Balance, ModelConfig, Norm, NormOrder, Positions, QkNorm, RopeScaling
from stoker.kernels import select
from stoker.train.compile import compile_blocks
from stoker.train.data.dataset import Batch
from stoker.train.grid import single
from stoker.train.init import initialize
from stoker.train.model import Decoder, whole_model
from stoker.train.params import decoder_table
from torch import Tensor

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
NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention.norm": "input_layernorm.weight",
    "attention.wq": "self_attn.q_proj.weight",
    "attention.wk": "self_attn.k_proj.weight",
    "attention.wv": "self_attn.v_proj.weight",
    "attention.wq_bias": "self_attn.q_proj.bias",
    "attention.wk_bias": "self_attn.k_proj.bias",
    "attention.wv_bias": "self_attn.v_proj.bias",
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
    "attention.wo": "self_attn.o_proj.weight",
    "ffn.norm": "post_attention_layernorm.weight",
    "ffn.gate": "mlp.gate_proj.weight",
    "ffn.up": "mlp.up_proj.weight",
    "ffn.down": "mlp.down_proj.weight",
}
POST_NORMS = {
    "attention.post_norm": "post_attention_layernorm.weight",
    "ffn.norm": "pre_feedforward_layernorm.weight",
    "ffn.post_norm": "post_feedforward_layernorm.weight",
}


def split_name(name: str) -> tuple[str, str]:
    """("3", "attention.wq") of blocks.3.attention.wq; ("", name) of what is no block's."""
    if not name.startswith("blocks."):
        return "", name
    _, layer, rest = name.split(".", 2)
    return layer, rest


def view_llama(name: str, theirs: Mapping[str, Tensor], **names: str) -> Tensor:
    layer, rest = split_name(name)
    found = {**NAMES, **names}[rest]
    return theirs[f"model.layers.{layer}.{found}" if layer else found]


def view_post_norm(name: str, theirs: Mapping[str, Tensor]) -> Tensor:
    return view_llama(name, theirs, **POST_NORMS)


def view_experts(name: str, theirs: Mapping[str, Tensor]) -> Tensor:
    """Gate and up projections of all experts are one tensor."""
    layer, rest = split_name(name)
    experts = f"model.layers.{layer}.mlp.experts"
    if rest == "ffn.router":
        return theirs[f"model.layers.{layer}.mlp.gate.weight"]
    if rest == "ffn.experts.down":
        return theirs[f"{experts}.down_proj"]
    if rest.startswith("ffn.experts."):
        return theirs[f"{experts}.gate_up_proj"].chunk(2, 1)[rest == "ffn.experts.up"]
    return view_llama(name, theirs)


GPT2_NAMES = {
    "embedding": "wte.weight",
    "positions": "wpe.weight",
    "norm": "ln_f.weight",
    "norm_bias": "ln_f.bias",
    "attention.norm": "ln_1.weight",
    "attention.norm_bias": "ln_1.bias",
    "attention.wo": "attn.c_proj.weight",
    "attention.wo_bias": "attn.c_proj.bias",
    "ffn.norm": "ln_2.weight",
    "ffn.norm_bias": "ln_2.bias",
    "ffn.up": "mlp.c_fc.weight",
    "ffn.up_bias": "mlp.c_fc.bias",
    "ffn.down": "mlp.c_proj.weight",
    "ffn.down_bias": "mlp.c_proj.bias",
}


def view_gpt2(name: str, theirs: Mapping[str, Tensor]) -> Tensor:
    """Its matrices are [in, out], and those to queries, keys and values one."""
    layer, rest = split_name(name)
    prefix = f"transformer.h.{layer}." if layer else "transformer."
    if rest.startswith(("attention.wq", "attention.wk", "attention.wv")):
        kind = "bias" if rest.endswith("_bias") else "weight"
        tensor = theirs[f"{prefix}attn.c_attn.{kind}"].chunk(3, -1)["qkv".index(rest.removesuffix("_bias")[-1])]
    else:
        tensor = theirs[prefix + GPT2_NAMES[rest]]
    return tensor.t() if tensor.dim() == 2 and layer else tensor


@dataclass(frozen=True)
class Family:
    """Our configuration and theirs. `matters`: fields whose change must show in the logits."""

    ours: ModelConfig
    theirs: Callable[[], Any]
    view: Callable[[str, Mapping[str, Tensor]], Tensor] = view_llama
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
        view_post_norm,
    ),
    "gemma2": Family(
        replace(GEMMA, global_every=2, attention_scale=0.2, attention_softcap=2.0, logit_softcap=3.0),
        gemma2,
        view_post_norm,
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
        view_post_norm,
        matters={"rope_theta_local": None, "rope_factor": 1.0, "global_every": 2},
    ),
    # Balance terms are off: they are defined otherwise.
    "mixtral": Family(
        replace(BASE, num_experts=6, experts_per_token=2, balance=Balance.none),
        mixtral,
        view_experts,
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
        view_experts,
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
        view_gpt2,
        matters={"norm_eps": 1e-2},
    ),
}


def build(config: ModelConfig) -> Decoder:
    """With norms and biases away from their initial values, so that a missing or swapped one shows."""
    model, table = whole_model(config, select()), decoder_table(config)
    initialize(model, table, single(), seed=3)
    torch.manual_seed(5)
    with torch.no_grad():
        for facts in table.owned():
            if facts.init_std == 0.0:
                table.local(model, facts.name).add_(torch.empty(facts.shape).uniform_(-0.4, 0.4))
    return model


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))
    targets[1, 3:9] = -100
    return Batch(tokens, targets, torch.arange(LENGTH).repeat(ROWS, 1), None, torch.arange(ROWS))


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_what_transformers_makes_of_it(name: str) -> None:
    family, batch = FAMILIES[name], make_batch()
    model, table, theirs = build(family.ours), decoder_table(family.ours), family.theirs().eval()
    parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for facts in table.owned():
            family.view(facts.name, parameters).copy_(table.local(model, facts.name))
    assert table.numel == sum(p.numel() for p in parameters.values())
    logits = theirs(batch.tokens).logits
    found = model.logits(batch).detach()
    assert relative(found, logits.detach()) < 1e-5
    sums, loss = model(batch), F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    assert float(sums.loss) == pytest.approx(float(loss.detach()), rel=1e-6)
    sums.objective.backward()
    loss.backward()
    gradients = {name: p.grad for name, p in parameters.items()}
    # Not by its own norm alone: a bias of the keys has no influence without rotation, and its gradient is noise.
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    for facts in table.owned():
        expected = family.view(facts.name, gradients)
        error = (table.local(model, facts.name).grad - expected).norm() / torch.maximum(expected.norm(), norm / 1000)
        assert float(error) < 1e-5, facts.name
    for changed, value in family.matters.items():
        other = whole_model(replace(family.ours, **{changed: value}), select())
        other.load_state_dict(model.state_dict())
        assert relative(other.logits(batch).detach(), found) > 1e-3, changed


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
