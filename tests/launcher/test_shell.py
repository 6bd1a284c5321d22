"""`stoker shell`: the srun line, which node is meant, what is handed on. On real nodes: tests/slurm/recovery."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import shell, shell_node
from stoker.launcher.errors import UserError
from stoker.launcher.run.events import EventLog
from stoker.launcher.run.layout import RunDir
from stoker.launcher.running import Running, culprit_node, nodes_of


@pytest.fixture
def at_work(make_run: Callable[..., RunDir]) -> Running:
    run = make_run("r")
    attempt = run.attempt(2)
    (attempt.path / "events").mkdir(parents=True)
    container: dict[str, Any] = {"runtime": "none", "options": ["--container-writable"], "mounts": []}
    config = {"cluster": {"procs_per_node": 4, "local_dir": None, "cpus_per_task": 8, "gpus_per_node": 0, "env": {}},
              "container": container | {"image": "img.sqsh", "python": "python3"},
              "data": {"sources": [], "tokenizer": None}, "model": {"init_from": None},
              "checkpoint": {"storage": None, "local": None}}  # fmt: skip
    return Running(run, attempt, 1, "77", None, ("n1", "n2"), 2, "/usr/bin/python3", config)


def test_the_srun_line(at_work: Running) -> None:
    path = str(at_work.run.path)
    assert shell.srun_line(at_work, "n2", ["nvidia-smi", "-q"], has_terminal=True) == [
        "srun", "--jobid=77", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=8",
        "--mpi=none", "--cpu-bind=none", "--export=ALL", "--nodelist=n2", f"--chdir={path}", "--quiet", "--pty",
        "/usr/bin/python3", f"{path}/bootstrap.py", "stoker.launcher.shell_node", path, "2", "n2", "--",
        "nvidia-smi", "-q",
    ]  # fmt: skip


def test_pyxis_is_entered_by_sruns_options_and_others_on_the_node(at_work: Running) -> None:
    at_work.config["container"]["runtime"] = "pyxis"
    line = shell.srun_line(at_work, "n1", ["true"], has_terminal=False, in_container=True)
    assert "--container-image=img.sqsh" in line
    assert line[line.index("stoker.launcher.shell_node") - 2] == "python3"
    assert "--container" not in line
    at_work.config["container"]["runtime"] = "apptainer"
    line = shell.srun_line(at_work, "n1", ["true"], has_terminal=False, in_container=True)
    assert line[-3:] == ["--container", "--", "true"]
    assert "--container-image=img.sqsh" not in line


def test_the_command_follows_the_first_two_dashes() -> None:
    assert shell.split(["r", "n1", "--", "ls", "--", "-l"]) == (["r", "n1"], ["ls", "--", "-l"])
    assert shell.split(["r"]) == (["r"], [])


def test_the_node_named_last_is_meant_until_new_workers_are_formed(at_work: Running) -> None:
    events = EventLog(at_work.attempt.events("supervisor"), "supervisor", 2)
    events.write("form", nodes=["n1", "n2"])
    assert nodes_of(at_work.attempt) == ("n1", "n2")
    assert shell.node_of(at_work, None) == "n1"
    events.write("slow", rank=5, node="n2")
    assert shell.node_of(at_work, None) == "n2"
    assert shell.node_of(at_work, "n1") == "n1"
    events.write("form", nodes=["n1", "n2"])
    assert culprit_node(at_work.attempt) is None
    with pytest.raises(UserError, match="n3: not a node of attempt 2; there are n1, n2"):
        shell.node_of(at_work, "n3")


def test_the_workers_environment_without_what_belongs_to_one_process() -> None:
    theirs = {"PYTHONPATH": "/code", "NCCL_DEBUG": "INFO", "STOKER_TOKEN": "s", "STOKER_ZYGOTE_FD": "7", "TERM": "dumb",
              "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}  # fmt: skip
    ours = {"PYTHONPATH": "/login", "TERM": "xterm", "SLURM_STEP_ID": "3", "HOME": "/elsewhere"}
    assert shell_node.environment(theirs, ours) == {
        "PYTHONPATH": "/code", "NCCL_DEBUG": "INFO", "TERM": "xterm", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3",
    }  # fmt: skip


def test_a_run_that_does_not_run_is_told(make_run: Callable[..., RunDir], fake_slurm: Any, tmp_path: Path) -> None:
    run = make_run("r")
    with pytest.raises(UserError, match=r"not running: FROZEN"):
        shell.main([str(run.path)])
    assert json.loads(run.run.read_text())["id"] == "r"
