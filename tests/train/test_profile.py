"""A trace of the steps and ranks that were named, once per run, and not a bit of the training changed by it."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import digest, events, make_context, metrics, tiny_config, train
from stoker.conf.schema import Config
from stoker.launcher.run.heartbeat import Control, Save, Segment
from stoker.launcher.run.layout import RunDir
from stoker.train.grid import Membership, form, single
from stoker.train.loop import Trainer
from stoker.train.profile import StepProfile
from stoker.train.pulse import Pulse

# Two micro-steps each.
RANGES_OF_A_STEP = {"data": 2, "forward": 2, "backward": 2, "communication": 1, "optimizer": 2, "forward_backward": 3}


def traced(tiny_data: Path, steps: list[int], **profile: Any) -> Config:
    return tiny_config(tiny_data, steps=8, profile={"steps": steps, **profile})


def files(run: Path) -> list[str]:
    return sorted(p.name for p in RunDir(run).report.iterdir()) if RunDir(run).report.exists() else []


def ranges(run: Path, name: str) -> Counter[str]:
    with gzip.open(RunDir(run).report / name, "rt") as f:
        trace = json.load(f)
    return Counter(e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation")


def stopping(step: int) -> Pulse:
    segment = Segment.create("test")
    segment.write_control(Control(1, step, True, Save.BOTH))
    return Pulse(segment, 1)


def test_the_trace_holds_the_named_steps_with_our_ranges(tmp_path: Path, tiny_data: Path) -> None:
    config = traced(tiny_data, [3, 4])
    config.checkpoint.interval = 4
    train(tmp_path, config)
    assert files(tmp_path) == ["trace-rank00000-steps3-4-a0001-g0001.json.gz"]
    found = ranges(tmp_path, files(tmp_path)[0])
    ours = {name: found[name] for name in (*RANGES_OF_A_STEP, "save")}
    assert ours == {name: 2 * count for name, count in RANGES_OF_A_STEP.items()} | {"save": 1}
    assert {name for name in found if name.startswith("step ")} == {"step 3", "step 4"}
    (event,) = (e for e in events(tmp_path) if e["event"] == "profiled")
    assert (event["first"], event["last"], event["file"]) == (3, 4, files(tmp_path)[0])


def test_no_bit_of_the_training_changes(tmp_path: Path, tiny_data: Path) -> None:
    plain, _ = train(tmp_path / "plain", tiny_config(tiny_data, steps=8))
    profiled, _ = train(tmp_path / "profiled", traced(tiny_data, [1, 8]))
    assert [m["loss"] for m in metrics(tmp_path / "profiled")] == [m["loss"] for m in metrics(tmp_path / "plain")]
    assert digest(profiled) == digest(plain)
    assert files(tmp_path / "plain") == []


def test_off_nothing_is_made_and_nothing_asked(tmp_path: Path, tiny_data: Path) -> None:
    trainer = Trainer.build(tiny_config(tiny_data), single(), make_context(tmp_path))
    assert trainer.profile is None
    assert trainer.clock.tracer is None
    trainer.close()


def test_after_a_restart_a_trace_that_is_there_is_not_made_again(tmp_path: Path, tiny_data: Path) -> None:
    config = traced(tiny_data, [3, 4])
    config.checkpoint.interval = 2
    train(tmp_path, config, pulse=stopping(5))
    made = files(tmp_path)
    # As if everything after step 2 had been lost.
    for name in RunDir(tmp_path).all_checkpoints():
        if name.step > 2:
            (RunDir(tmp_path).checkpoint(name) / "manifest.json").unlink()
    train(tmp_path, config, attempt=2)
    assert metrics(tmp_path, attempt=2)[0]["step"] == 3
    assert files(tmp_path) == made == ["trace-rank00000-steps3-4-a0001-g0001.json.gz"]


def test_a_trace_that_was_cut_off_is_taken_up_where_the_run_goes_on(tmp_path: Path, tiny_data: Path) -> None:
    config = traced(tiny_data, [3, 6])
    _, ended = train(tmp_path, config, pulse=stopping(4))
    assert ended.step == 4
    assert files(tmp_path) == []
    train(tmp_path, config, attempt=2)
    assert files(tmp_path) == ["trace-rank00000-steps5-6-a0002-g0001.json.gz"]
    assert {n for n in ranges(tmp_path, files(tmp_path)[0]) if n.startswith("step ")} == {"step 5", "step 6"}
    train(tmp_path, traced(tiny_data, [3, 6]), attempt=3)
    assert len(files(tmp_path)) == 1


def test_memory_on_the_cpu_is_a_note(tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, traced(tiny_data, [2, 2], memory=True))
    assert "profile.memory: there is no snapshot of the memory on the CPU" in capsys.readouterr().out
    assert files(tmp_path) == ["trace-rank00000-steps2-2-a0001-g0001.json.gz"]


def test_a_trace_that_cannot_be_written_costs_the_trace_only(tmp_path: Path, tiny_data: Path) -> None:
    RunDir(tmp_path).report.write_text("not a directory")
    _, ended = train(tmp_path, traced(tiny_data, [2, 3]))
    assert ended.finished
    (event,) = (e for e in events(tmp_path) if e["event"] == "profile_failed")
    assert "report" in event["error"]


def _ranked(member: Membership, prefix: str, run: str) -> dict[str, Any]:
    grid = form(member)
    try:
        config = tiny_config(prefix, steps=4, train={"micro_batch": 2}, profile={"steps": [2, 3], "ranks": [1]})
        trainer, _ = train(run, config, grid)
        return {"digest": digest(trainer)}
    finally:
        grid.close()


def test_only_the_named_ranks_write_one(tmp_path: Path, tiny_data: Path, run_ranks: Any) -> None:
    results = run_ranks(2, _ranked, prefix=str(tiny_data), run=str(tmp_path))
    assert results[0] == results[1]
    assert files(tmp_path) == ["trace-rank00001-steps2-3-a0001-g0001.json.gz"]
    assert ranges(tmp_path, files(tmp_path)[0])["forward"] == 4


def test_on_cuda_nsys_gets_the_ranges_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    from stoker.train import profile

    seen: list[str] = []

    @contextmanager
    def nvtx(name: str) -> Any:
        seen.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    with profile._ranges(torch.device("cuda"))("forward"):
        pass
    assert seen == ["forward"]
    assert StepProfile.of(Config().profile, single(), None, 0) is None  # type: ignore[arg-type]
