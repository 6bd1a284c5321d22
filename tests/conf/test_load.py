"""config.json and back: strict, complete, and without Hydra."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stoker.conf.compose import DIRECTORY, compose
from stoker.conf.load import from_plain, load, to_plain
from stoker.conf.problems import ConfigError
from stoker.conf.schema import Config, DataSource, Schedule
from stoker.conf.yaml_files import choices


@pytest.mark.parametrize("experiment", choices([DIRECTORY])["experiment"])
def test_an_experiment_survives_config_json(tmp_path: Path, experiment: str) -> None:
    composed = compose([f"experiment={experiment}", "cluster.env.A=\u00fc'\"", "model.head_dim=32"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(composed.plain))
    assert load(file) == composed.config
    assert to_plain(load(file)) == composed.plain


def test_values_come_back_with_their_types(tmp_path: Path) -> None:
    plain = to_plain(Config(data=Config().data))
    plain["optim"] |= {"schedule": "wsd", "lr": 1}
    plain["data"]["sources"] = [{"prefix": "/a", "weight": 2, "name": None}]
    config = from_plain(plain)
    assert config.optim.schedule is Schedule.wsd
    assert (type(config.optim.lr), config.optim.lr) == (float, 1.0)
    assert config.data.sources == [DataSource("/a", 2.0, None)]


def test_everything_wrong_with_a_file_is_told(tmp_path: Path) -> None:
    plain: dict[str, Any] = to_plain(Config())
    del plain["seed"], plain["optim"]["eps"]
    plain["train"]["steps"] = "3"
    plain["train"]["global_batch"] = True
    plain["optim"]["lrr"] = 1
    plain["cluster"]["env"] = {"A": 1}
    plain["cluster"]["kind"] = "slrum"
    plain["data"]["sources"] = [{"prefix": None, "weight": 1.0, "name": None}]
    plain["tracking"] = []
    file = tmp_path / "config.json"
    file.write_text(json.dumps(plain))
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert [str(problem).removeprefix(f"{file}: ") for problem in caught.value.problems] == [
        "train.steps=3: expected an integer",
        "train.global_batch=true: expected an integer",
        "data.sources.0.prefix=null: expected a string",
        "optim.lrr: unknown key; did you mean optim.lr?",
        "optim.eps: missing; every field must be there",
        "tracking=[]: expected a mapping with the keys mode, project, entity, group, tags, interval",
        "cluster.kind=slrum: expected one of slurm, local; nearest: slurm",
        "cluster.env.A=1: expected a string; put it in quotes",
        "seed: missing; every field must be there",
    ]


NOT_JSON = {
    "{": "Expecting property name",
    '{"seed": NaN}': "NaN is no number in JSON",
    '{"seed": 1, "seed": 2}': "key 'seed' is there twice",
    "\xff": "not a configuration in JSON",
    "[]": "config=[]: expected a mapping with the keys name,",
}


@pytest.mark.parametrize("text", NOT_JSON)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load(file)
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"{file}: config")
    assert NOT_JSON[text] in str(problem)


def test_a_file_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "config.json")
