"""What was measured on a device is found again for that device, torch and library only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stoker.kernels.measured import Measured, read, write

H200 = Measured("NVIDIA H200", torch.__version__, "abc", {"rmsnorm": {"native": 10.5, "reference": 40.0}})


def test_results_are_found_again(tmp_path: Path) -> None:
    path = write(H200, tmp_path / "cache")
    assert path == tmp_path / "cache" / "measured-nvidia-h200.json"
    assert read("NVIDIA H200", "abc", [tmp_path / "none", tmp_path / "cache"]) == H200
    assert json.loads(path.read_text()) == {
        "device": "NVIDIA H200",
        "torch": torch.__version__,
        "library": "abc",
        "results": {"rmsnorm": {"native": 10.5, "reference": 40.0}},
    }
    rope = {"rope": {"native": 3.0}}
    write(replace(H200, results=rope), tmp_path / "cache")
    assert read("NVIDIA H200", "abc", [tmp_path / "cache"]) == replace(H200, results={**H200.results, **rope})
    write(replace(H200, results=rope, library="new"), tmp_path / "cache")
    assert read("NVIDIA H200", "new", [tmp_path / "cache"]) == replace(H200, results=rope, library="new")
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("change", [{"torch": "1.0"}, {"library": "other"}, {"device": "NVIDIA_H200"}], ids=str)
def test_results_of_anything_else_do_not_count(tmp_path: Path, change: dict[str, str]) -> None:
    write(replace(H200, **change), tmp_path)
    assert read("NVIDIA H200", "abc", [tmp_path]) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"results": {}}', '{"results": {"rmsnorm": 3}}'])
def test_a_damaged_file_is_none(tmp_path: Path, text: str) -> None:
    path = write(H200, tmp_path)
    path.write_text(text)
    assert read("NVIDIA H200", "abc", [tmp_path]) is None


def test_times_that_are_none_are_left_out(tmp_path: Path) -> None:
    write(replace(H200, results={"rope": {"native": 0.0, "reference": float("nan"), "apex": 2.0}}), tmp_path)
    found = read("NVIDIA H200", "abc", [tmp_path])
    assert found is not None
    assert found.of("rope") == {"apex": 2.0}
    assert found.of("rmsnorm") == {}
