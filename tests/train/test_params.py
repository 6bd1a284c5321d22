"""The parameter table, and initial values that depend on seed and name alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stoker.conf.compose import compose
from stoker.conf.schema import ModelConfig, NormOrder, QkNorm
from stoker.kernels import select
from stoker.train.box import Box
from stoker.train.grid import single
from stoker.train.init import initial_value, initialize
from stoker.train.linear import WeightGradients
from stoker.train.model import Decoder, Parts, whole_model
from stoker.train.parallel.stages import StageSpec
from stoker.train.params import ParamFacts, ParamTable, Role, decoder_table

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48)


def build(config: ModelConfig, seed: int = 0) -> Decoder:
    model = whole_model(config, select())
    initialize(model, decoder_table(config), single(), seed)
    return model


def test_counts_are_those_of_the_benchmark_model() -> None:
    config = ModelConfig(vocab_size=8192, hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=4, ffn_size=768)
    assert decoder_table(config).numel == 10_490_112


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
        ("qwen2-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("olmo2-7b", 7_298_617_344),
        ("gemma2-9b", 9_241_705_984),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt2", 124_439_808),
    ],
)
def test_published_models_have_their_published_size(name: str, published: int) -> None:
    assert decoder_table(compose([f"model={name}"]).config.model).numel == published


def test_gemma3_has_the_size_of_its_report_without_embedding() -> None:
    table = decoder_table(compose(["model=gemma3-4b"]).config.model)
    assert round((table.numel - table["embedding"].numel) / 1e6) == 3209


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_norm", [QkNorm.none, QkNorm.head])
def test_table_and_model_agree(tied: bool, qk_norm: QkNorm) -> None:
    config = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, tied_embeddings=tied, qk_norm=qk_norm)
    decoder_table(config).check(build(config), single())


def test_a_tied_head_is_the_embedding_and_counted_once() -> None:
    config = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, tied_embeddings=True)
    table, model = decoder_table(config), build(config)
    assert table.local(model, "head") is model.embedding
    assert "head" not in {f.name for f in table.owned()}
    assert table.uses("embedding") == 2
    assert table.uses("norm") == 1


def test_norms_do_not_decay() -> None:
    undecayed = {f.name for f in decoder_table(CONFIG) if not f.is_decayed}
    assert undecayed == {"norm"} | {f"blocks.{i}.{part}.norm" for i in (0, 1) for part in ("attention", "ffn")}


def test_biases_start_at_zero_do_not_decay_and_are_cut_as_outputs_are() -> None:
    config = compose(["model=gpt2", "model.num_layers=1", "model.hidden_size=96"]).config.model
    biases = {f.name: f for f in decoder_table(config, sequence=True) if f.role is Role.BIAS}
    attention, ffn = "blocks.0.attention", "blocks.0.ffn"
    assert {name: (f.shape, f.shard_dim, f.copies_axis, f.partial_over) for name, f in biases.items()} == {
        f"{attention}.norm_bias": ((96,), None, None, "tensor"),
        f"{attention}.wq_bias": ((96,), 0, None, None),
        f"{attention}.wk_bias": ((96,), 0, "kv", "kv"),
        f"{attention}.wv_bias": ((96,), 0, "kv", "kv"),
        f"{attention}.wo_bias": ((96,), None, None, "tensor"),
        f"{ffn}.norm_bias": ((96,), None, None, "tensor"),
        f"{ffn}.up_bias": ((3072,), 0, None, None),
        f"{ffn}.down_bias": ((96,), None, None, "tensor"),
        "norm_bias": ((96,), None, None, "tensor"),
    }
    assert not any(f.is_decayed or initial_value(f, 0).any() for f in biases.values())
    # Without sequence parallelism every rank sees all tokens of the stream, and so whole gradients.
    assert decoder_table(config)["norm_bias"].partial_over is None


def test_a_norm_of_all_heads_is_cut_as_the_heads_are() -> None:
    config = replace(CONFIG, qk_norm=QkNorm.full, norm_order=NormOrder.both)
    table = decoder_table(config)
    q_norm, k_norm = table["blocks.1.attention.q_norm"], table["blocks.1.attention.k_norm"]
    assert (q_norm.shape, q_norm.shard_axis, q_norm.unit, q_norm.partial_over) == ((32,), "tensor", 8, None)
    assert (k_norm.shape, k_norm.shard_axis, k_norm.unit, k_norm.partial_over) == ((16,), "tensor", 8, "kv")
    assert {f.name for f in table if f.role is Role.NORM and f.layer == 0} == {
        f"blocks.0.{name}"
        for name in (
            "attention.norm",
            "attention.q_norm",
            "attention.k_norm",
            "attention.post_norm",
            "ffn.norm",
            "ffn.post_norm",
        )
    }


def test_a_norm_with_an_offset_starts_at_what_is_left_to_one() -> None:
    config = replace(CONFIG, norm_offset=1.0, qk_norm=QkNorm.head)
    model = build(config)
    norms = [f.name for f in decoder_table(config) if f.role is Role.NORM]
    assert len(norms) == 9
    assert not any(model.get_parameter(name).any() for name in norms)


def test_box_of_a_cut_parameter_is_this_ranks_rows() -> None:
    table = ParamTable([ParamFacts("w", (6, 4), Role.MATRIX, 1.0, shard_dim=0, shard_axis="data")])
    assert table.box("w", single()) == Box((0, 0), (6, 4))


def test_initial_values_are_a_function_of_seed_and_name() -> None:
    shallow = build(ModelConfig(**{**vars(CONFIG), "num_layers": 1}))
    deep = build(CONFIG)
    # The residual projections differ by their scale only, since it depends on the depth.
    assert torch.equal(shallow.blocks["0"].attention.wq, deep.blocks["0"].attention.wq)
    assert not torch.equal(deep.blocks["0"].attention.wq, deep.blocks["1"].attention.wq)
    assert not torch.equal(build(CONFIG, seed=1).embedding, deep.embedding)


def test_initial_values_stay_what_they_were() -> None:
    """Golden: a change here changes every run's start."""
    value = initial_value(ParamFacts("blocks.0.attention.wq", (4, 8), Role.MATRIX, 1.0), seed=5)
    assert value[0, :4].tolist() == pytest.approx([1.1875601, -1.5800276, -0.2281584, 1.4586132], abs=1e-6)


def test_residual_projections_start_smaller_by_the_depth() -> None:
    std = {f.name: f.init_std for f in decoder_table(ModelConfig(num_layers=8, init_std=0.02))}
    assert std["blocks.7.attention.wo"] == std["blocks.0.ffn.down"] == pytest.approx(0.005)
    assert std["blocks.0.attention.wq"] == std["embedding"] == std["head"] == 0.02


def test_norms_start_at_one_and_matrices_with_their_deviation() -> None:
    model = build(ModelConfig(vocab_size=512, hidden_size=128, num_layers=1, init_std=0.05))
    assert torch.equal(model.norm, torch.ones(128))
    assert float(model.embedding.detach().std()) == pytest.approx(0.05, rel=0.02)
    assert abs(float(model.embedding.detach().mean())) < 1e-3


def test_a_stage_has_its_blocks_under_their_global_names() -> None:
    stage = Decoder(Parts.of(CONFIG, select(), WeightGradients()), StageSpec(1, (1,), False, False))
    assert "blocks.1.ffn.gate" in dict(stage.named_parameters())
    assert all(name.startswith("blocks.1.") for name, _ in stage.named_parameters())
