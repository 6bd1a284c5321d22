"""A run on nodes whose names mislead: they resolve to an interface that leads nowhere, and their order is not that of
the switches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stoker.launcher.rehearsal.cluster import Cluster
from stoker.launcher.rehearsal.lab import Lab
from stoker.launcher.rehearsal.spec import ClusterSpec
from stoker.launcher.run import views
from stoker.launcher.run.outcome import Cause

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(os.geteuid() != 0, reason="changes the nodes' own network: root")]

SWITCHES = ("SwitchName=leaf1 Nodes=n[1,3]", "SwitchName=leaf2 Nodes=n2", "SwitchName=top Switches=leaf[1-2]")
# Run on each node: a second interface with an address that no other node reaches, and all names lead there.
MISLEAD = """
set -e
n=$SLURMD_NODENAME
ip link add nowhere type veth peer name nowhere1
ip addr add 192.0.2.${n#n}/24 dev nowhere
ip link set nowhere up
ip link set nowhere1 up
sed 's/^10[.]217[.]0[.]1\\([1-3]\\) /192.0.2.\\1 /' /etc/hosts > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
getent hosts n1 n2 n3
"""


def test_the_run_comes_up_by_the_right_interface_with_ranks_in_the_switches_order(
    slurm_available: None, short_directory: Path, tmp_path: Path
) -> None:
    spec = ClusterSpec(nodes=3, isolate=True, share=(str(tmp_path),), topology=SWITCHES)
    with Cluster.start(spec, short_directory) as cluster:
        said = cluster.run(["srun", "-N3", "-n3", "bash", "-c", MISLEAD]).stdout
        assert sorted(set(said.split())) == ["192.0.2.1", "192.0.2.2", "192.0.2.3", "n1", "n2", "n3"]
        lab = Lab(tmp_path, cluster, nodes=3)
        lab.prepare()
        run = lab.launch("astray", "train.steps=5", "checkpoint.interval=0", "parallel.timeout=30", failpoints="")
        outcome = run.wait_end(90.0)
        assert (outcome.cause, outcome.step) == (Cause.FINISHED, 5), run.story()
        assert len(run.outcomes()) == 1, run.story()
        assert run.nodes() == ["n1", "n3", "n2"]
        settings = {e["writer"]: e["settings"] for e in views.events(run.dir) if e["event"] == "fabric"}
    assert sorted(settings) == ["n1", "n2", "n3"]
    for node in settings.values():
        assert (node["GLOO_SOCKET_IFNAME"]["value"], node["GLOO_SOCKET_IFNAME"]["from"]) == ("eth0", "detected")
