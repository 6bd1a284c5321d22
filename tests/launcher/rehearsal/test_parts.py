"""Ports, programs, logs and Slurm's answers: the small parts, without a cluster."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from stoker.launcher.rehearsal import files, network, observe, programs
from stoker.launcher.rehearsal.spec import ClusterSpec, Layout


def test_port_blocks_of_two_clusters_never_overlap() -> None:
    first, second = network.claim_ports("/same"), network.claim_ports("/same")
    try:
        assert abs(first.first_port - second.first_port) >= 122
    finally:
        first.lock.close()
        second.lock.close()
    again = network.claim_ports("/same")
    again.lock.close()
    assert again.first_port == first.first_port


def test_ports_are_outside_the_ephemeral_range_and_not_in_use() -> None:
    low, high = (int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    claim = network.claim_ports("/some")
    claim.lock.close()
    assert claim.first_port + 122 <= low or claim.first_port > high
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", claim.first_port + 50))
        taken.listen()
        other = network.claim_ports("/some")
        other.lock.close()
    assert other.first_port != claim.first_port


def test_listening_is_seen_without_connecting() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not network.listens(port)
        server.listen()
        assert network.listens(port)


def test_missing_programs_are_named_with_the_command_that_installs_them() -> None:
    text = programs.how_to_install(ClusterSpec(), ("slurmctld", "munged"))
    assert text == ("not installed: slurmctld, munged; as root: apt-get install slurm-wlm munge iproute2 procps")
    text = programs.how_to_install(ClusterSpec(database=True), ("slurmdbd",))
    assert text == "not installed: slurmdbd; as root: apt-get install mariadb-server slurmdbd"


def test_search_path_skips_the_commands_of_another_cluster(tmp_path: Path) -> None:
    (tmp_path / ".stoker-cluster").touch()
    path = programs.search_path(ClusterSpec(slurm_prefix="/opt/slurm"), f"{tmp_path}/bin:/usr/bin")
    assert path.split(":")[:3] == ["/opt/slurm/bin", "/opt/slurm/sbin", "/usr/bin"]
    assert str(tmp_path) not in path


def test_log_tail_shows_each_line_once_and_the_last_ones(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "slurmd-n1.out").write_text("slurmd: first\nslurmd: fatal: broken\nslurmd: only here\n")
    (tmp_path / "log" / "slurmd-n1.log").write_text(
        "[2026-01-01T00:00:00] first\n\n[2026-01-01T00:00:01] fatal: broken\n"
    )
    everything = ["slurmd: only here", "slurmd: first", "slurmd: fatal: broken"]
    assert files.log_tail(Layout(tmp_path), "slurmd-n1") == everything
    assert files.log_tail(Layout(tmp_path), "slurmd-n1", lines=2) == everything[1:]


JOB = """JobId=7 JobName=train me
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=2 Reboot=0 ExitCode=0:0
   ReqNodeList=(null) ExcNodeList=n9
   NodeList=n[1-2]
   BatchHost=n1
   NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
"""


def test_a_job_is_read_from_scontrol() -> None:
    assert observe.parse_job(JOB) == observe.Job("7", "RUNNING", "None", "n[1-2]", 2, 2, "n1")


def test_a_pending_job_has_no_nodes_and_a_range_of_counts() -> None:
    text = "JobId=8 JobState=PENDING Reason=Priority Restarts=0 NodeList=(null) NumNodes=2-4"
    assert observe.parse_job(text) == observe.Job("8", "PENDING", "Priority", "", 2, 0, "")


def test_what_is_not_a_job_is_refused() -> None:
    with pytest.raises(ValueError, match="not a job"):
        observe.parse_job("slurm_load_jobs error: Invalid job id specified")


def test_node_states_are_read_from_sinfo() -> None:
    assert observe.parse_node_states("n1 idle\nn2 down*\n\n") == {"n1": "idle", "n2": "down*"}


def test_foreign_directories_are_left_alone(tmp_path: Path) -> None:
    files.refuse_foreign(Layout(tmp_path))
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="neither empty nor a cluster's directory"):
        files.refuse_foreign(Layout(tmp_path))
    (tmp_path / ".stoker-cluster").touch()
    files.refuse_foreign(Layout(tmp_path))
    files.refuse_foreign(Layout(tmp_path / "new"))


def test_removal_takes_unreadable_directories_and_spares_what_others_wrote(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "c")
    files.make_directories(layout, shared_machine=False)
    layout.marker.touch()
    locked = layout.nodes / "n1" / "tmp" / "locked"
    (locked / "inner").mkdir(parents=True)
    (locked / "inner").chmod(0)
    locked.chmod(0)
    (layout.root / "users.txt").write_text("keep me")
    files.remove(layout)
    files.remove_marker(layout)
    assert [path.name for path in layout.root.iterdir()] == ["users.txt"]
