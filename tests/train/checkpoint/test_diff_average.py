"""`stoker checkpoint diff` and `average`, on checkpoints of several layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from state_ranks import Crew, Job
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.verification import verify
from stoker.train.checkpoint import __main__ as tools
from stoker.train.checkpoint import average as average_module
from stoker.train.checkpoint import diff as diff_module
from stoker.train.checkpoint.reading import open_checkpoint
from stoker.train.checkpoint.weights import Origin, Weight, write_checkpoint

Tensors = dict[str, torch.Tensor]


def save(job: Job, step: int, seed: int) -> None:
    job.checkpointer().save(step, job.entries(seed), {"step": step, "settings": {"seed": seed}})


def make(directory: Path, tensors: Tensors, step: int = 0, model: Any = None, **settings: Any) -> Path:
    weights = [Weight(n, t.dtype, tuple(t.shape), lambda t=t: [t]) for n, t in tensors.items()]
    state: dict[str, Any] = {"step": step, "settings": settings}
    write_checkpoint(directory, weights, Origin("r", step, state if model is None else {"model": model}))
    return directory


def told(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    code = tools.main(list(map(str, arguments)))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_module, "_CHUNK", 100_000)
    monkeypatch.setattr(average_module, "_CHUNK", 100_000)


# diff


def test_layouts_do_not_count_and_seeds_do(crew: Crew, run: RunDir, capsys: Any) -> None:
    for size, step, seed in ((1, 10, 1), (3, 20, 1), (2, 30, 2)):
        for result in crew.run(save, run, size, step=step, seed=seed):
            assert result.raised is None, result.text
    a, b, c = (run.checkpoint(CheckpointName(step, 1)) for step in (10, 20, 30))
    code, out, _ = told(capsys, "diff", a, b)
    assert code == 0
    assert out.splitlines()[2:] == [
        "14 tensors are the same, bit for bit",
        "1 progress (does not count):",
        "  step: 10 / 20",
    ]
    code, out, _ = told(capsys, "diff", f"{run.path}:10", f"{run.path}:30", "--json")
    found = json.loads(out)
    assert (code, found["same"], found["equal"]) == (1, False, 3)  # optim/none, none_inside, mask
    assert found["settings"] == {"seed": [1, 2]}
    assert len(found["values"]) == 11
    count = next(v for v in found["values"] if v["name"] == "optim/count")
    assert count == {"name": "optim/count", "different": 1, "of": 1, "max_abs": 1.0, "max_rel": 1 / (2**40 + 2)}
    code, out, _ = told(capsys, "diff", a, c, "--only", "optim/mask", "--json")
    assert json.loads(out)["equal"] == 1


def test_the_largest_difference_is_found_in_any_chunk(tmp_path: Path, capsys: Any) -> None:
    x = torch.linspace(1, 2, 60_000).view(600, 100)
    y = x.clone()
    y[599, 99] += 0.5
    y[0, 0] -= 0.25
    z = torch.tensor([0.0, float("nan"), float("inf")])
    same, signs = z.clone(), torch.tensor([-0.0, float("nan"), float("inf")])
    a = make(tmp_path / "a", {"model/x": x, "model/same": z, "model/zero": z, "model/nan": z, "only/a": z}, lr=1)
    b = make(
        tmp_path / "b",
        {"model/x": y, "model/same": same, "model/zero": signs, "model/nan": torch.zeros(3), "only/b": z},
        lr=2,
    )
    code, out, _ = told(capsys, "diff", a, b)
    assert code == 1
    assert out.splitlines() == [
        f"A: {a}",
        f"B: {b}",
        "1 tensors are the same, bit for bit",
        "1 only in A:",
        "  only/a",
        "1 only in B:",
        "  only/b",
        "3 of other values, largest difference first:",
        "  model/nan: max abs nan, max rel nan, 2 of 3 values",
        "  model/x: max abs 5.000e-01, max rel 2.500e-01, 2 of 60,000 values",
        "  model/zero: max abs 0.000e+00, max rel 0.000e+00, 1 of 3 values",
        "1 settings:",
        "  lr: 1 / 2",
    ]
    assert json.loads(told(capsys, "diff", a, b, "--json")[1])["values"][0]["max_abs"] is None


def test_types_and_shapes_are_told(tmp_path: Path, capsys: Any) -> None:
    a = make(tmp_path / "a", {"model/x": torch.ones(4), "model/y": torch.ones(2, 3)})
    b = make(tmp_path / "b", {"model/x": torch.ones(4).bfloat16(), "model/y": torch.ones(3, 2)})
    code, out, _ = told(capsys, "diff", a, b)
    assert code == 1
    assert out.splitlines()[2:] == [
        "0 tensors are the same, bit for bit",
        "2 of other types or shapes:",
        "  model/x: float32 [4] / bfloat16 [4]",
        "  model/y: float32 [2, 3] / float32 [3, 2]",
    ]


def test_what_cannot_be_compared_is_neither_equal_nor_different(tmp_path: Path, capsys: Any) -> None:
    a = make(tmp_path / "a", {"model/x": torch.ones(4)})
    b = make(tmp_path / "b", {"model/x": torch.ones(4)})
    shard = b / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    code, _, err = told(capsys, "diff", a, b)
    assert (code, err.count("\n")) == (2, 1)
    assert "block 0" in err
    code, _, err = told(capsys, "diff", a, tmp_path / "c")
    assert (code, "no checkpoint and no run directory" in err) == (2, True)


# average


def test_the_mean_is_exact_and_rounded_once(tmp_path: Path, capsys: Any) -> None:
    g = torch.Generator().manual_seed(0)
    states = [
        {
            "model/a": torch.randn(300, 201, generator=g),
            "model/b": torch.randn(7, generator=g).bfloat16(),
            "model/c": torch.tensor(float(i)),
            "model/d": torch.tensor([1, 2]),
            "optim/exp_avg/a": torch.randn(3, generator=g),
        }
        for i in range(3)
    ]
    made = [make(tmp_path / f"c{i}", s, i, hidden_size=3) for i, s in enumerate(states)]
    code, out, _ = told(capsys, "average", *made, "--out", tmp_path / "out")
    assert (code, out) == (0, f"{tmp_path / 'out'}: the mean of c0, c1, c2\n")
    manifest = verify(tmp_path / "out")
    assert manifest.state["weights_only"] is True
    assert manifest.state["averaged"] == [f"r/step-0000000{i}-a0000" for i in range(3)]
    assert manifest.step == 2
    with open_checkpoint(tmp_path / "out") as found:
        assert list(found.tensors) == ["model/a", "model/b", "model/c", "model/d"]
        for name in ("model/a", "model/b", "model/c"):
            mean = torch.stack([s[name].double() for s in states]).mean(0)
            exact = mean.to(states[0][name].dtype)
            assert torch.equal(found.read(name), exact), name
        assert found.read("model/d").tolist() == [1, 2]


def test_masters_are_averaged_where_all_have_them(tmp_path: Path) -> None:
    def state(value: float) -> Tensors:
        master = torch.full((4,), value)
        return {"model/w": master.bfloat16(), "optim/master/w": master}

    values = (1.0, 1.0 + 2**-8)  # in bfloat16 both are 1; their mean with 1.02 is not
    made = [make(tmp_path / f"c{i}", state(v)) for i, v in enumerate((*values, 1.02))]
    with open_checkpoint(made[0]) as a, open_checkpoint(made[1]) as b, open_checkpoint(made[2]) as c:
        average_module.average([a, b, c], tmp_path / "out")
    with open_checkpoint(tmp_path / "out") as found:
        expected = torch.tensor((1.0 + 1.0 + 2**-8 + float(torch.tensor(1.02))) / 3).bfloat16()
        assert torch.equal(found.read("model/w"), expected.expand(4))


def test_other_models_are_refused_by_naming_what_differs(tmp_path: Path, capsys: Any) -> None:
    a = make(tmp_path / "a", {"model/x": torch.ones(4), "model/y": torch.ones(1)}, model={"layers": 2, "init_from": 1})
    b = make(tmp_path / "b", {"model/x": torch.ones(5), "model/z": torch.ones(1)}, model={"layers": 3, "init_from": 2})
    code, _, err = told(capsys, "average", a, b, "--out", tmp_path / "out")
    assert (code, (tmp_path / "out").exists()) == (2, False)
    assert err == (
        "stoker checkpoint average: error: b is of another model than a: model.layers: 3 instead of 2; "
        "model/x: torch.float32 [5] instead of torch.float32 [4]; model/y: only in a; model/z: only in b\n"
    )


def test_whole_numbers_that_differ_have_no_mean(tmp_path: Path, capsys: Any) -> None:
    a = make(tmp_path / "a", {"model/n": torch.tensor([1])})
    b = make(tmp_path / "b", {"model/n": torch.tensor([2])})
    code, _, err = told(capsys, "average", a, b, "--out", tmp_path / "out")
    assert (code, sorted(p.name for p in tmp_path.iterdir())) == (2, ["a", "b"])
    assert "model/n: torch.int64 has no mean" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}"], "one checkpoint has no mean"),
        (["{run}:10", "{run}:10"], "names a checkpoint twice"),
        (["{run}", "--last", "1"], "--last 1: expected at least 2"),
        (["{run}", "--last", "3"], "2 valid checkpoints, --last 3 asks for more"),
        (["{run}:10", "{run}", "--last", "2"], "--last 2: expected one RUN beside it"),
        (["{run}", "--last", "2", "--out", "{run}"], "exists already"),
    ],
)
def test_what_makes_no_mean_is_refused(run: RunDir, arguments: list[str], message: str, capsys: Any) -> None:
    for step in (10, 20):
        run.checkpoints.mkdir(exist_ok=True)
        made = make(run.path / f"made-{step}", {"model/x": torch.tensor(float(step))}, step)
        made.rename(run.checkpoint(CheckpointName(step, 0)))
    words = [a.format(run=run.path) for a in arguments]
    words += [] if "--out" in words else ["--out", str(run.path / "out")]
    code, _, err = told(capsys, "average", *words)
    assert (code, err.count("\n"), message in err) == (2, 1, True), err
    assert not (run.path / "out").exists()


def test_the_last_ones_of_a_run(run: RunDir, capsys: Any) -> None:
    run.checkpoints.mkdir()
    for step in (10, 20, 30):
        made = make(run.path / "made", {"model/x": torch.tensor(float(step))}, step)
        made.rename(run.checkpoint(CheckpointName(step, 0)))
    assert told(capsys, "average", run.path, "--last", 2, "--out", run.path / "out")[0] == 0
    with open_checkpoint(run.path / "out") as found:
        assert found.read("model/x").item() == 25.0


def test_an_unknown_tool_and_a_directory_that_is_none_are_one_line(tmp_path: Path, capsys: Any) -> None:
    assert told(capsys, "mean")[0] == 2
    code, _, err = told(capsys, "diff", tmp_path, tmp_path)
    assert (code, err.count("\n")) == (2, 1)


def test_a_reader_who_has_gone_does_not_make_two_checkpoints_the_same(tmp_path: Path) -> None:
    a = make(tmp_path / "a", {"model/w": torch.zeros(3)})
    b = make(tmp_path / "b", {"model/w": torch.ones(3)})
    reads, writes = os.pipe()
    os.close(reads)
    try:
        command = [sys.executable, "-m", "stoker.train.checkpoint", "diff", str(a), str(b)]
        done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writes)
    assert done.returncode in (1, 2)  # never 0, which says: the same
    assert done.stderr == b""
