"""`stoker plan`: what is printed for a layout, and for one that cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from stoker.launcher import cli
from stoker.launcher.run.layout import RunDir

SMALL = ("model.num_layers=4", "data.seq_len=64", "train.global_batch=16", "train.micro_batch=2")


def plan(*arguments: str, code: int = 0) -> str:
    """Standard output, or where it fails standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "stoker.launcher.cli", "plan", *SMALL, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def test_a_plan_needs_neither_data_nor_slurm() -> None:
    text = plan("--world", "8", "parallel.tensor=2", "parallel.pipeline=2")
    assert "pipeline 2 x data 2 x context 1 x tensor 2" in text
    assert "memory of the fullest rank looked at, 0 (" in text
    assert "NCCL buffers                  unverified" in text
    assert "estimate, not measured" in text


def test_one_rank_of_a_big_world_is_run_alone() -> None:
    found: dict[str, Any] = json.loads(
        plan("--world", "1024", "--rank", "17", "parallel.tensor=4", "train.global_batch=512", "--json")
    )
    (run,) = found["ranks"]
    assert run["rank"] == 17
    assert run["coordinates"] == {"pipeline": 0, "data": 4, "context": 0, "tensor": 1}
    assert run["traffic"]["tensor"]["calls"] > 0


def test_what_cannot_work_is_told_before_anything_is_built() -> None:
    text = plan("--world", "6", "--gpus-per-node", "6", "parallel.tensor=3", code=2)
    assert "stoker plan: error: parallel.tensor=3: does not divide model.num_heads=4; nearest that work: 2 or 4" in text
    assert "--rank 9: there are ranks 0 to 7" in plan("--world", "8", "--rank", "9", code=2)


def test_processes_that_fill_no_nodes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--world", "12"]) == 2
    assert "--world 12: no multiple of --gpus-per-node 8" in capsys.readouterr().err


def test_the_bubble_that_a_run_measured_stands_beside_the_computed_one(
    make_run: Callable[..., RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    run.attempt(1).path.mkdir(parents=True)
    lines = [{"step": step, "bubble": bubble} for step, bubble in ((1, 0.5), (2, 0.25), (3, 0.3))]
    run.attempt(1).metrics(1).write_text("".join(json.dumps(line) + "\n" for line in lines))
    pipeline = ("--world", "4", "parallel.pipeline=4", "train.global_batch=32", "--schedule")
    text = plan(*pipeline, "--run", str(run.path))
    assert f"measured in {run.path.name}: 30.0 %, median of 3 steps" in text
    run.attempt(1).metrics(1).write_text('{"step": 1}\n')
    assert cli.main(["plan", *SMALL, *pipeline, "--run", str(run.path)]) == 2
    assert "no step of it measured a bubble" in capsys.readouterr().err
