"""Composing: every choice, every form of override, and what a composed configuration holds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from stoker.conf.checks import check
from stoker.conf.compose import DIRECTORY, compose, default_groups
from stoker.conf.load import from_plain, to_plain
from stoker.conf.problems import ConfigError
from stoker.conf.schema import ClusterKind, Config, Schedule
from stoker.conf.yaml_files import check_file, choices, package_of

CHOICES = {group: names for group, names in choices([DIRECTORY]).items() if group in default_groups()}
MODELS = ", ".join(CHOICES["model"])
EACH_CHOICE = [f"{group}={name}" for group, names in CHOICES.items() for name in names]


def messages(*overrides: str, config_dir: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, config_dir)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    return str(caught.value).split("\n")


def test_groups_are_the_documented_ones() -> None:
    documented = "model data parallel optim precision kernels checkpoint resilience tracking cluster experiment"
    assert default_groups() == documented.split()
    assert set(CHOICES) == set(default_groups())


@pytest.mark.parametrize("choice", EACH_CHOICE)
def test_every_choice_composes_and_survives_json_and_yaml(choice: str) -> None:
    composed = compose([choice])
    assert from_plain(json.loads(json.dumps(composed.plain))) == composed.config
    assert to_plain(composed.config) == composed.plain
    assert OmegaConf.to_container(OmegaConf.create(composed.yaml)) == composed.plain
    assert composed.overrides == (choice,)


@pytest.mark.parametrize("choice", EACH_CHOICE)
def test_our_own_files_hold_only_known_keys_and_values_that_mean_what_they_say(choice: str) -> None:
    group, name = choice.split("=")
    file = DIRECTORY / group / f"{name}.yaml"
    assert check_file(file, package_of(file, group), CHOICES) == []


def test_choices_that_are_made_by_default_repeat_the_defaults_of_the_schema() -> None:
    composed, schema = compose([]).plain, to_plain(Config())
    different = {"run_root", "model", "data"}
    assert {key for key in schema if composed[key] != schema[key]} == different
    assert composed["model"]["hidden_size"] == 128  # model=tiny
    assert composed["data"]["sources"] == [{"prefix": "", "weight": 1.0, "name": None}]


def test_overrides_reach_the_typed_configuration() -> None:
    config = compose(
        [
            "experiment=demo",
            "model=small",
            "optim.schedule=wsd",
            "+train.steps=7",
            "model.head_dim=64",
            "data.sources[0].prefix=/x/y",
            "cluster={nodes: 3, env: {A: 1}}",
            "cluster.env.NCCL_DEBUG=INFO",
            "cluster.sbatch.gpu-bind=none",
            "kernels.rmsnorm=reference",
            "cluster.setup=['module load a/1', 'echo $HOME']",
            "optim.lr=1e-4",
            "tracking.tags=[a,7]",
            "~cluster.env.A",
        ]
    ).config
    assert (config.name, config.model.num_layers, config.optim.schedule) == ("demo", 8, Schedule.wsd)
    assert (config.train.steps, config.model.head_dim, config.cluster.nodes) == (7, 64, 3)
    assert (config.data.sources[0].prefix, config.data.sources[0].name) == ("/x/y", "stdlib")
    assert config.cluster.env == {"NCCL_DEBUG": "INFO"}
    assert config.cluster.sbatch == {"gpu-bind": "none"}
    assert config.kernels.rmsnorm == "reference"
    assert config.cluster.setup == ["module load a/1", "echo $HOME"]
    assert config.optim.lr == 0.0001
    assert config.tracking.tags == ["a", "7"]


def test_switches_of_sbatch_are_booleans_on_the_command_line_and_in_files(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/mine.yaml").write_text(
        "defaults: [slurm]\nsbatch: {hold: true, contiguous: no, overcommit: true, hint: nomultithread}\n"
    )
    overrides = ["cluster=mine", "cluster.sbatch={hold: false, reboot: true, priority: 7}", "cluster.sbatch.wait=true"]
    assert compose(overrides, tmp_path).plain["cluster"]["sbatch"] == {
        "hold": "false",
        "contiguous": "false",
        "overcommit": "true",
        "hint": "nomultithread",
        "reboot": "true",
        "priority": "7",
        "wait": "true",
    }
    wrong = compose(["cluster.sbatch={wckey: true}"]).config
    assert [str(p) for p in check(wrong) if "wckey" in p.field] == ["cluster.sbatch.wckey=true: needs a value"]
    for wrong in ("cluster.sbatch={hold: 1.5}", "cluster.env={A: true}", "cluster={account: true}"):
        assert "put it in quotes" in messages(wrong)[0]


def test_the_last_override_wins_for_choices_and_for_fields() -> None:
    config = compose(["model=small", "train.steps=1", "model=tiny", "train.steps=2", "cluster=local"]).config
    assert (config.model.num_layers, config.train.steps, config.cluster.kind) == (4, 2, ClusterKind.local)
    assert compose(["experiment=smoke", "experiment=null"]).config.name == "run"


STRINGS = {
    "name=007": "007",
    "name=1_000": "1_000",
    "name=0x10": "0x10",
    "name=1.10": "1.10",
    "name=true": "true",
    "name=a,b": "a,b",
    "name=[a|b]": "[a|b]",
    "name={a:1}": "{a:1}",
    "name=a=b": "a=b",
    "name=10:00": "10:00",
    "name=it's": "it's",
    "name=a b (c)": "a b (c)",
    "name='null'": "null",
    'name="a,b"': "a,b",
    "name=  x ": "x",
    "name=gr\u00fc\u00df": "gr\u00fc\u00df",
    "name=back\\slash[": "back\\slash[",
    "name=": "",
}


def test_strings_are_taken_as_they_stand() -> None:
    # One compose for all: each text goes to an entry of its own.
    overrides = [override.replace("name=", f"cluster.env.V{j}=") for j, override in enumerate(STRINGS)]
    assert list(compose(overrides).config.cluster.env.values()) == list(STRINGS.values())


def test_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOW_MANY", "5")
    config = compose(["train.steps=${oc.env:HOW_MANY}", "seed=${train.steps}", "name=n-${seed}"]).config
    assert (config.train.steps, config.seed, config.name) == (5, 5, "n-5")
    assert compose([r"cluster.setup=['echo \${HOME}']"]).config.cluster.setup == ["echo ${HOME}"]


def test_relative_paths_are_those_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    composed = compose(["data.sources.0.prefix=corpus/a", "data.tokenizer=~/tok.json", "run_root=/runs"])
    config = composed.config
    assert (config.data.sources[0].prefix, config.data.tokenizer, config.run_root) == (
        f"{tmp_path}/corpus/a",
        "/home/me/tok.json",
        "/runs",
    )
    assert composed.plain["data"]["tokenizer"] == "/home/me/tok.json"
    assert compose([]).config.run_root == f"{tmp_path}/runs"


def test_yaml_text_reads_back_to_the_same_values() -> None:
    composed = compose(["cluster.env={A: '1e-4', B: 'on', C: '10:00', D: '\u00fc', E: 'null', F: ''}"])
    values = {"A": "1e-4", "B": "on", "C": "10:00", "D": "\u00fc", "E": "null", "F": ""}
    assert yaml.safe_load(composed.yaml)["cluster"]["env"] == values
    assert OmegaConf.to_container(OmegaConf.create(composed.yaml).cluster.env) == values


def test_composing_leaves_the_hydra_of_an_embedding_program_alone(tmp_path: Path) -> None:
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        before = GlobalHydra.instance().hydra
        compose(["train.steps=1"])
        assert GlobalHydra.instance().hydra is before
    assert not GlobalHydra.instance().is_initialized()


def test_three_mistakes_give_three_lines() -> None:
    assert messages("optim.lrr=1", "model=tinny", "train.steps=abc") == [
        "optim.lrr: unknown key; did you mean optim.lr?",
        f"model=tinny: no such choice; model has: {MODELS}; nearest: tiny",
        "train.steps=abc: expected an integer",
    ]


MISTAKES = {
    "modle=tiny": "modle: unknown key; did you mean model?",
    "steps=3": "steps: unknown key; did you mean train.steps?",
    "optm.lr=3": "optm: unknown key; did you mean optim?",
    "xyzzy=3": (
        "xyzzy: unknown key; the top level has: name, run_root, seed, plugins, train, model, data, parallel, memory, "
        "optim, precision, kernels, checkpoint, resilience, tracking, cluster, container, fabric, task, profile"
    ),
    "checkpoint.foo=1": (
        "checkpoint.foo: unknown key; checkpoint has: interval, minutes, at_end, asynchronous, staging_mb, keep, "
        "keep_every, keep_best, storage, local, stripes"
    ),
    "train.steps.x=1": "train.steps.x: unknown key; train.steps is an integer and has no `x`",
    "data.sources.x.prefix=1": (
        "data.sources.x.prefix: unknown key; data.sources is a list of DataSource and has no `x`"
    ),
    "train.steps=true": "train.steps=true: expected an integer",
    "train.steps=1e3": "train.steps=1e3: expected an integer; write 1000",
    "train.steps=": "train.steps=: expected an integer",
    "optim.lr=fast": "optim.lr=fast: expected a number",
    "optim.lr=nan": "optim.lr=nan: expected a number that is finite",
    "optim.schedule=cosin": ("optim.schedule=cosin: expected one of cosine, wsd, linear, constant; nearest: cosine"),
    "cluster.exclusive=1": "cluster.exclusive=1: expected true or false",
    "model.head_dim=x": "model.head_dim=x: expected an integer or null",
    "name=null": "name=null: expected a string",
    "plugins=a": "plugins=a: expected a list of strings",
    "cluster.env={A: 1.10}": "cluster.env.A=1.1: expected a string; put it in quotes",
    "train={steps: x, step: 3}": (
        "train.steps=x: expected an integer\ntrain.step: unknown key; did you mean train.steps?"
    ),
    "train=5": (
        "train=5: expected a mapping with the keys steps, global_batch, micro_batch, eval_interval, eval_batches"
    ),
    "data.sources=[{prefix: a, weight: x}]": "data.sources.0.weight=x: expected a number",
    "optim.lr=1,2": "optim.lr=1,2: several values; give one",
    "seed=[": "seed=[: cannot be read; put quotes within the quotes: \"seed='...'\"",
    "model=null": f"model=null: one must be chosen; model has: {MODELS}",
    "~model": f"model: one must be chosen; model has: {MODELS}",
    "experiment=nope": "experiment=nope: no such choice; experiment has: demo, pretrain-160m, smoke",
    "model=tiny.yaml": f"model=tiny.yaml: no such choice; model has: {MODELS}; nearest: tiny",
    "~optim.lr": "optim.lr: a field cannot be removed; set it to the value it should have",
    "model@foo=tiny": "model@foo: packages are not used here; write model=...",
    "hydra.run.dir=x": "hydra.run.dir: Hydra's own settings have no effect here; leave it out",
    "demo": "demo: expected key=value; for example demo=...",
    "--dry-run": "--dry-run: expected key=value; for example key=...",
    "=3": "=3: is no key; expected group=choice or section.field=value",
    "name=a\nb": "name: holds a line break or another control character; expected one line",
    "~cluster.env.A": "cluster.env.A: is not there to be removed",
    "data.sources.3.prefix=a": (
        "data.sources.3.prefix: no such entry; give the whole list: data.sources='[{prefix: A}, {prefix: B}]'"
    ),
    "name=${nope}": ("name: Interpolation key 'nope' not found; for a variable of the shell write $NAME, or \\${NAME}"),
    "name=${oc.env:NOPE}": "name: cannot be resolved: Environment variable 'NOPE' not found",
    "train.steps=${name}": (
        "train.steps: cannot be resolved: While dereferencing interpolation '${name}': "
        "Value 'run' of type 'str' could not be converted to Integer"
    ),
    "cluster.setup=['echo ${HOME']": (
        "cluster.setup: no viable alternative at input '${HOME'; close what ${ begins, "
        "or write \\${ for the characters themselves"
    ),
    "name=???": "name: must be given; add name=...",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_in_an_override_is_one_clear_line(override: str) -> None:
    assert messages(override) == MISTAKES[override].split("\n")


def test_all_unresolvable_values_are_told_together() -> None:
    assert messages("name=${nope}", "run_root=???", "seed=${oc.env:NOPE}") == [
        "name: Interpolation key 'nope' not found; for a variable of the shell write $NAME, or \\${NAME}",
        "run_root: must be given; add run_root=...",
        "seed: cannot be resolved: Environment variable 'NOPE' not found",
    ]


def test_configurations_are_found_beside_the_package_wherever_it_is_installed(tmp_path: Path) -> None:
    site = tmp_path / "site packages"
    shutil.copytree(DIRECTORY, site / "stoker" / "conf", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "stoker" / "__init__.py").write_text("")
    code = (
        "from stoker.conf.compose import compose, DIRECTORY\nprint(DIRECTORY, compose(['experiment=demo']).config.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split("\n")[0] == f"{site}/stoker/conf demo", done.stderr


def test_conf_imports_no_torch_and_loading_imports_only_the_standard_library() -> None:
    code = (
        "import sys\n"
        "import stoker.conf.load, stoker.conf.checks\n"
        "print(sorted({'torch', 'hydra', 'omegaconf', 'yaml', 'numpy'} & set(sys.modules)))\n"
        "import stoker.conf.compose, stoker.conf.reference\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["[]", "False"], done.stderr
