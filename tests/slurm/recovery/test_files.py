"""Files that a run makes: by nodes and not by ranks, in its own directory and on the nodes, and nowhere else.

The run works from a staged environment: a small one, which finds the packages of this one by a .pth file, as an
editable installation does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher.rehearsal.trial import Trial
from stoker.launcher.run.outcome import Cause

pytestmark = pytest.mark.slurm

# Nodes have a /tmp of their own, but for the tests' directory and the cluster's.
LOOK = "find /tmp /var/tmp /dev/shm -xdev -mindepth 1 -not -path '/tmp/pytest-*' -not -path '/tmp/stk-*'"


def made(run: Trial, folder: str) -> list[str]:
    """Files below a folder of the run directory, with nodes' names taken out; a node's file counts once per node."""
    nodes = run.nodes()
    names = [str(p.relative_to(run.dir.path)) for p in (run.dir.path / folder).rglob("*") if p.is_file()]
    for node in nodes:
        names = [n.replace(f"/{node}.", "/NODE.") for n in names]
    return sorted(names)


def tree(folder: Path) -> set[tuple[str, int, int]]:
    return {(str(p), p.lstat().st_size, p.lstat().st_mtime_ns) for p in folder.rglob("*")}


def small_environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "all.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


def on_node(lab: Any, node: str) -> set[str]:
    return set(lab.cluster.enter(node, ["sh", "-c", LOOK]).stdout.splitlines())


def test_files_grow_with_nodes_and_lie_in_the_run_directory_and_on_the_nodes(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = small_environment(tmp_path / "venv")
    home, local = tmp_path / "home", tmp_path / "local"
    home.mkdir()
    for node in lab.cluster.nodes():
        (local / node).mkdir(parents=True)
    project = tmp_path / "project"
    project.mkdir()
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / "my_probe.py").write_text("import os\nprint('caches in', os.environ['TRITON_CACHE_DIR'], flush=True)\n")
    monkeypatch.setenv("HOME", str(home))
    # Where the packages lie is not written to, though it could be.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    shared = tree(venv) | tree(project)
    lab.empty_queue()  # what ended jobs have on their nodes is taken away while Slurm clears up
    before = {node: on_node(lab, node) for node in lab.cluster.nodes()}
    common = ["train.steps=6", "checkpoint.interval=3", "train.micro_batch=1", "cluster.stage_env=true"]
    common += [f"cluster.python={venv}/bin/python", f"cluster.local_dir={local}/$SLURMD_NODENAME"]
    common += ["plugins=[my_probe]"]
    ranks = [[f"cluster.procs_per_node={n}"] for n in (1, 4)]
    runs = [lab.launch(f"ranks{k}", *common, *n, failpoints="", cwd=project) for k, n in enumerate(ranks)]
    for run in runs:
        assert run.wait_end().cause is Cause.FINISHED, run.story()
    few, many = runs
    assert few.events("form")[-1]["world_size"] == 2
    assert many.events("form")[-1]["world_size"] == 8
    assert made(few, "submissions") == made(many, "submissions")
    assert (made(few, "slurm"), made(many, "slurm")) == ([f"slurm/{few.job_id}.log"], [f"slurm/{many.job_id}.log"])
    assert (
        made(few, "attempts")
        == made(many, "attempts")
        == [
            "attempts/0001/events/NODE.jsonl",
            "attempts/0001/events/NODE.jsonl",
            "attempts/0001/events/supervisor.jsonl",
            "attempts/0001/logs/NODE.log",
            "attempts/0001/logs/NODE.log",
            "attempts/0001/metrics-g0001.jsonl",
            "attempts/0001/outcome.json",
            "attempts/0001/start.json",
        ]
    )
    # Both nodes of both runs worked from one archive, each unpacked to the node's own directory.
    assert len(list((tmp_path / ".envs").glob("*.tar"))) == 1
    for run in runs:
        staged = run.events("environment_staged")
        assert {e["writer"] for e in staged} == set(run.nodes())
        for event in staged:
            assert event["directory"].startswith(f"{local}/{event['writer']}/stoker-{os.getuid()}/env-")
        for node in run.nodes():
            log = (run.dir.attempt(1).path / "logs" / f"{node}.log").read_text()
            assert f"caches in {local}/{node}/stoker-{os.getuid()}/" in log
    # Nothing anywhere else.
    lab.empty_queue()
    assert tree(venv) | tree(project) == shared
    assert list(home.rglob("*")) == []
    assert {node: on_node(lab, node) for node in lab.cluster.nodes()} == before
    assert {p.name for p in tmp_path.iterdir()} == {
        "venv",
        "project",
        "home",
        "local",
        ".envs",
        few.dir.path.name,
        many.dir.path.name,
    }
