"""`stoker site` and the lints against a real Slurm with accounts, typed GPUs and partitions of every kind: what an
error says is refused or waits for ever, and what passes starts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from stoker.conf.compose import compose
from stoker.conf.schema import ClusterConfig, Config
from stoker.launcher import lints, site_ask
from stoker.launcher.lints import Findings
from stoker.launcher.rehearsal.cluster import Cluster, wait_until
from stoker.launcher.rehearsal.spec import ClusterSpec
from stoker.launcher.render import script_of

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("site")]
PARTITIONS = (
    "main Nodes=n[1-4] Default=YES MaxTime=1:00:00 DefaultTime=10 PriorityTier=10 PreemptMode=CANCEL GraceTime=20",
    "two Nodes=n[1-2] MaxTime=INFINITE MaxNodes=1 MaxMemPerNode=4000 MaxCPUsPerNode=4",
    "min3 Nodes=n[1-4] MinNodes=3",
    "idle Nodes=n[1-4] State=INACTIVE",
    "hid Nodes=n[1-4] Hidden=YES",
    "vip Nodes=n[1-4] AllowQos=part",
    "not Nodes=n[1-4] DenyQos=part",
    "own Nodes=n[1-4]",
    "res Nodes=n[1-4] ReqResv=YES",
    "urgent Nodes=n[1-4] PriorityTier=100 PreemptMode=OFF",
)
SPEC = ClusterSpec(
    nodes=4,
    gpu_type="h100",
    node_options="Features=ib,rack1 TmpDisk=900000",
    database=True,
    settings=(
        *(f"PartitionName={line}" for line in PARTITIONS),
        "Licenses=matlab:2",
        "AccountingStorageEnforce=associations,limits,qos",
    ),
)
ENTITIES = (
    "add qos lim MaxWall=30 MaxTRES=node=2",
    "add qos wide MaxTRESPerUser=cpu=10 GrpTRES=node=3",
    "add qos part Flags=PartitionTimeLimit,PartitionMaxNodes",
    "add qos none",
    "add account acct",
    "add user root account=acct qos=normal,lim,wide,part",
)


@pytest.fixture(scope="module")
def cluster(slurm_available: None) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="stk-") as base, Cluster.start(SPEC, Path(base) / "c") as found:
        for words in ENTITIES:
            found.run(["sacctmgr", "-i", "-Q", *words.split()])
        found.run(["scontrol", "update", "partitionname=own", "qos=lim"])
        found.run(["scontrol", "update", "nodename=n4", "state=drain", "reason=ECC errors: GPU 3"])
        yield found


@pytest.fixture(autouse=True)
def _client(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in cluster.exports().items():
        monkeypatch.setenv(name, value)


REFUSED: tuple[dict[str, Any], ...] = (
    {"mem_per_cpu": "1001", "cpus_per_task": 8}, {"mem_per_gpu": "1001", "gpus_per_node": 8},
    {"partition": "nope"}, {"partition": "main,nope"}, {"time": "61"}, {"time": "UNLIMITED"}, {"nodes": 5},
    {"partition": "two", "nodes": 2}, {"partition": "two", "mem": "4001"}, {"partition": "two", "mem": "0"},
    {"partition": "two", "cpus_per_task": 5}, {"partition": "min3", "nodes": 2}, {"partition": "idle"},
    {"partition": "vip", "qos": "lim"}, {"partition": "not", "qos": "part"}, {"partition": "res"},
    {"partition": "own", "time": "31"}, {"partition": "own", "nodes": 3},
    {"gpus_per_node": 9}, {"gpus_per_node": 1, "gpu_type": "a100"}, {"cpus_per_task": 9}, {"mem": "8001"},
    {"tmp": "900001"}, {"constraint": "nvme"}, {"constraint": "ib|nvme"}, {"exclude": "n9"}, {"nodelist": "n9"},
    {"exclude": "n[1-4]"}, {"nodes": 4, "exclude": "n1"}, {"partition": "two", "nodelist": "n3"},
    {"reservation": "zz"}, {"licenses": "matlab:3"}, {"licenses": "foo"},
    {"account": "nope"}, {"qos": "nope"}, {"qos": "none"}, {"account": "root", "qos": "lim"},
    {"qos": "lim", "time": "31"}, {"qos": "lim", "nodes": 3}, {"qos": "wide", "nodes": 2, "cpus_per_task": 6},
    {"qos": "wide", "nodes": 4},
)  # fmt: skip
TAKEN: tuple[dict[str, Any], ...] = (
    {"mem_per_cpu": "1000", "cpus_per_task": 8}, {"mem_per_gpu": "1000", "gpus_per_node": 8},
    {"time": "60"}, {"nodes": 3}, {"partition": "two", "mem": "4000", "cpus_per_task": 4},
    {"partition": "two,main", "nodes": 3}, {"partition": "min3", "nodes": 3}, {"partition": "hid"},
    {"partition": "vip", "qos": "part"}, {"gpus_per_node": 8, "gpu_type": "h100"}, {"cpus_per_task": 8, "mem": "0"},
    {"constraint": "ib&rack1", "tmp": "900000"}, {"nodes": 2, "exclude": "n1"}, {"nodelist": "n[2-3]", "nodes": 2},
    {"licenses": "matlab:2"}, {"account": "acct", "qos": "lim", "time": "30", "nodes": 2},
    {"qos": "part", "time": "61"}, {"qos": "wide", "nodes": 2, "cpus_per_task": 5}, {"partition": "own", "time": "30"},
)  # fmt: skip


def configured(**cluster: Any) -> Config:
    account = {} if "account" in cluster else {"account": "acct"}
    return Config(cluster=ClusterConfig(**{"time": "20", **account, **cluster}))


def options(config: Config) -> list[str]:
    """As the batch script has them, less what is about its run directory."""
    script = script_of(config, Path("/"), "id", "0", "python3")
    ours = [(n, v) for n, v in script.options if n not in ("chdir", "output", "signal", "job-name")]
    ours = [(n, v) for n, v in ours if v is not None and v is not False]
    return ["--output=/dev/null", *(f"--{n}" if v is True else f"--{n}={v}" for n, v in ours)]


def linted(config: Config) -> Findings:
    return lints.live(config)


def states(cluster: Cluster, jobs: Sequence[str]) -> dict[str, tuple[str, str]]:
    out = cluster.run(["squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", "--format=%i|%T|%r"]).stdout
    return {job: (state, reason) for job, state, reason in (line.split("|", 2) for line in out.splitlines())}


def test_what_an_error_says_is_refused_or_waits_for_ever(cluster: Cluster) -> None:
    said = {str(ask): linted(configured(**ask)).errors for ask in REFUSED}
    assert [ask for ask, errors in said.items() if len(errors) == 0] == []
    waiting = {}
    for ask in REFUSED:
        command = ["sbatch", "--parsable", *options(configured(**ask)), "--wrap=true"]
        done = cluster.run(command, check=False)
        if done.returncode == 0:
            waiting[done.stdout.strip()] = str(ask)
    assert len(waiting) < len(REFUSED) / 2
    # What Slurm has taken waits for something that does not come: not for its turn or for nodes.
    turn = ("None", "Resources", "Priority", "BeginTime", "InvalidQOS")
    try:
        wait_until(
            lambda: all(s == "PENDING" and r not in turn for s, r in states(cluster, list(waiting)).values()),
            30.0,
            lambda: f"{ {waiting[j]: s for j, s in states(cluster, list(waiting)).items()} }",
        )
    finally:
        cluster.run(["scancel", *waiting])


def test_what_passes_starts(cluster: Cluster) -> None:
    assert {str(ask): linted(configured(**ask)).errors for ask in TAKEN} == {str(ask): [] for ask in TAKEN}
    jobs = [cluster.submit([*options(configured(**ask)), "--wrap=true"]) for ask in TAKEN]
    names = dict(zip(jobs, map(str, TAKEN), strict=True))
    wait_until(
        lambda: all(state == "COMPLETED" for state, _ in states(cluster, jobs).values()),
        60.0,
        lambda: f"{ {names[j]: s for j, s in states(cluster, jobs).items() if s[0] != 'COMPLETED'} }",
    )


def test_what_is_only_said(cluster: Cluster) -> None:
    found = linted(configured(nodes=4))
    assert found.errors == []
    assert found.warnings == [
        "cluster.nodes=4: 3 of the nodes that fit are in service now; the job waits for the others "
        "(n4 drained: ECC errors: GPU 3)",
        "partition main has PreemptMode=CANCEL: a preempted job is cancelled there, not requeued; "
        "resilience.continuation=chain goes on in a second job (or `stoker resume`, by hand)",
        "partition main has GraceTime=20 and KillWait=5: a preempted run is killed after 25 s, which may be too short "
        "to save; up to checkpoint.interval=1000 steps are lost then",
    ]


def test_what_is_kept_is_not_asked_again_and_an_error_is_never_said_from_it(cluster: Cluster, tmp_path: Path) -> None:
    first, second = site_ask.ask(), site_ask.ask()
    assert first is not None
    assert second is not None
    assert (first.age, first.inventory) == (0.0, second.inventory)
    assert second.age > 0
    (file,) = (tmp_path / "cache" / "stoker").iterdir()
    kept = json.loads(file.read_text())
    kept["inventory"]["hardware"][0]["cpus"] = kept["inventory"]["hardware"][1]["cpus"] = 1
    file.write_text(json.dumps(kept | {"asked_at": time.time() - 3600}))
    assert linted(configured(cpus_per_task=8)).errors == []
    file.write_text("{ damaged")
    assert linted(configured(cpus_per_task=9)).errors != []


def stoker(cluster: Cluster, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stoker.launcher.cli", *arguments]
    return subprocess.run(
        command, env=cluster.env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_written_profile_is_taken_by_slurm(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "conf" / "cluster" / "mine.yaml"
    done = stoker(cluster, tmp_path, "site", "--write", str(file))
    assert done.returncode == 0, done.stderr
    assert f"written: {file}\n" in done.stdout
    config = compose(["cluster=mine"], tmp_path / "conf").config
    asked = config.cluster
    assert (asked.partition, asked.gpus_per_node, asked.procs_per_node, asked.cpus_per_task) == ("main", 8, 8, 8)
    assert (asked.mem, asked.time, config.resilience.continuation.value) == ("0", "01:00:00", "chain")
    config.cluster.account = "acct"
    assert linted(config).errors == []
    cluster.run(["sbatch", "--test-only", *options(config), "--wrap=true"])
    before = file.read_bytes()
    again = stoker(cluster, tmp_path, "site", "--write", str(file))
    assert (again.returncode, file.read_bytes()) == (2, before)
    assert f"--write {file}: exists already" in again.stderr


def test_the_report_with_a_look_at_a_node(cluster: Cluster, tmp_path: Path) -> None:
    asked = time.time()
    done = stoker(cluster, tmp_path, "site", "--probe", "main", "--srun=--account=acct")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Slurm 2")
    (row,) = [line.split("  ") for line in lines if line.startswith("main*")]
    cells = [cell.strip() for cell in row if cell.strip()]
    assert cells == ["main*", "up", "4", "01:00:00", "00:10:00", "CANCEL, 20 s",
                     "4 x 8 CPU 8 GiB 8 GPU h100 [ib,rack1]"]  # fmt: skip
    assert "out of service: n4 drained: ECC errors: GPU 3" in lines
    assert "- preempted jobs are cancelled in main: use resilience.continuation=chain there" in done.stdout
    assert "accounting     slurmdbd; enforced: associations,limits,qos; your accounts: acct, root" in lines
    assert "  clock        as here, to a second or so" in lines
    plain = json.loads(stoker(cluster, tmp_path, "site", "--json").stdout)
    assert plain["site"]["inventory"]["hardware"][0]["gpus"] == [["h100", 8]]
    assert (plain["node"], plain["here"]["commands"]["scontrol"][:1]) == (None, "/")
    assert time.time() > asked


def test_a_node_that_cannot_be_had(cluster: Cluster, tmp_path: Path) -> None:
    done = stoker(cluster, tmp_path, "site", "--probe", "idle", "--srun=--account=acct")
    assert done.returncode == 1
    assert (
        "no node to look at: srun: error: Unable to allocate resources: Required partition not available" in done.stderr
    )
