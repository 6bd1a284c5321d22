"""What is learnt about a site: parsers beyond the recordings, what is kept of it, and what is said and written."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from stoker.conf.checks import check
from stoker.conf.compose import compose
from stoker.launcher import cli, site, site_ask, site_cache, site_probe, site_report, site_verb, site_write
from stoker.launcher.errors import UserError
from stoker.launcher.site import Accounting, Association, Hardware, Inventory, Partition, Probe, Qos, Site

NODES = """NodeName=gpu01 Arch=x86_64 CoresPerSocket=48
   CPUAlloc=0 CPUEfctv=94 CPUTot=96 CPULoad=0.30
   AvailableFeatures=ib,rack1
   ActiveFeatures=ib,rack1
   Gres=gpu:h100:8(S:0-1),nvme:1
   RealMemory=2000000 AllocMem=0 FreeMem=22558 Sockets=2 Boards=1
   State=IDLE ThreadsPerCore=1 TmpDisk=900000 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=gpu,all
   Comment=State=DOWN Gres=gpu:99

NodeName=gpu02 CPUTot=96 RealMemory=2000000 TmpDisk=900000
   AvailableFeatures=ib,rack1
   Gres=gpu:h100:8(S:0-1),nvme:1
   Partitions=gpu,all

NodeName=cpu1 CPUTot=64 RealMemory=250000 TmpDisk=0
   Gres=(null)
   Partitions=all
"""
LARGE = Hardware(("gpu01", "gpu02"), ("gpu", "all"), 96, 2_000_000, 900_000, (("h100", 8),), ("ib", "rack1"))
PLAIN = Hardware(("cpu1",), ("all",), 64, 250_000, 0, (), ())


def test_nodes_that_are_alike_are_one() -> None:
    assert site.parse_hardware(NODES) == (LARGE, PLAIN)


def test_partition_with_every_limit() -> None:
    text = """PartitionName=gpu
   AllowGroups=ml,hpc AllowAccounts=a,b AllowQos=vip
   AllocNodes=ALL Default=YES QoS=cap
   DefaultTime=00:30:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=120 Hidden=YES
   MaxNodes=8 MaxTime=2-00:00:00 MinNodes=2 LLN=NO MaxCPUsPerNode=90
   PriorityTier=7 ReqResv=YES
   OverTimeLimit=NONE PreemptMode=CANCEL
   State=DRAIN TotalCPUs=3072 TotalNodes=32 SelectTypeParameters=NONE
   DefMemPerCPU=1000 MaxMemPerNode=1900000
PartitionName=odd MaxTime=whatever DenyAccounts=c DenyQos=low TotalNodes=1"""
    assert site.parse_partitions(text) == (
        Partition("gpu", True, "DRAIN", True, 172800, 1800, 32, 2, 8, 90, 1_900_000, "CANCEL", 120, 7, "cap",
                  ("a", "b"), (), ("vip",), (), ("ml", "hpc"), True),
        Partition("odd", total_nodes=1, tier=0, deny_accounts=("c",), deny_qos=("low",)),
    )  # fmt: skip


def test_accounts() -> None:
    qos = """Name|Priority|GraceTime|Preempt|PreemptMode|Flags|GrpTRES|MaxTRES|MaxWall|MaxTRESPU|MaxJobsPU|MaxSubmitPU
normal|0|00:00:00||cluster||||||||
low|0|00:01:30|||DenyOnLimit,PartitionTimeLimit|node=8|cpu=4,gres/gpu=16,mem=1.50T|1-00:30:00|gres/gpu:h100=8|2|1
high|9|00:00:00|low,normal|requeue|||||||"""
    assert site.parse_qos(qos) == (
        Qos("normal", preempt_mode="cluster"),
        Qos("low", 90, (), "", ("DenyOnLimit", "PartitionTimeLimit"), 88200,
            (("cpu", 4), ("gres/gpu", 16), ("mem", 1572864)), (("gres/gpu:h100", 8),), (("node", 8),), 2, 1),
        Qos("high", preempts=("low", "normal"), preempt_mode="requeue"),
    )  # fmt: skip
    rows = "Cluster|Account|User|Partition|MaxJobs|MaxSubmit|QOS|Def QOS\nc|acct|me||1|2|normal,low|low\nc|b|me|gpu||||"
    assert site.parse_associations(rows) == (
        Association("acct", "", ("normal", "low"), "low", 1, 2),
        Association("b", "gpu"),
    )
    assert site.parse_qos("") == site.parse_associations("sacctmgr: error\n") == ()


INVENTORY = Inventory((LARGE, PLAIN), Accounting((Qos("low", 90, max_tres=(("cpu", 4),)),), (Association("a"),)), True)
SETTINGS = {
    "ClusterName": "c", "SlurmctldHost[0]": "ctl(10.0.0.1)", "BOOT_TIME": "2026-11-30T10:24:14", "KillWait": "30 sec",
    "SLURM_VERSION": "24.11.7", "AccountingStorageType": "accounting_storage/slurmdbd", "MinJobAge": "300 sec",
    "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "JobRequeue": "1", "PrivateData": "none",
    "SelectType": "select/cons_tres", "TopologyPlugin": "topology/tree", "EnforcePartLimits": "ALL",
}  # fmt: skip


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path)}


def test_what_was_kept_is_read_again(environ: dict[str, str], tmp_path: Path) -> None:
    site_cache.save(INVENTORY, True, SETTINGS, environ)
    (file,) = (tmp_path / "stoker").iterdir()
    found = site_cache.load(SETTINGS, environ, time.time() + 100)
    assert found is not None
    assert found[0] == INVENTORY
    assert 100 <= found[1] < 160
    assert file == site_cache.path_for(SETTINGS, environ)


def test_what_was_seen_on_nodes_is_kept_by_partition(environ: dict[str, str]) -> None:
    now, seen, other = time.time(), Probe("n1", ("srun", "sbatch")), Probe("n2", ())
    assert site_cache.probes(SETTINGS, environ, now) == {}
    site_cache.save_probe("a", other, SETTINGS, environ)
    site_cache.save_probe("b", other, SETTINGS, environ)
    site_cache.save_probe("a", seen, SETTINGS, environ)
    assert site_cache.probes(SETTINGS | {"BOOT_TIME": "later"}, environ, now + 9) == {"a": seen, "b": other}
    assert site_cache.probes(SETTINGS | {"ClusterName": "d"}, environ, now + 9) == {}
    assert site_cache.probes(SETTINGS, environ, now + 31 * 86400) == {}
    site_cache._probes_path(SETTINGS, environ).write_text('{"a": 3}')
    assert site_cache.probes(SETTINGS, environ, now + 9) == {}


def test_what_is_old_or_of_another_cluster_is_not_used(environ: dict[str, str]) -> None:
    now = time.time()
    site_cache.save(INVENTORY, True, SETTINGS, environ)
    assert site_cache.load(SETTINGS, environ, now + 13 * 3600) is None
    assert site_cache.load(SETTINGS, environ, now - 3600) is None  # from the future
    assert site_cache.load(SETTINGS | {"BOOT_TIME": "2026-11-30T11:00:00"}, environ, now + 1) is None
    for other in ({"ClusterName": "d"}, {"SlurmctldHost[0]": "ctl2"}):
        assert site_cache.load(SETTINGS | other, environ, now + 1) is None
    assert site_cache.load(SETTINGS, environ | {"SLURM_CONF": "/x"}, now + 1) is None
    # Accounts that did not answer are asked for again soon.
    site_cache.save(replace(INVENTORY, accounting=None), False, SETTINGS, environ)
    assert site_cache.load(SETTINGS, environ, now + 500) is not None
    assert site_cache.load(SETTINGS, environ, now + 700) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain.clear(), lambda plain: plain.update(format=99), lambda plain: plain.update(asked_at="soon"),
        lambda plain: plain.update(inventory=[]), lambda plain: plain["inventory"].pop("hardware"),
        lambda plain: plain["inventory"].update(has_pyxis="yes"),
        lambda plain: plain["inventory"]["hardware"][0].update(names="gpu01"),
        lambda plain: plain["inventory"]["hardware"][0].update(cpus="many"),
        lambda plain: plain["inventory"]["accounting"]["qos"][0].update(unknown=1),
        lambda plain: plain["inventory"]["accounting"].update(associations=[3]),
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored(change: Any, environ: dict[str, str]) -> None:
    file = site_cache.path_for(SETTINGS, environ)
    site_cache.save(INVENTORY, True, SETTINGS, environ)
    plain = json.loads(file.read_text())
    change(plain)
    file.write_text(json.dumps(plain))
    assert site_cache.load(SETTINGS, environ, time.time() + 1) is None
    file.write_bytes(b"\x00\xff{")
    assert site_cache.load(SETTINGS, environ, time.time() + 1) is None


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    site_cache.save(INVENTORY, True, SETTINGS, {"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert site_cache.directory({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}) == Path("/home/me/.cache/stoker")


GPU = Partition("gpu", False, max_time=172800, total_nodes=2, preempt_mode="CANCEL", tier=1)
ALL = Partition("all", True, total_nodes=3, tier=9)
SITE = Site(SETTINGS, (ALL, GPU), {"gpu02": ("drained", "ECC errors")}, INVENTORY)
HERE = site_probe.parse("host login\nkernel 6.1\ncommand srun /usr/bin/srun\n")


def test_profile_is_for_the_partition_with_gpus_and_passes_the_checks(tmp_path: Path) -> None:
    cpus_only = replace(SITE, partitions=(replace(ALL, name="cpu", total_nodes=1), GPU))
    cpus_only = replace(cpus_only, inventory=Inventory((replace(LARGE, partitions=("gpu",)),)))
    assert site_write.choose(cpus_only, None) is GPU
    assert site_write.choose(SITE, None) is ALL
    assert site_write.choose(SITE, "gpu") is GPU
    with pytest.raises(ValueError, match="--partition x: there is none here; known: all, gpu"):
        site_write.choose(SITE, "x")
    text = site_write.profile(SITE, GPU, HERE, "mine")
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text(text)
    config = compose(["cluster=mine"], tmp_path).config
    asked = config.cluster
    assert (asked.partition, asked.gpus_per_node, asked.procs_per_node, asked.cpus_per_task) == ("gpu", 8, 8, 96)
    assert (asked.omp_threads, asked.mem, asked.time) == (12, "0", "1-00:00:00")
    assert (config.resilience.continuation.value, config.resilience.warning) == ("chain", 120)
    assert [p for p in check(config) if p.field.startswith(("cluster", "resilience", "container"))] == []
    assert "#   runtime: pyxis\n" in text


def test_profile_of_a_site_that_shows_little(tmp_path: Path) -> None:
    bare = Site({}, (Partition("a'b", total_nodes=2, max_time=240),))
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text(site_write.profile(bare, bare.partitions[0], HERE, "mine"))
    config = compose(["cluster=mine"], tmp_path).config
    assert (config.cluster.partition, config.cluster.time, config.cluster.gpus_per_node) == ("a'b", "00:04:00", 0)
    assert config.resilience.warning == 90
    assert [p for p in check(config) if p.severity == "error" and p.field.startswith(("cluster", "resil"))] == []


def test_report() -> None:
    lines = site_report.report(SITE, HERE).splitlines()
    assert lines[0] == "Slurm 24.11.7, cluster c, controller ctl(10.0.0.1)"
    assert [" ".join(line.split()) for line in lines if line.startswith(("all*", "gpu "))] == [
        "all* up 3 unlimited - - 2 x 96 CPU 1953 GiB 8 GPU h100 [ib,rack1]; 1 x 64 CPU 244 GiB",
        "gpu up 2 2-00:00:00 - CANCEL, 0 s 2 x 96 CPU 1953 GiB 8 GPU h100 [ib,rack1]",
    ]
    assert "out of service: gpu02 drained: ECC errors" in lines
    assert lines[lines.index("what follows for stoker:") + 1 :] == [
        "- preempted jobs are cancelled in gpu: use resilience.continuation=chain there",
        "- grace is short in gpu (0 s), then 30 s until everything is killed: it may be too little for a checkpoint, "
        "so keep checkpoint.interval small there",
        "- topology/tree: cluster.switches keeps a job on few switches; ranks are ordered by them",
        "- containers: container.runtime=pyxis",
    ]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"JobRequeue": "0"}, "JobRequeue=0: stoker's jobs ask for requeue by themselves"),
        ({"EnforcePartLimits": "NO"}, "EnforcePartLimits=NO: Slurm takes jobs that exceed"),
        ({"SelectType": "select/linear"}, "select/linear knows no --gpus-per-node: set cluster.gpu_request=gres"),
        ({"PrivateData": "jobs,nodes"}, "PrivateData=jobs,nodes hides what is not yours"),
        ({"SlurmctldParameters": "preempt_send_user_signal"}, "preempt_send_user_signal: a preemption is announced"),
        (
            {"AccountingStorageType": "accounting_storage/none"},
            "no accounts are kept: Slurm forgets an ended job after",
        ),
    ],
)
def test_what_follows_from_a_setting(settings: dict[str, str], sentence: str) -> None:
    without = site_report.consequences(SITE, HERE)
    said = site_report.consequences(replace(SITE, settings=SETTINGS | settings), HERE)
    assert [line.startswith(sentence) for line in said].count(True) == 1
    assert not any(line.startswith(sentence) for line in without)


NODE = """host gpu01
time 1796040100
kernel 5.14
command scontrol /opt/slurm/bin/scontrol
command apptainer /usr/bin/apptainer
command module /opt/lmod
python 3.9.18
memlock 64
device mlx5_0 1 InfiniBand  ACTIVE 400 Gb/sec (4X NDR)
device mlx5_1 1 InfiniBand  DOWN 40 Gb/sec (4X QDR)
disk 943718400 /local
disk 1024 /local
gpu NVIDIA H100 80GB HBM3
gpu NVIDIA H100 80GB HBM3
"""


def test_what_a_node_says_of_itself() -> None:
    node = site_probe.parse(NODE, asked=1796040099.5, answered=1796040100.5)
    assert (node.host, node.python, node.memlock, node.skew) == ("gpu01", "3.9.18", "64", 0.0)
    assert node.commands == {
        "scontrol": "/opt/slurm/bin/scontrol", "apptainer": "/usr/bin/apptainer", "module": "/opt/lmod"
    }  # fmt: skip
    assert [(d.name, d.layer, d.state) for d in node.devices] == [
        ("mlx5_0", "InfiniBand", "ACTIVE"), ("mlx5_1", "InfiniBand", "DOWN")
    ]  # fmt: skip
    assert node.devices[0].rate == "400 Gb/sec (4X NDR)"
    assert (node.disks, len(node.gpus)) == ((("/local", 921600),), 2)
    said = site_report.consequences(SITE, HERE, node)
    assert "RDMA ports that are not active (on the node): mlx5_1/1" in said
    assert "locked memory is limited to 64 KiB (on the node): RDMA needs `unlimited`; ask the site" in said
    assert "containers: container.runtime=apptainer (on the node)" in said


@pytest.mark.parametrize(("there", "skew"), [(1796040100, 0.0), (1796040160, 58.0), (1796040040, -60.0)])
def test_the_clock_of_a_node(there: int, skew: float) -> None:
    assert site_probe.parse(f"host n\ntime {there}\n", asked=1796040101.0, answered=1796040102.0).skew == skew


def test_a_node_without_anything() -> None:
    node = site_probe.parse("host n1\nnoise\n\n", asked=1.0, answered=2.0)
    assert (node.python, node.devices, node.skew) == (None, (), None)
    said = site_report.consequences(SITE, HERE, node)
    assert "no scontrol on the node: a run cannot requeue itself there, and a chain needs sbatch; ask the site" in said
    assert "no python3 on the node: set cluster.python to one that it has" in said


def test_this_machine_says_the_same_in_a_shell_without_extras(tmp_path: Path) -> None:
    found = site_probe.here()
    assert (found.host, found.kernel) == (os.uname().nodename, os.uname().release)
    done = subprocess.run(
        ["sh", "-c", site_probe.SCRIPT], capture_output=True, text=True, env={"PATH": "/bin:/usr/bin"}
    )
    assert done.stderr == ""


def test_ports_are_read_from_sysfs(tmp_path: Path) -> None:
    for name, layer, state, rate in (
        ("mlx5_0", "InfiniBand", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("rocep1s0", "Ethernet", "1: DOWN", "100 Gb/sec (4X EDR)"),
    ):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        for file, text in (("link_layer", layer), ("state", state), ("rate", rate)):
            (port / file).write_text(text + "\n")
    done = subprocess.run(["sh", "-c", site_probe.SCRIPT, "sh", str(tmp_path)], capture_output=True, text=True)
    assert site_probe.parse(done.stdout).devices == (
        site_probe.Device("mlx5_0", "1", "InfiniBand", "ACTIVE", "400 Gb/sec (4X NDR)"),
        site_probe.Device("rocep1s0", "1", "Ethernet", "DOWN", "100 Gb/sec (4X EDR)"),
    )


def test_json_holds_everything() -> None:
    assert json.loads(json.dumps(asdict(SITE)))["partitions"][1]["name"] == "gpu"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("mine.yaml", "expected DIR/cluster/NAME.yaml, where `stoker launch --config-dir DIR` looks"),
        ("cluster/mine.yml", "expected DIR/cluster/NAME.yaml"),
        ("cluster/slurm.yaml", "stoker has a profile slurm of its own; take another name"),
    ],
)
def test_a_profile_that_would_not_be_found_is_refused_before_anything(
    file: str, message: str, tmp_path: Path, fake_slurm: Any, capsys: Any
) -> None:
    assert cli.main(["site", "--write", str(tmp_path / file)]) == 2
    assert message in capsys.readouterr().err


def test_options_that_are_no_words_are_named(fake_slurm: Any, capsys: Any) -> None:
    assert cli.main(["site", "--probe", '--srun="']) == 2
    assert capsys.readouterr().err.startswith('stoker site: error: --srun ": cannot be split into words (')


def test_a_profile_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "no-folder").touch()
    path = tmp_path / "no-folder" / "cluster" / "mine.yaml"
    site = Site({}, (Partition("gpu", True),), {}, Inventory((LARGE, PLAIN), None, False))
    with pytest.raises(UserError, match=rf"--write {path}: cannot be written \(Not a directory\)"):
        site_verb._write(path, site, None, site_probe.here(), is_quiet=True)


def test_no_slurm(fake_slurm: Any, capsys: Any) -> None:
    assert cli.main(["site"]) == 1
    assert capsys.readouterr().err.startswith("stoker site: error: no Slurm here (sbatch not found)")


def test_a_launch_asks_three_questions_where_all_is_known(fake_slurm: Any, monkeypatch: Any, tmp_path: Path) -> None:
    from stoker.launcher import site_ask

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = "\n".join(f"{key} = {value}" for key, value in SETTINGS.items())
    partition = "PartitionName=all Default=YES State=UP TotalNodes=3"
    shown = {"config": config, "partition": partition, "node": NODES}
    cases = "".join(f"*{word}) cat <<'E'\n{text}\nE\n;; " for word, text in shown.items())
    fake_slurm.program("scontrol", f'case "$*" in {cases} esac')
    fake_slurm.program("sinfo", "printf 'cpu1\\x1fdown*\\x1fpower\\n'")
    fake_slurm.program("srun", "echo '  --container-image=IMAGE'")
    fake_slurm.program("sacctmgr", "printf 'Name|MaxWall|Account|User\\nlow||a|me\\n'")
    first = site_ask.ask()
    assert first is not None
    assert first.inventory.has_pyxis is True
    assert first.inventory.hardware == (LARGE, PLAIN)
    assert first.inventory.accounting == Accounting((Qos("low"),), (Association("a"),))
    assert first.out_of_service == {"cpu1": ("down*", "power")}
    before = {name: len(fake_slurm.calls(name)) for name in ("scontrol", "sinfo", "srun", "sacctmgr")}
    assert before == {"scontrol": 3, "sinfo": 1, "srun": 1, "sacctmgr": 2}
    second = site_ask.ask()
    assert second is not None
    assert (second.inventory, second.age > 0) == (first.inventory, True)
    after = {name: len(fake_slurm.calls(name)) - before[name] for name in before}
    assert after == {"scontrol": 2, "sinfo": 1, "srun": 0, "sacctmgr": 0}


@pytest.mark.parametrize("asked", [["--probe"], ["--probe", "main"]])
def test_what_a_probe_sees_is_known_to_the_next_launch(
    asked: list[str], fake_slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(site_probe, "here", lambda: HERE)  # it needs a shell, and the PATH has stand-ins alone
    partition = "PartitionName=main Default=YES State=UP TotalNodes=1"
    fake_slurm.program(
        "scontrol", f'case "$*" in *config) echo "ClusterName = c";; *partition) echo "{partition}";; esac'
    )
    fake_slurm.program("sbatch", "true")
    fake_slurm.program("srun", "echo host n1; echo command sbatch /usr/bin/sbatch; echo command srun /usr/bin/srun")
    assert cli.main(["site", *asked]) == 0
    found = site_ask.ask()
    assert found is not None
    assert found.probes == {"main": Probe("n1", ("srun", "sbatch"))}
    again = site_ask.ask(refresh=True)
    assert again is not None
    assert again.probes == found.probes
