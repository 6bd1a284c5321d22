"""`stoker checkpoint ls`, `show`, `verify` and `prune`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from made_checkpoint import SIZE, flip, make_checkpoint, piece
from stoker.launcher import cli
from stoker.launcher.checkpoint import TOOLS
from stoker.launcher.run import chosen
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.events import EventLog
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.run.submissions import new_submission

Make = Callable[..., RunDir]


@pytest.fixture
def run(make_run: Make) -> RunDir:
    """Ended after two attempts. Steps 100-500; 200 is cut short, 300 has no manifest, 450 was never finished."""
    run = make_run("r1")
    keeps = {"keep": 2, "keep_every": 100, "keep_best": 1}
    run.config_json.write_text(json.dumps({"cluster": {"kind": "slurm"}, "checkpoint": keeps}))
    new_submission(run, "sbatch").set_job("7")
    for step, loss in ((100, 2.0), (150, 1.5), (200, None), (300, None), (450, 3.0)):
        make_checkpoint(run, step, loss=loss)
    make_checkpoint(run, 500, 2, float(4))
    os.truncate(run.checkpoint(CheckpointName(200, 1)) / "shard-00000.safetensors", 99)
    (run.checkpoint(CheckpointName(300, 1)) / "manifest.json").unlink()
    left = run.checkpoints / ".tmp-step-00000450-a0001-g0001-00000001"
    left.mkdir()
    (left / "shard-00000.safetensors").write_bytes(bytes(1000))
    os.utime(left, (time.time() - 600,) * 2)
    for _ in range(2):
        attempt = claim(run)
        attempt.start.write_text(json.dumps({"submission": 1, "time": 1.0}))
        Outcome(Cause.CRASH, Next.NOTHING, 1, "crashed").write(attempt)
    return run


def stoker(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["checkpoint", *map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out, out.err


def as_json(capsys: Any, *arguments: object) -> Any:
    code, out, err = stoker(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def names(run: RunDir) -> list[str]:
    return [f"{n.step}.{n.attempt}" for n in run.all_checkpoints()]


# ls


def test_ls_shows_state_size_loss_and_why_each_is_kept(run: RunDir, capsys: Any) -> None:
    code, out, _ = stoker(capsys, "ls", run.path)
    assert code == 0
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert rows == [
        "CHECKPOINT STEP ATTEMPT AGE SIZE STATE VALIDATION KEPT FOR",
        "step-00000500-a0002 500 2 10 min 5.2 MB valid 4.0000 newest, every",
        "step-00000450-a0001 450 1 10 min 5.2 MB valid 3.0000 newest, every",
        "step-00000450-a0001 450 1 10 min 1.0 kB unfinished -",
        "step-00000300-a0001 300 1 ? ? damaged: no manifest.json (the save was not finished) - -",
        f"step-00000200-a0001 200 1 10 min 5.2 MB damaged: shard-00000.safetensors: 99 bytes, expected {SIZE} - -",
        "step-00000150-a0001 150 1 10 min 5.2 MB valid 1.5000 best",
        "step-00000100-a0001 100 1 10 min 5.2 MB valid 2.0000 every",
        "7 checkpoints, 4 valid, 26.2 MB",
    ]


def test_ls_json(run: RunDir, capsys: Any) -> None:
    (only,) = as_json(capsys, "ls", run.path)
    assert only["run"] == str(run.path)
    found = {(c["step"], c["state"]): c for c in only["checkpoints"]}
    assert found[150, "valid"]["validation"] == {"step": 150, "loss": 1.5}
    assert found[150, "valid"]["kept_for"] == ["best"]
    assert found[300, "damaged"]["problem"] == "no manifest.json (the save was not finished)"
    assert found[450, "unfinished"]["kept_for"] is None


def test_ls_looks_with_several_processes_at_many(run: RunDir, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = as_json(capsys, "ls", run.path)
    monkeypatch.setattr("stoker.launcher.checkpoint_look._EACH", 2)
    assert as_json(capsys, "ls", run.path) == alone


def test_ls_of_thousands_says_what_it_did_not_look_at(
    run: RunDir, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.checkpoint(CheckpointName(500, 2)) / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 2'))
    assert "damaged: manifest.json: checksum does not match" in stoker(capsys, "ls", run.path)[1]
    monkeypatch.setattr("stoker.launcher.checkpoint_look.MANY", 3)
    monkeypatch.setattr("stoker.launcher.checkpoint_ls.MANY", 3)
    out = stoker(capsys, "ls", run.path)[1].splitlines()
    assert "valid" in out[1]
    assert out[-1].endswith("(of so many, manifests' own checksums were not looked at)")


def test_ls_of_a_run_without_checkpoints(make_run: Make, capsys: Any) -> None:
    run = make_run("r2")
    shutil.rmtree(run.checkpoints)
    assert stoker(capsys, "ls", run.path) == (0, "no checkpoints\n", "")


# show


def test_show_says_what_the_newest_valid_one_is(run: RunDir, capsys: Any) -> None:
    code, out, _ = stoker(capsys, "show", run.path, "--tensors")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for expected in (
        "checkpoint step-00000500-a0002",
        "run r1",
        "state valid at a look",
        "layout data 2, tensor 1",
        "progress step 500, consumed_samples 4000",
        "validation loss 4.0000 at step 500",
        "model 1 tensors, 30 values, 120 B",
        "optim/exp_avg 1 tensors, 20 values, 40 B",
        "model.hidden_size = 64",
        "model/early F32 10x3 120 B 1",
    ):
        assert expected in lines


@pytest.mark.parametrize("text", ["r1/checkpoints/step-00000150-a0001", "r1:150", "r1/step-00000150-a0001"])
def test_a_checkpoint_is_named_in_several_ways(
    run: RunDir, text: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parent)
    found = as_json(capsys, "show", text, "--tensors", "model/*")
    assert (found["step"], [t["name"] for t in found["tensors"]]) == (150, ["model/early"])
    assert found["tensors"][0]["bytes"] == 120
    assert chosen.find_checkpoint(text) == run.checkpoint(CheckpointName(150, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("r1:7", "no checkpoint of step 7"),
        ("r1/step-00000007-a0001", "no such checkpoint"),
        ("r9", "r9: no checkpoint, no run and no job; expected"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    run: RunDir, text: str, message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parent)
    code, out, err = stoker(capsys, "show", text)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_show_of_a_damaged_one_says_why(run: RunDir, capsys: Any) -> None:
    code, out, _ = stoker(capsys, "show", f"{run.path}:200")
    assert (code, f"99 bytes, expected {SIZE}" in out) == (1, True)
    code, _, err = stoker(capsys, "show", f"{run.path}:300")
    assert (code, "no manifest.json" in err) == (1, True)


# verify


def test_verify_notes_what_is_good(run: RunDir, capsys: Any) -> None:
    code, out, _ = stoker(capsys, "verify", run.path)
    assert code == 0
    assert out.startswith("step-00000500-a0002: good: 0.01 GB in ")
    newest = as_json(capsys, "ls", run.path)[0]["checkpoints"][0]
    assert (newest["state"], newest["kept_for"]) == ("verified", ["newest", "every", "proven"])
    # Whoever writes to it afterwards undoes that.
    flip(run.checkpoint(CheckpointName(500, 2)) / "shard-00000.safetensors", 2000)
    os.utime(run.checkpoint(CheckpointName(500, 2)) / "shard-00000.safetensors", (1, 1))
    assert as_json(capsys, "ls", run.path)[0]["checkpoints"][0]["state"] == "valid"


def test_what_verify_found_bad_is_remembered_and_stands_for_nothing(run: RunDir, capsys: Any) -> None:
    directory = run.checkpoint(CheckpointName(500, 2))
    flip(directory / "shard-00000.safetensors", 2000)
    assert stoker(capsys, "verify", directory)[0] == 1
    problem = "verify found shard-00000.safetensors: block 0 (from byte 0) does not match its checksum"
    newest = as_json(capsys, "ls", run.path)[0]["checkpoints"][0]
    assert (newest["state"], newest["problem"], newest["kept_for"]) == ("damaged", problem, ["newest"])
    code, out, _ = stoker(capsys, "show", directory)
    assert (code, f"DAMAGED: {problem}" in out) == (1, True)
    assert chosen.find_checkpoint(str(run.path)) == run.checkpoint(CheckpointName(450, 1))
    # Two valid ones stay besides it, as checkpoint.keep=2 says.
    stoker(capsys, "prune", run.path, "--keep-every", 0, "--keep-best", 0)
    assert names(run) == ["500.2", "450.1", "300.1", "200.1", "150.1"]
    flip(directory / "shard-00000.safetensors", 2000)  # as it was, by whoever had a copy
    assert stoker(capsys, "verify", directory)[0] == 0
    assert as_json(capsys, "ls", run.path)[0]["checkpoints"][0]["state"] == "verified"


@pytest.mark.parametrize(
    "slices",
    [
        {"count": 10**12, "file": [[0, 0, 10**12]], "at": [[0, 0, 10**12]]},
        {"file": [[0, 0, 10**12]]},
        {"file": [[0, 0, 1 - 10**12], [0, 0, 10**12]]},
        {"at": [[-8, 0, 1]]},
        {"start": [[[0, 0, 10**12]], [[0, 0, 1]]]},
        {"shape": [[[10**15, 0, 1]], [[3, 0, 1]]]},
        {"shape": [[[-10, 0, 1]], [[-3, 0, 1]]]},
    ],
)
def test_an_index_that_says_more_than_its_files_have_is_told_at_once(
    run: RunDir, slices: dict[str, Any], capsys: Any
) -> None:
    """Its checksums are right: made to do harm, or by a defect."""
    directory = make_checkpoint(run, 600, 2, change={"slices": piece([10, 3], 1024) | slices})
    for tool in (("show", "--json", "--tensors"), ("verify",)):
        code, out, _ = stoker(capsys, tool[0], directory, *tool[1:])
        assert code == 1
        assert "index.jsonl: " in out
        assert "line 1: " in out


@pytest.mark.parametrize("change", [{"shape": [10**9, 10**9]}, {"shape": [-1]}, {"dtype": "F31"}, {"name": 3}])
def test_a_tensor_larger_than_all_shards_or_none_at_all_is_told(
    run: RunDir, change: dict[str, Any], capsys: Any
) -> None:
    directory = make_checkpoint(run, 600, 2, change=change)
    code, out, _ = stoker(capsys, "show", directory)
    assert (code, "index.jsonl: line 1: ValueError: " in out) == (1, True)


def test_verify_takes_the_note_back_when_bytes_have_rotted(run: RunDir, capsys: Any) -> None:
    shard = run.checkpoint(CheckpointName(500, 2)) / "shard-00000.safetensors"
    assert stoker(capsys, "verify", run.path)[0] == 0
    before = shard.stat()
    flip(shard, 2000)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))  # nobody wrote: the note still holds
    assert as_json(capsys, "ls", run.path)[0]["checkpoints"][0]["state"] == "verified"
    assert stoker(capsys, "verify", run.path)[0] == 1
    newest = as_json(capsys, "ls", run.path)[0]["checkpoints"][0]
    assert (newest["state"], newest["kept_for"]) == ("damaged", ["newest"])


def test_ls_of_checkpoints_whose_file_system_is_away(run: RunDir, capsys: Any) -> None:
    elsewhere = run.checkpoints.rename(run.path.parent / "elsewhere")
    run.checkpoints.symlink_to(elsewhere)
    elsewhere.rename(run.path.parent / "away")
    _, out, _ = stoker(capsys, "ls", run.path)
    assert out == f"cannot be seen: {run.checkpoints} leads to {elsewhere}, which is not there\n"
    code, out, err = stoker(capsys, "prune", run.path, "--json")
    assert (code, out) == (1, "")
    assert f"{run.checkpoints} leads to {elsewhere}, which is not there: nothing can be removed" in err


def test_verify_names_the_first_bad_block_and_its_tensors(run: RunDir, capsys: Any) -> None:
    directory = run.checkpoint(CheckpointName(450, 1))
    flip(directory / "shard-00000.safetensors", SIZE - 3)
    code, out, _ = stoker(capsys, "verify", directory, run.path)
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == (
        "step-00000450-a0001: DAMAGED: shard-00000.safetensors: block 1 (from byte 4194304) does not match its checksum"
    )
    assert lines[1] == "  it hits optim/exp_avg/late"
    assert lines[2].startswith("step-00000500-a0002: good")
    flip(directory / "shard-00000.safetensors", 1030)
    code, out, _ = stoker(capsys, "verify", "--json", directory)
    (verdict,) = json.loads(out)
    assert (code, verdict["good"]) == (1, False)
    assert [(d["block"], d["tensors"]) for d in verdict["damage"]] == [
        (0, ["model/early"]),
        (1, ["optim/exp_avg/late"]),
    ]


def test_verify_all(run: RunDir, capsys: Any) -> None:
    code, out, _ = stoker(capsys, "verify", run.path, "--all")
    assert code == 1
    assert [line.split(":")[1] for line in out.splitlines() if line[0] != " "] == [
        " good",
        " good",
        " DAMAGED",
        " DAMAGED",
        " good",
        " good",
    ]
    assert "step-00000200-a0001: DAMAGED: shard-00000.safetensors: block 0: ends at byte 99" in out


@pytest.mark.parametrize("file", ["index.jsonl", "index.offsets", "shard-00000.crc32", "manifest.json"])
def test_verify_sees_a_flip_in_every_small_file(run: RunDir, file: str, capsys: Any) -> None:
    directory = run.checkpoint(CheckpointName(500, 2))
    flip(directory / file, 3)
    code, out, _ = stoker(capsys, "verify", directory)
    assert code == 1
    assert f"DAMAGED: {file}: " in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": [11, 3]}, "model/early: slices have 120 bytes of 132"),
        ({"slices": piece([9, 3], 1024)}, "model/early: slices have 108 bytes of 120"),
        ({"slices": piece([10, 3], SIZE - 60)}, "model/early: a slice lies beyond the end of shard-00000"),
        ({"slices": piece([10, 3], 0) | {"file": [[7, 0, 1]]}}, "model/early: a slice at 7, expected 0 to 0"),
        ({"slices": {"count": 1}}, "index.jsonl: is none of an index (line 1: KeyError: 'start')"),
        ({"slices": [1]}, "index.jsonl: is none of an index (line 1: TypeError"),
        (
            {"slices": piece([10, 3], 1024) | {"start": [[[1, 0, 1]], [[0, 0, 1]]]}},
            "model/early: a slice of [10, 3] from [1, 0] on lies beyond [10, 3]",
        ),
    ],
)
def test_verify_sees_an_index_that_does_not_add_up(run: RunDir, change: dict[str, Any], said: str, capsys: Any) -> None:
    """What a save that lost a rank's part would leave, with all checksums right."""
    directory = make_checkpoint(run, 600, 2, change=change)
    code, out, _ = stoker(capsys, "verify", directory)
    assert (code, said in out) == (1, True), out


def test_verify_hands_bytes_in_an_object_store_over(run: RunDir, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_checkpoint(run, 600, 2, location="s3://bucket/r1/step-00000600-a0002/")
    handed = []

    def execv(program: str, arguments: list[str]) -> None:
        handed.append(arguments[1:])
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit):
        stoker(capsys, "verify", directory, "--json")
    assert handed == [["-m", "stoker.train.checkpoint", "verify", "--json", "--threads=8", str(directory)]]


# prune


def test_prune_says_what_it_would_remove_and_then_removes_it(run: RunDir, capsys: Any) -> None:
    before = names(run)
    arguments = ("prune", run.path, "--keep", 1, "--keep-every", 0)
    code, out, err = stoker(capsys, *arguments, "--dry-run")
    assert (code, names(run), err) == (0, before, "")
    going = ["step-00000450-a0001", "step-00000300-a0001", "step-00000200-a0001", "step-00000100-a0001"]
    going.append(".tmp-step-00000450-a0001-g0001-00000001")
    assert [line.split()[2] for line in out.splitlines()[:-1]] == going
    assert out.splitlines()[-1] == "would remove 5, 15.7 MB; 2 stay"
    code, out, err = stoker(capsys, *arguments)
    assert (code, names(run)) == (0, ["500.2", "150.1"])
    assert out.splitlines()[-1] == "removed 5, 15.7 MB; 2 stay"
    assert err.startswith("step-00000500-a0002: good")  # read whole before anything went
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-00000150-a0001", "step-00000500-a0002"]
    assert as_json(capsys, *arguments) == {
        "dry_run": False,
        "removed": [],
        "freed": 0,
        "kept": {"step-00000500-a0002": ["newest", "proven"], "step-00000150-a0001": ["best"]},
    }


def test_prune_trusts_nothing_that_it_has_not_read(run: RunDir, capsys: Any) -> None:
    flip(run.checkpoint(CheckpointName(500, 2)) / "shard-00000.safetensors", 5)
    code, _, err = stoker(capsys, "prune", run.path, "--keep", 1, "--keep-every", 0, "--keep-best", 0)
    assert (code, names(run)) == (0, ["500.2", "450.1"])
    assert "step-00000500-a0002: DAMAGED" in err
    assert "step-00000450-a0001: good" in err


def test_prune_leaves_what_a_run_restored_from(run: RunDir, capsys: Any) -> None:
    EventLog(run.attempt(2).events("n1"), "n1", 2).write("restored", name="step-00000100-a0001", step=100)
    code, _, err = stoker(capsys, "prune", run.path, "--keep", 1, "--keep-every", 0, "--keep-best", 0)
    assert (code, names(run), err) == (0, ["500.2", "100.1"], "")


def test_prune_removes_nothing_if_none_is_good(run: RunDir, capsys: Any) -> None:
    for step, attempt in ((500, 2), (450, 1), (150, 1), (100, 1)):
        flip(run.checkpoint(CheckpointName(step, attempt)) / "shard-00000.safetensors", 5)
    before = names(run)
    code, out, err = stoker(capsys, "prune", run.path, "--keep", 1, "--keep-every", 0, "--keep-best", 0)
    assert (code, names(run), err.count("DAMAGED")) == (0, before, 3)  # with the last one nothing would go
    assert out.splitlines()[-1] == "removed 1, 1.0 kB; 6 stay"  # what was never finished


def test_prune_of_a_running_run_touches_nothing_that_it_needs(run: RunDir, fake_slurm: Any, capsys: Any) -> None:
    fake_slurm.program("squeue", r"printf '7\x1fRUNNING\x1f1:00\x1fn1\x1fNone\x1f/w\x1fx\x1f/c\n'")
    attempt = claim(run)
    attempt.start.write_text(json.dumps({"submission": 1, "time": 1.0, "job_id": "7"}))
    before = names(run)
    code, _, err = stoker(capsys, "prune", run.path, "--keep", 1, "--keep-every", 0)
    assert (code, names(run)) == (1, before)
    assert "is running and keeps step-00000450-a0001, step-00000100-a0001; nothing was removed" in err
    assert "--keep 2 --keep-every 100 --keep-best 1" in err
    code, _, _ = stoker(capsys, "prune", run.path)
    assert (code, names(run)) == (0, ["500.2", "450.1", "150.1", "100.1"])
    assert any(p.name.startswith(".tmp-step") for p in run.checkpoints.iterdir())  # may be being written


@pytest.mark.parametrize("option", ["--keep=0", "--keep-every=-1", "--keep-best=-1"])
def test_prune_refuses_numbers_that_make_no_sense(run: RunDir, option: str, capsys: Any) -> None:
    code, _, err = stoker(capsys, "prune", run.path, option)
    assert (code, err.count("\n")) == (2, 1)


# the verb


def test_the_trainer_s_tools_are_handed_the_directories_of_jobs(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path.parents[1])
    handed: list[str] = []

    def execv(program: str, arguments: list[str]) -> None:
        handed[:] = arguments[4:]
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit):
        cli.main(["checkpoint", "average", "7:100", "7/step-00000150-a0001", "--last", "7", "--out", "7"])
    assert handed == [f"{run.path}:100", f"{run.path}/step-00000150-a0001", "--last", "7", "--out", "7"]


@pytest.mark.parametrize("tool", ["ls", "show", "verify", "prune"])
def test_every_tool_explains_itself_with_examples(tool: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["checkpoint", tool, "--help"])
    assert e.value.code == 0
    assert "examples:" in capsys.readouterr().out


def test_help_lists_all_tools_and_an_unknown_one_is_refused(capsys: Any) -> None:
    code, out, _ = stoker(capsys)
    assert code == 0
    assert all(f"\n  {tool} " in out for tool in TOOLS)
    code, _, err = stoker(capsys, "list")
    assert code == 2
    assert "unknown tool 'list'; expected one of ls, show, verify, prune" in err
