"""Isolated nodes: each a machine of its own, whose power and network cable can be pulled. Real daemons."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from stoker.launcher.rehearsal.cluster import Cluster, ClusterError, wait_until

pytestmark = pytest.mark.slurm


def commands(cluster: Cluster, node: str) -> list[str]:
    return [process.command() for process in cluster.processes_on(node)]


def names(cluster: Cluster, node: str) -> list[str]:
    return [process.name for process in cluster.processes_on(node)]


def test_each_node_has_its_own_name_address_and_process_table(isolated: Cluster) -> None:
    script = "echo $(hostname) $(hostname -i) $(cat /proc/1/comm) $(getent hosts n3 | cut -d' ' -f1)"
    done = isolated.run(["srun", "-N2", "-w", "n1,n2", "sh", "-c", script])
    assert sorted(done.stdout.splitlines()) == [
        "n1 10.217.0.11 node:n1 10.217.0.13",
        "n2 10.217.0.12 node:n2 10.217.0.13",
    ]


def test_scratch_is_the_nodes_own_and_the_shared_directory_is_not(isolated: Cluster, tmp_path: Path) -> None:
    script = f"touch /tmp/mine-$(hostname) /dev/shm/mine-$(hostname) {tmp_path}/shared-$(hostname)"
    isolated.run(["srun", "-N2", "-w", "n1,n2", "sh", "-c", script])
    listing = isolated.run(["srun", "-w", "n1", "sh", "-c", f"ls -d /tmp/mine* /dev/shm/mine*; ls {tmp_path}"]).stdout
    assert listing.split() == ["/dev/shm/mine-n1", "/tmp/mine-n1", "shared-n1", "shared-n2"]
    assert not list(Path("/tmp").glob("mine-n*")) + list(Path("/dev/shm").glob("mine-n*"))


def test_a_name_that_nobody_knows_is_refused_without_asking_a_server(isolated: Cluster) -> None:
    # With a DNS server that cannot be reached this would take ten seconds or more.
    code = "import socket, time; t = time.monotonic(); e = ''\ntry: socket.getaddrinfo('nowhere.invalid', 1)\n"
    code += "except OSError as error: e = 'refused'\nprint(e, time.monotonic() - t < 3)"
    assert isolated.enter("n1", ["python3", "-c", code]).stdout == "refused True\n"


def test_commands_work_from_outside_and_by_the_same_path_inside(isolated: Cluster, tmp_path: Path) -> None:
    sbatch = isolated.layout.bin / "sbatch"
    done = subprocess.run(
        [sbatch, "--parsable", "--wait", "--output=out", "--wrap", f"{isolated.layout.bin}/srun hostname"],
        env=isolated.env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip().isdigit()
    assert (tmp_path / "out").read_text().startswith("n")


def test_this_machine_sees_nothing_of_the_clusters_network(isolated: Cluster) -> None:
    links = Path("/proc/self/net/dev").read_text()
    assert "nodes" not in links
    assert "n1:" not in links.replace(" ", "")
    inside = isolated.run(["cat", "/proc/self/net/dev"]).stdout
    assert "nodes:" in inside
    assert "n1:" in inside
    assert str(isolated.layout.root) not in Path("/proc/self/mountinfo").read_text()


def test_a_frozen_node_goes_on_when_thawed(isolated: Cluster) -> None:
    isolated.freeze("n8")
    assert {process.state for process in isolated.processes_on("n8")} == {"T"}
    isolated.thaw("n8")
    assert isolated.run(["srun", "-w", "n8", "hostname"]).stdout == "n8\n"


class Faults:
    """Three faults at once, so that one wait is enough: n2 of a two-node job loses power, n3 its network, n4 its slurmd
    for a moment."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        quiet = "--output=/dev/null"
        # Should srun notice first that n2 is gone, its job must not end of that: Slurm's word on the node is to come.
        lasting = "--wrap=srun sleep 600; exec sleep 606"
        self.two_nodes = cluster.submit(["-N2", "-w", "n1,n2", "--requeue", quiet, lasting])
        self.cut_off = cluster.submit(["-w", "n3", "--no-requeue", quiet, "--wrap=exec sleep 602"])
        self.headless = cluster.submit(["-w", "n4", quiet, "--wrap=exec sleep 603"])
        for job in (self.two_nodes, self.cut_off, self.headless):
            cluster.wait_for_job(job, "RUNNING")
        wait_until(lambda: "sleep" in names(cluster, "n2"), 20, lambda: "n2's task")
        for node, task in (("n3", "sleep 602"), ("n4", "sleep 603")):
            wait_until(
                lambda node=node, task=task: task in commands(cluster, node), 20, lambda node=node: f"{node}'s task"
            )
        cluster.crash("n2")
        cluster.cut("n3")
        cluster.kill_slurmd("n4")
        cluster.restart_node("n4")
        cluster.wait_for_nodes("down", "n2", "n3")


@pytest.fixture(scope="module")
def faults(isolated: Cluster) -> Iterator[Faults]:
    faults = Faults(isolated)
    yield faults
    isolated.run(["scancel", faults.two_nodes, faults.headless])


def test_a_node_without_power_is_gone_and_its_job_waits_to_restart(faults: Faults) -> None:
    assert commands(faults.cluster, "n2") == []
    job = faults.cluster.job(faults.two_nodes)
    assert job.restarts == 1
    assert job.state in ("PENDING", "COMPLETING")
    with pytest.raises(ClusterError, match="n2 is powered off"):
        faults.cluster.cut("n2")


def test_a_node_without_network_works_on_alone(faults: Faults) -> None:
    assert faults.cluster.job(faults.cut_off).state == "NODE_FAIL"
    assert "sleep 602" in commands(faults.cluster, "n3")


def test_a_slurmd_that_was_away_for_a_moment_loses_nothing(faults: Faults) -> None:
    assert faults.cluster.job(faults.headless).state == "RUNNING"
    assert "sleep 603" in commands(faults.cluster, "n4")


def test_nodes_come_back_and_the_job_restarts(faults: Faults) -> None:
    cluster = faults.cluster
    # Its old /tmp takes a while to be emptied.
    crowd = cluster.layout.nodes / "n2" / "tmp" / "crowd"
    crowd.mkdir()
    for k in range(5000):
        (crowd / str(k)).touch()
    cluster.restart_node("n2")
    # At once, not a moment later, whoever enters it is in the node's own directories and not in the machine's.
    with tempfile.NamedTemporaryFile(dir="/tmp") as outside:
        assert cluster.enter("n2", ["test", "-e", outside.name]).returncode == 1
    cluster.heal("n3")
    job = cluster.wait_for_job(faults.two_nodes, "RUNNING")
    assert (job.nodes, job.restarts) == ("n[1-2]", 1)
    assert cluster.run(["srun", "-w", "n2", "--immediate=20", "hostname"]).stdout == "n2\n"
    # Slurm finds a healed node by itself, and its leftover task ends then.
    cluster.wait_for_nodes("idle", "n3")
    wait_until(lambda: "sleep 602" not in commands(cluster, "n3"), 30, lambda: "n3's old task to end")
