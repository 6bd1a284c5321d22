"""Rules between the fields of the model: a golden line for each, and silence for the models that are published."""

from __future__ import annotations

from typing import Any

import pytest
from stoker.conf.checks_model import model_rules
from stoker.conf.compose import DIRECTORY, compose
from stoker.conf.fields import build, lookup
from stoker.conf.problems import Problem
from stoker.conf.schema import Config
from stoker.conf.yaml_files import choices

LEARNED = {"positions": "learned", "max_positions": 512}


def lines(fields: dict[str, Any]) -> list[str]:
    """What is said of the default model with these fields."""
    config, problems = Config(), list[Problem]()
    for name, value in fields.items():
        section, field = (name if "." in name else f"model.{name}").split(".")
        built = build(lookup([section, field]), value, (section, field), problems, complete=False)
        setattr(getattr(config, section), field, built)
    assert problems == []
    return [f"{p.severity[0]} {p}" for p in model_rules(config)]


RULES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"hidden_size": 250}, [
        "e model.hidden_size=250: not a multiple of model.num_heads=8; nearest: 248 or 256, or set model.head_dim",
    ]),
    ({"hidden_size": 8 * 9}, [
        "e model.hidden_size=72: gives heads of 9; rotary embedding turns pairs, so set an even model.head_dim",
    ]),
    ({"hidden_size": 250, "head_dim": 32}, []),
    ({"head_dim": 33}, ["e model.head_dim=33: expected an even number: rotary embedding turns pairs"]),
    ({"num_kv_heads": 3}, ["e model.num_kv_heads=3: does not divide model.num_heads=8; nearest: 2"]),
    ({"sliding_window": 255}, []),
    ({"sliding_window": 256}, [
        "w model.sliding_window=256: has no effect on samples of data.seq_len=256; 0 says the same",
    ]),
    ({"head_dim": 33, **LEARNED}, []),
    ({"norm": "layernorm"}, []),
    ({"norm": "layernorm", "norm_offset": 1}, [
        "e model.norm_offset=1.0: only RMSNorm has an offset; set it to 0 with model.norm=layernorm",
    ]),
    ({"sliding_window": 64, "global_every": 2, "rope_theta_local": 1000}, []),
    ({"global_every": 2}, [
        "w model.global_every=2: has no effect: without model.sliding_window all layers attend to all",
    ]),
    ({"sliding_window": 64, "global_every": 1}, [
        "e model.global_every=1: lets every layer attend to all; set model.sliding_window=0 for that",
    ]),
    ({"sliding_window": 64, "global_every": 5}, [
        "w model.global_every=5: has no effect: there are only model.num_layers=4",
    ]),
    ({"rope_theta_local": 1000}, [
        "e model.rope_theta_local=1000.0: is for layers with a sliding window; set model.sliding_window, or "
        "model.rope_theta instead",
    ]),
    (LEARNED, []),
    ({**LEARNED, "data.seq_len": 513}, [
        "e model.max_positions=512: has no row for every token of a sample; expected at least data.seq_len=513",
    ]),
    ({**LEARNED, "rope_scaling": "linear", "rope_factor": 2}, [
        "e model.rope_scaling=linear: stretches rotary frequencies, which model.positions=learned has not; "
        "set it to none",
    ]),
    ({"max_positions": 512}, [
        "w model.max_positions=512: has no effect: only model.positions=learned has rows of positions",
    ]),
    ({"rope_scaling": "yarn", "rope_factor": 4, "rope_original_length": 4096}, []),
    ({"rope_factor": 4}, [
        "w model.rope_factor=4.0: has no effect: model.rope_scaling=none does not read it, linear or llama3 or yarn "
        "does",
    ]),
    ({"rope_scaling": "yarn", "rope_factor": 4, "rope_low_freq_factor": 2}, [
        "w model.rope_low_freq_factor=2.0: has no effect: model.rope_scaling=yarn does not read it, llama3 does",
    ]),
    ({"rope_scaling": "linear", "rope_factor": 0.5}, [
        "e model.rope_factor=0.5: would shorten the context; expected at least 1",
    ]),
    ({"rope_scaling": "llama3", "rope_factor": 8, "rope_low_freq_factor": 4}, [
        "e model.rope_low_freq_factor=4.0: expected less than model.rope_high_freq_factor=4.0",
    ]),
    ({"rope_scaling": "yarn", "rope_factor": 8, "rope_beta_slow": 32}, [
        "e model.rope_beta_slow=32.0: expected less than model.rope_beta_fast=32.0",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), RULES, ids=lambda value: str(value)[:60])
def test_a_rule_between_fields_of_the_model(fields: dict[str, Any], expected: list[str]) -> None:
    assert lines(fields) == expected


@pytest.mark.parametrize("name", choices([DIRECTORY])["model"])
def test_published_models_are_right(name: str) -> None:
    config = compose([f"model={name}", "data.seq_len=1024"]).config
    assert [str(problem) for problem in model_rules(config) if problem.severity == "error"] == []
