"""Rotary frequencies against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stoker.conf.schema import ModelConfig, Positions, RopeScaling
from stoker.train.model.rotary import Rotary, inverse_frequencies, kind_of
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SCALED: list[dict[str, Any]] = [
    {"rope_scaling": RopeScaling.linear, "rope_factor": 8.0, "rope_theta": 1e6},
    {"rope_scaling": RopeScaling.llama3, "rope_factor": 8.0, "rope_theta": 5e5},
    {
        "rope_scaling": RopeScaling.llama3,
        "rope_factor": 32.0,
        "rope_low_freq_factor": 2.0,
        "rope_high_freq_factor": 9.0,
        "rope_original_length": 1024,
    },
    {"rope_scaling": RopeScaling.yarn, "rope_factor": 4.0, "rope_theta": 1e6, "rope_original_length": 32768},
    {"rope_scaling": RopeScaling.yarn, "rope_factor": 40.0, "rope_beta_fast": 16.0, "rope_original_length": 64},
    {"rope_scaling": RopeScaling.yarn, "rope_factor": 2.0, "rope_beta_slow": 31.0, "rope_original_length": 4096},
]


def theirs(config: ModelConfig) -> tuple[torch.Tensor, float]:
    kind = config.rope_scaling.value
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": config.rope_theta, "factor": config.rope_factor}
    if kind != "linear":
        parameters["original_max_position_embeddings"] = config.rope_original_length
    if kind == "llama3":
        parameters["low_freq_factor"] = config.rope_low_freq_factor
        parameters["high_freq_factor"] = config.rope_high_freq_factor
    if kind == "yarn":
        parameters |= {"beta_fast": config.rope_beta_fast, "beta_slow": config.rope_beta_slow}
    settings = LlamaConfig(head_dim=config.head_dim, rope_parameters=parameters, max_position_embeddings=131072)
    return ROPE_INIT_FUNCTIONS[kind](settings, torch.device("cpu"))


@pytest.mark.parametrize("fields", SCALED, ids=str)
def test_scaled_frequencies_are_those_of_transformers(fields: dict[str, Any]) -> None:
    config = ModelConfig(head_dim=128, **fields)
    found, factor = inverse_frequencies(config)
    expected, expected_factor = theirs(config)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)
    plain = inverse_frequencies(ModelConfig(head_dim=128, rope_theta=config.rope_theta))[0]
    assert not torch.allclose(found, plain, rtol=1e-3, atol=0)


def test_plain_frequencies_are_powers_of_the_base() -> None:
    found, factor = inverse_frequencies(ModelConfig(head_dim=8, rope_theta=10000.0))
    assert found.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert factor == 1.0


def test_layers_with_a_window_have_a_base_of_their_own_and_are_not_scaled() -> None:
    config = ModelConfig(head_dim=4, num_layers=3, rope_theta=1e6, rope_theta_local=1e4, rope_factor=8.0)
    config.rope_scaling, config.sliding_window, config.global_every = RopeScaling.linear, 16, 3
    assert [kind_of(config, layer) for layer in range(3)] == [1, 1, 0]
    wide, local = (r.cos_sin[0] for r in Rotary(config).rotations(torch.tensor([[0, 1]]), torch.float64))
    assert wide[0, 1].acos().tolist() == pytest.approx([0.125, 0.000125], rel=1e-4)
    assert local[0, 1].acos().tolist() == pytest.approx([1.0, 0.01], rel=1e-4)


def test_one_table_serves_all_layers_where_nothing_tells_them_apart() -> None:
    config = ModelConfig(num_layers=4, sliding_window=16, global_every=2)
    assert [kind_of(config, layer) for layer in range(4)] == [0, 0, 0, 0]
    assert len(Rotary(config).rotations(torch.zeros(1, 2, dtype=torch.int64), torch.float32)) == 1


def test_learned_positions_turn_nothing() -> None:
    config = ModelConfig(positions=Positions.learned, max_positions=8)
    assert kind_of(config, 0) is None
    assert Rotary(config).rotations(torch.zeros(1, 2, dtype=torch.int64), torch.float32) == []
