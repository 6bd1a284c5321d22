"""Initial weights are looked for at launch: a wait in the queue would be the price of a wrong path."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.conf.checks import check
from stoker.conf.compose import compose
from stoker.conf.schema import Config, DataSource


def told(init_from: str) -> list[str]:
    config = Config()
    config.data.sources = [DataSource("/data/a")]
    config.model.init_from = init_from
    return [str(p) for p in check(config) if p.field == "model.init_from"]


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


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_a_path_of_initial_weights_is_made_absolute(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = compose([f"model.init_from={prefix}some/where", "data.sources=[{prefix: /x}]"]).config.model.init_from
    assert chosen == f"{prefix}{tmp_path}/some/where"
