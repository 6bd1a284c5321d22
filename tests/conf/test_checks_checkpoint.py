"""Initial weights are looked for at launch: a wait in the queue would be the price of a wrong path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stoker.conf.checks import check
from stoker.conf.compose import compose
from stoker.conf.schema import Config, DataSource


def told(init_from: str) -> list[str]:
    config = Config()
    config.data.sources = [DataSource("/data/a")]
    config.model.init_from = init_from
    return [str(p) for p in check(config) if p.field.startswith("model.")]


def test_initial_weights_must_be_there(tmp_path: Path) -> None:
    assert told("hf:/nowhere") == [
        "model.init_from=hf:/nowhere: no such directory; expected hf:DIR, or the directory of a checkpoint"
    ]
    assert told("hf: ") == ["model.init_from='hf: ': expected hf:DIR, or the directory of a checkpoint"]
    assert told(f"hf:{tmp_path}") == [f"model.init_from=hf:{tmp_path}: no config.json in it"]
    (tmp_path / "config.json").touch()
    assert told(f"hf:{tmp_path}") == []
    assert told(str(tmp_path)) == [
        f"model.init_from={tmp_path}: no manifest.json in it; for weights of Hugging Face write hf:{tmp_path}"
    ]
    (tmp_path / "manifest.json").touch()
    assert told(str(tmp_path)) == []
    assert told(f"hf:{tmp_path}") == [
        f"model.init_from=hf:{tmp_path}: no model.safetensors in it; "
        f"a checkpoint of stoker's is named without hf: {tmp_path}"
    ]
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "run.json").touch()
    assert told(str(tmp_path)) == [
        f"model.init_from={tmp_path}: no manifest.json in it; "
        f"of a run name one checkpoint: {tmp_path}/checkpoints/step-..."
    ]


@pytest.mark.parametrize(
    ("prefix", "file", "content"),
    [
        ("hf:", "config.json", {"vocab_size": 50257, "n_embd": 256, "n_layer": 4, "n_head": 8}),
        ("hf:", "config.json", {"vocab_size": 50257, "hidden_size": 256, "num_hidden_layers": 4}),
        ("", "manifest.json", {"state": {"weights_only": True, "model": {"vocab_size": 50257, "num_layers": 4}}}),
        ("", "manifest.json", {"state": {"settings": {"model.vocab_size": 50257, "train.steps": 4}}}),
    ],
)
def test_sizes_of_initial_weights_are_those_of_the_model(
    prefix: str, file: str, content: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    assert told(f"{prefix}{tmp_path}") == [
        f"model.vocab_size=4096: the weights of model.init_from={prefix}{tmp_path} have 50257"
    ]


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_a_path_of_initial_weights_is_made_absolute(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = compose([f"model.init_from={prefix}some/where", "data.sources=[{prefix: /x}]"]).config.model.init_from
    assert chosen == f"{prefix}{tmp_path}/some/where"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"staging_mb": 15},
            ["checkpoint.staging_mb=15: expected at least 16, or 0 for two whole copies where they fit"],
        ),
        ({"staging_mb": 16}, []),
        (
            {"keep_best": 1},
            [
                "checkpoint.keep_best=1: which are best is known from validation; "
                "set train.eval_interval and data.validation_tokens"
            ],
        ),
        ({"stripes": -2}, ["checkpoint.stripes=-2: expected a count, -1 for all targets, 0 for by size"]),
        ({"stripes": -1}, []),
        ({"minutes": -1.0}, ["checkpoint.minutes=-1.0: expected 0 or a positive number"]),
        ({"storage": "ckpt"}, ["checkpoint.storage=ckpt: expected an absolute path, or s3://BUCKET/PREFIX"]),
        ({"storage": "s3://B/x"}, ["checkpoint.storage=s3://B/x: expected an absolute path, or s3://BUCKET/PREFIX"]),
        ({"storage": "s3://bucket"}, []),
        ({"local": "x"}, ["checkpoint.local=x: expected an absolute path: a directory on each node's own disk"]),
        ({"interval": 0, "minutes": 30.0}, []),
        (
            {"interval": 0},
            [
                "checkpoint.interval=0: with resilience.continuation=requeue: a stop without warning starts again at "
                "step 0; set an interval"
            ],
        ),
    ],
)
def test_settings_of_checkpoints(settings: dict[str, Any], expected: list[str]) -> None:
    config = Config()
    config.data.sources = [DataSource("/data/a")]
    for name, value in settings.items():
        setattr(config.checkpoint, name, value)
    assert [f"{p.field}={p.value}: {p.message}" for p in check(config) if p.field.startswith("checkpoint.")] == expected
