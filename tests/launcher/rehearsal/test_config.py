"""The text of Slurm's configuration files, version by version."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.launcher.rehearsal import config
from stoker.launcher.rehearsal.config import Site
from stoker.launcher.rehearsal.spec import ClusterSpec, Layout

LAYOUT = Layout(Path("/c"))


def site(version: tuple[int, int] = (22, 5)) -> Site:
    return Site(layout=LAYOUT, hostname="box", user="alice", version=version, first_port=20000)


def lines(spec: ClusterSpec, version: tuple[int, int] = (22, 5)) -> list[str]:
    return config.slurm_conf(spec, site(version)).splitlines()


def values(spec: ClusterSpec, version: tuple[int, int] = (22, 5)) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines(spec, version) if not line.startswith(("Node", "Partition")))


def test_plain_nodes_share_the_address_and_differ_in_port() -> None:
    nodes = [line for line in lines(ClusterSpec(nodes=2, cpus=3, memory=500, gpus=2)) if line.startswith("NodeName")]
    assert nodes == [
        "NodeName=n1 NodeHostname=box NodeAddr=127.0.0.1 Port=20002 Sockets=1 CoresPerSocket=3 ThreadsPerCore=1"
        " RealMemory=500 Gres=gpu:2 State=UNKNOWN",
        "NodeName=n2 NodeHostname=box NodeAddr=127.0.0.1 Port=20003 Sockets=1 CoresPerSocket=3 ThreadsPerCore=1"
        " RealMemory=500 Gres=gpu:2 State=UNKNOWN",
    ]


def test_isolated_nodes_have_addresses_and_names_of_their_own() -> None:
    spec = ClusterSpec(nodes=2, isolate=True, gpus=0)
    nodes = [line.split()[:3] for line in lines(spec) if line.startswith("NodeName")]
    assert nodes == [
        ["NodeName=n1", "NodeHostname=n1", "NodeAddr=10.217.0.11"],
        ["NodeName=n2", "NodeHostname=n2", "NodeAddr=10.217.0.12"],
    ]
    assert values(spec)["SlurmctldHost"] == "box(10.217.0.1)"
    assert config.hosts(spec, "box").splitlines() == [
        "127.0.0.1 localhost",
        "::1 localhost",
        "10.217.0.1 box",
        "10.217.0.11 n1",
        "10.217.0.12 n2",
    ]


def test_switches_of_the_spec_reach_slurm() -> None:
    spec = ClusterSpec(nodes=2, topology=("SwitchName=s1 Nodes=n1", "SwitchName=s2 Nodes=n2"))
    assert values(spec)["TopologyPlugin"] == "topology/tree"
    assert config.topology_conf(spec) == "SwitchName=s1 Nodes=n1\nSwitchName=s2 Nodes=n2\n"
    assert "TopologyPlugin" not in values(ClusterSpec())
    with pytest.raises(ValueError, match="not one 'SwitchName="):
        ClusterSpec(topology=("Nodes=n1",))


def test_timing_of_the_spec_reaches_slurm() -> None:
    spec = ClusterSpec(cred_expire=7, kill_wait=8, slurmd_timeout=9, message_timeout=20, grace_time=11, short_minutes=3)
    found = values(spec)
    assert found["AuthInfo"] == "socket=/c/run/munge.socket,cred_expire=7"
    assert (found["KillWait"], found["SlurmdTimeout"], found["MessageTimeout"]) == ("8", "9", "20")
    # Slurm warns unless it is five times MessageTimeout.
    assert found["UnkillableStepTimeout"] == "100"
    partitions = {line.split()[0]: line for line in lines(spec) if line.startswith("PartitionName")}
    assert "GraceTime=11" in partitions["PartitionName=main"]
    assert "GraceTime=0" in partitions["PartitionName=grace0"]
    assert "MaxTime=3" in partitions["PartitionName=short"]


def test_urgent_partition_outranks_the_others_which_are_preempted() -> None:
    partitions = {line.split()[0]: line for line in lines(ClusterSpec()) if line.startswith("PartitionName")}
    assert list(partitions) == [f"PartitionName={name}" for name in ("main", "grace0", "short", "urgent")]
    for name in ("main", "grace0", "short"):
        assert "PriorityTier=10 PreemptMode=REQUEUE" in partitions[f"PartitionName={name}"]
    assert "PriorityTier=100 PreemptMode=OFF" in partitions["PartitionName=urgent"]
    assert [name for name, line in partitions.items() if "Default=YES" in line] == ["PartitionName=main"]


def test_requeue_and_preemption_policies_follow_the_spec() -> None:
    assert values(ClusterSpec())["JobRequeue"] == "1"
    assert "SlurmctldParameters" not in values(ClusterSpec())
    other = values(ClusterSpec(job_requeue=False, send_user_signal=True, preempt_mode="CANCEL"))
    assert other["JobRequeue"] == "0"
    assert other["PreemptMode"] == "CANCEL"
    assert other["SlurmctldParameters"] == "preempt_send_user_signal"


def test_settings_replace_the_generated_line_whatever_its_case() -> None:
    found = lines(ClusterSpec(settings=("killwait=77", "MaxJobCount=5")))
    assert [line for line in found if line.lower().startswith("killwait")] == ["killwait=77"]
    assert found[-1] == "MaxJobCount=5"


@pytest.mark.parametrize(
    ("version", "cgroup", "names_cred_plugin"),
    [
        ((22, 5), "CgroupAutomount=no\n", True),
        ((23, 2), "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n", False),
        ((23, 11), "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n", False),
        ((24, 11), "CgroupPlugin=disabled\nIgnoreSystemd=yes\n", False),
        ((25, 5), "CgroupPlugin=disabled\nIgnoreSystemd=yes\n", False),
    ],
)
def test_versions_differ_in_cgroups_and_credential_plugin(
    version: tuple[int, int], cgroup: str, names_cred_plugin: bool
) -> None:
    assert config.cgroup_conf(version) == cgroup
    assert ("CredType" in values(ClusterSpec(), version)) is names_cred_plugin


@pytest.mark.parametrize(("gpus", "file"), [(1, "/c/dev/gpu0"), (8, "/c/dev/gpu[0-7]")])
def test_gpus_are_device_files(gpus: int, file: str) -> None:
    assert f"Count={gpus} File={file} " in config.gres_conf(ClusterSpec(gpus=gpus), LAYOUT)


def test_nodes_may_have_typed_gpus_features_and_disk() -> None:
    spec = ClusterSpec(nodes=1, gpus=8, gpu_type="h100", node_options="Features=ib,rack1 TmpDisk=900000")
    (node,) = (line for line in lines(spec) if line.startswith("NodeName"))
    assert node.endswith(" Gres=gpu:h100:8 Features=ib,rack1 TmpDisk=900000 State=UNKNOWN")
    assert "Name=gpu Type=h100 Count=8 File=/c/dev/gpu[0-7] Flags=nvidia_gpu_env" in config.gres_conf(spec, LAYOUT)


def test_no_gpus_means_no_gres() -> None:
    assert config.gres_conf(ClusterSpec(gpus=0), LAYOUT) == "AutoDetect=off\n"
    assert "Gres" not in config.slurm_conf(ClusterSpec(gpus=0), site())


def test_accounting_finds_munge_and_needs_no_password() -> None:
    assert values(ClusterSpec())["AccountingStorageType"] == "accounting_storage/none"
    spec = ClusterSpec(database=True)
    assert values(spec)["AccountingStorageType"] == "accounting_storage/slurmdbd"
    assert values(spec)["AccountingStoragePass"] == "/c/run/munge.socket"
    assert values(spec)["AccountingStoragePort"] == "20001"
    text = config.slurmdbd_conf(spec, site())
    assert "DbdPort=20001" in text
    assert "StoragePass" not in text


def test_name_look_up_stays_on_files() -> None:
    machine = "passwd: files systemd\nhosts: files mdns4_minimal dns\n"
    assert config.nsswitch_conf(machine) == "passwd: files systemd\nhosts: files\n"


def test_each_directory_has_a_cluster_name_of_its_own() -> None:
    first, second = (config.cluster_name(Layout(Path(name))) for name in ("/a", "/b"))
    assert first != second
    assert first.startswith("stoker_")
    assert first == first.lower()
