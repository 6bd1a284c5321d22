"""The example profile: it composes as it is, and with each of its commented settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from stoker.conf.compose import compose
from stoker.conf.schema import Config, Continuation
from stoker.conf.yaml_files import check_file

EXAMPLE = Path(__file__).resolve().parents[2] / "conf" / "cluster" / "h100-ib.yaml"
COMMENTED = re.compile(r"^(\s*)#(?=[a-z_]+:)")
LINES = EXAMPLE.read_text().splitlines()
SETTINGS = [number for number, line in enumerate(LINES) if COMMENTED.match(line)]


def uncommented(*numbers: int) -> str:
    return "\n".join(COMMENTED.sub(r"\1", line) if n in numbers else line for n, line in enumerate(LINES)) + "\n"


def composed(directory: Path, text: str) -> Config:
    """With the text as a profile of one's own."""
    (directory / "cluster").mkdir()
    (directory / "cluster" / "mine.yaml").write_text(text)
    return compose(["cluster=mine"], directory).config


def test_example_composes(tmp_path: Path) -> None:
    config = composed(tmp_path, uncommented())
    assert config == compose(["cluster=h100-ib"]).config
    assert (config.cluster.gpus_per_node, config.cluster.time, config.resilience.warning) == (8, "1-00:00:00", 300)
    assert (config.cluster.partition, config.run_root) == (None, str(Path.cwd() / "runs"))


def test_example_composes_with_all_its_settings(tmp_path: Path) -> None:
    config = composed(tmp_path, uncommented(*SETTINGS))
    assert (config.cluster.partition, config.cluster.gpu_type, config.cluster.stage_env) == ("h100", "h100", True)
    assert config.cluster.switches == "1@2:00:00"
    assert config.cluster.env == {"NCCL_DEBUG": "WARN"}
    assert config.container.image == "/lustre/my-project/images/train.sqsh"
    assert (config.run_root, config.fabric.bind) == ("/lustre/my-project/runs", False)
    assert config.resilience.continuation is Continuation.chain


@pytest.mark.parametrize("number", SETTINGS)
def test_each_commented_setting_is_one(number: int, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(uncommented(number))
    assert check_file(file, "", {}) == []
    assert file.read_text() != uncommented()
