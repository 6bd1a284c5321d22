"""People's own YAML files: found with --config-dir, and checked with the line of each problem."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.conf.compose import DIRECTORY, compose
from stoker.conf.problems import ConfigError
from stoker.conf.yaml_files import choices

MODELS = ", ".join(choices([DIRECTORY])["model"])
GLOBAL = "# @package _global_\n"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory whose name holds what shells, Hydra and OmegaConf each take for something else."""
    directory = tmp_path / "a b's (x)=[1],${HOME}\\ \u00fc"
    directory.mkdir()
    return directory


def write(directory: Path, name: str, text: str) -> Path:
    file = directory / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def problems(directory: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, directory)
    return [str(problem).replace(str(directory), "DIR") for problem in caught.value.problems]


def test_own_files_are_choices_beside_ours(own: Path) -> None:
    experiment = "defaults:\n  - /presets: long\n  - override /model: small\n  - override /cluster: site/big\n"
    write(own, "experiment/mine", GLOBAL + experiment + "optim: {lr: 1e-4}\n")
    write(own, "cluster/site/big", "nodes: 3\nmem: 4096\nenv: {A: 1, B: '1.0'}\ntime: '10:00'\n")
    write(own, "presets/long", GLOBAL + "train:\n  steps: 9\n")
    config = compose(["experiment=mine"], own).config
    assert (config.model.num_layers, config.optim.lr, config.train.steps) == (8, 0.0001, 9)
    assert (config.cluster.nodes, config.cluster.mem, config.cluster.time) == (3, "4096", "10:00")
    assert config.cluster.env == {"A": "1", "B": "1.0"}
    # A group that our defaults list does not have is appended to it, with or without Hydra's plus sign.
    assert compose(["presets=long", "cluster=site/big"], own).config.train.steps == 9
    assert compose(["+presets=long"], own).config.train.steps == 9


def test_own_files_are_not_found_without_the_flag(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(own, "conf/experiment/mine", GLOBAL)
    monkeypatch.chdir(own)
    with pytest.raises(
        ConfigError, match="experiment=mine: no such choice; experiment has: demo, pretrain-160m, smoke"
    ):
        compose(["experiment=mine"])
    assert compose(["experiment=mine"], Path("conf")).overrides == ("experiment=mine",)


def test_every_problem_of_a_file_is_told_with_its_line(own: Path) -> None:
    write(
        own,
        "experiment/bad",
        GLOBAL
        + """\
defaults:
  - override /model: tinny
  - override /modle: tiny
train:
  stepss: 1
  global_batch: a
optim:
  lr: 1e-4
  lr: 2
cluster:
  time: 10:00
  mem: 1.50
  account: on
  env: {A: 1.0}
  setup: module load x
  nodes: 010
data:
  sources:
    - {prefix: a, weigth: 1}
    - b
model:
seed: ???
hydra: {}
""",
    )
    quoted = "expected a string or null; put it in quotes"
    number = "read by YAML as another number; put it in quotes, or write it as a plain decimal"
    found = problems(own, "experiment=bad", "train.steps=abc")
    assert found[0] == "train.steps=abc: expected an integer"
    assert [
        line.removeprefix("DIR/experiment/bad.yaml:").partition(" expected a mapping")[0] for line in found[1:]
    ] == [
        f"3: model=tinny: no such choice; model has: {MODELS}; nearest: tiny",
        "4: modle: no such group; did you mean model?",
        "6: train.stepss: unknown key; did you mean train.steps?",
        "7: train.global_batch=a: expected an integer",
        "10: optim.lr: is there twice; keep one",
        f"12: cluster.time=10:00: {number}",
        f"13: cluster.mem=1.5: {quoted}",
        f"14: cluster.account=true: {quoted}",
        "15: cluster.env.A=1.0: expected a string; put it in quotes",
        "16: cluster.setup=module load x: expected a list of strings",
        f"17: cluster.nodes=010: {number}",
        "20: data.sources.0.weigth: unknown key; did you mean data.sources.0.weight?",
        "21: data.sources.1=b:",
        "22: model=null:",
        "23: seed=???: has no effect, because every field has a default; leave it out",
        "24: hydra: unknown key; the top level has: name, run_root, seed, plugins, train, model, data, parallel, "
        "memory, optim, precision, kernels, checkpoint, resilience, tracking, cluster, container, fabric, task, "
        "profile",
    ]


def test_a_file_that_is_chosen_by_another_file_is_checked_too(own: Path) -> None:
    write(own, "cluster/mine", "nodez: 3\n")
    write(own, "experiment/mine", GLOBAL + "defaults:\n  - override /cluster: mine\n")
    assert problems(own, "experiment=mine") == [
        "DIR/cluster/mine.yaml:1: cluster.nodez: unknown key; did you mean cluster.nodes?"
    ]


BROKEN = {
    "a: [1\nb: 2\n": "DIR/experiment/bad.yaml:2: YAML: cannot be read: expected ',' or ']', but got ':'",
    "train: {steps: 1}\n": (
        "DIR/experiment/bad.yaml: experiment: its keys would go below an unknown section; "
        "let the file begin with `# @package _global_`"
    ),
    "": (
        "DIR/experiment/bad.yaml: experiment: its keys would go below an unknown section; "
        "let the file begin with `# @package _global_`"
    ),
    GLOBAL + "defaults:\n  - model: tiny\n": (
        "experiment/bad.yaml: model: tiny: in a defaults list write `override /model: tiny`"
    ),
    GLOBAL + "defaults:\n  - base\n": (
        "experiment/bad.yaml: experiment=base: no such choice; experiment has: bad, demo, pretrain-160m, smoke"
    ),
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_file_that_cannot_be_used_is_one_clear_line(own: Path, text: str) -> None:
    write(own, "experiment/bad", text)
    assert problems(own, "experiment=bad") == [BROKEN[text]]


def test_a_file_that_is_no_text_is_one_clear_line(own: Path) -> None:
    write(own, "experiment/bad", "").write_bytes(b"\xff\xfe")
    (line,) = problems(own, "experiment=bad")
    assert line.startswith("DIR/experiment/bad.yaml: YAML: cannot be read: 'utf-8' codec can't decode byte 0xff")


def test_a_file_that_ours_would_hide_is_refused(own: Path) -> None:
    write(own, "model/tiny", "num_layers: 2\n")
    write(own, "config", "train: {steps: 3}\n")
    hidden = "is the name of one of stoker's own files, which would be read instead; give it another name"
    assert problems(own) == [f"DIR: config.yaml: {hidden}", f"DIR: model/tiny.yaml: {hidden}"]


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([], tmp_path / "nope")
    assert str(caught.value) == f"--config-dir={tmp_path}/nope: no such directory"
