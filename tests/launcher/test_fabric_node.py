"""A node's fabric at work: what workers are given, and what is told of it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import fabric_node
from stoker.launcher.agent import with_launcher
from stoker.launcher.fabric_node import Fabric, local_addresses, nccl_files
from stoker.launcher.node import Node
from stoker.launcher.run.events import EventLog
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.wire import Channel

Machine = Callable[..., Path]
SETTINGS = {"detect": True, "interface": None, "bind": True}


class Told:
    """A fabric with its events and its lines in the log."""

    def __init__(self, tmp_path: Path, root: Path, **settings: Any) -> None:
        self.path, self.lines = tmp_path / "events.jsonl", list[str]()
        log = EventLog(self.path, "n1", 1)
        self.fabric = Fabric({**SETTINGS, **settings}, log, self.lines.append, root)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("NCCL_", "GLOO_", "FI_", "CUDA_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_port_that_dies_between_generations_is_told_and_no_longer_used(tmp_path: Path, machine: Machine) -> None:
    root = machine("dual-rail-dead-port")
    port = root / "sys/class/infiniband/mlx5_1/ports/1"
    for name, value in (("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"), ("rate", "200 Gb/sec (4X HDR)")):
        (port / name).write_text(value)
    told = Told(tmp_path, root)
    assert told.fabric.form(4, None).env["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert [e["event"] for e in told.events()] == ["fabric"]
    told.fabric.form(4, None)
    assert len(told.events()) == 1
    (port / "state").write_text("1: DOWN\n")
    (port / "phys_state").write_text("2: Polling\n")
    assert told.fabric.form(4, None).env["NCCL_IB_HCA"] == "=mlx5_0:1"
    down, fabric = told.events()[1:]
    assert (down["event"], down["device"], down["port"], down["state"]) == ("port_down", "mlx5_1", 1, "DOWN")
    assert fabric["settings"]["NCCL_IB_HCA"] == {
        "value": "=mlx5_0:1",
        "from": "detected",
        "why": "active infiniband ports of the compute network",
    }
    assert "fabric: port mlx5_1:1 is down (DOWN, Polling); 1 rails are left" in told.lines


def test_the_interface_is_the_one_with_the_address_that_others_reach(tmp_path: Path, machine: Machine) -> None:
    address = next(a for n, a in local_addresses() if n == "lo")
    assert ("lo", "127.0.0.1") in local_addresses()
    assert Told(tmp_path, machine("none")).fabric.form(1, address).env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in Told(tmp_path, machine("none")).fabric.form(1, "192.0.2.77").env


def test_switched_off_it_sets_nothing(tmp_path: Path, machine: Machine) -> None:
    told = Told(tmp_path, machine("infiniband"), detect=False, bind=False)
    formed = told.fabric.form(2, "127.0.0.1")
    assert (formed.env, [s.cpus for s in formed.seats], told.events()) == ({}, [None, None], [])
    only = Told(tmp_path, machine("infiniband"), detect=False, bind=False, interface="ibp24s0")
    assert only.fabric.form(2, None).env == {"GLOO_SOCKET_IFNAME": "ibp24s0", "NCCL_SOCKET_IFNAME": "=ibp24s0"}


def test_a_detection_that_fails_costs_the_detection(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise RecursionError("what a machine")

    monkeypatch.setattr(fabric_node, "read_facts", fail)
    told = Told(tmp_path, machine("none"))
    formed = told.fabric.form(3, None)
    assert (formed.env, len(formed.seats)) == ({}, 3)
    assert [(e["event"], e["error"]) for e in told.events()] == [("fabric_failed", "RecursionError: what a machine")]


def test_a_device_that_does_not_answer_holds_up_nobody(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine("infiniband")
    state = root / "sys/class/infiniband/mlx5_0/ports/1/state"
    state.unlink()
    os.mkfifo(state)  # who reads it waits, as on a driver that waits for its device
    monkeypatch.setattr(fabric_node, "LOOK_LIMIT", 0.3)
    told = Told(tmp_path, root)
    assert told.fabric.form(2, None).env == {}
    assert told.lines == ["fabric: not detected: a device did not answer within 0.3 s"]
    with open(state, "w") as writer:  # let the reader go
        writer.write("4: ACTIVE")


def test_files_of_nccl_count_as_set_by_the_user(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_IB_HCA=mlx5_0\nNCCL_DEBUG=INFO\n")
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=WARN\n")
    (tmp_path / "mine").write_text("NCCL_DEBUG=TRACE\n")
    site = str(tmp_path / "etc/nccl.conf")
    home = nccl_files(tmp_path, {"HOME": str(tmp_path)})
    assert home == {"NCCL_DEBUG": ("WARN", str(tmp_path / ".nccl.conf")), "NCCL_IB_HCA": ("mlx5_0", site)}
    mine = nccl_files(tmp_path, {"HOME": str(tmp_path), "NCCL_CONF_FILE": str(tmp_path / "mine")})
    assert mine["NCCL_DEBUG"] == ("TRACE", str(tmp_path / "mine"))


def test_workers_are_forked_with_their_variables_and_cpus(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "32")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    attempt = RunDir(tmp_path / "run").attempt(1)
    attempt.events("n1").parent.mkdir(parents=True)
    attempt.log("n1").parent.mkdir(parents=True)
    events = EventLog(attempt.events("n1"), "n1", 1)
    config = {"fabric": SETTINGS, "task": {"cmd": []}}
    node = Node(RunDir(tmp_path / "run"), attempt, config, lambda _: None, events)
    node._fabric.root = machine("dual-rail-dead-port")
    ours, theirs = socket.socketpair()
    node._to_zygote, zygote = Channel(ours), Channel(theirs)
    place = {"generation": 1, "first_rank": 4, "procs_per_node": 2, "world_size": 6}
    node.form(place | {"store_host": "h", "store_port": 1, "address": "127.0.0.1"})
    writer, *forks = (zygote.next() for _ in range(3))
    assert [f["spec"]["cpus"] for f in forks] == [list(range(8)), list(range(8, 16))]
    assert (writer["what"], writer["spec"]["cpus"]) == ("writer", list(range(16, 32)))
    assert [f["env"]["NCCL_IB_HCA"] for f in forks] == ["=mlx5_0:1"] * 2
    assert [f["env"]["GLOO_SOCKET_IFNAME"] for f in forks] == ["lo"] * 2
    assert "mlx5_1:1 is down" in attempt.log("n1").read_text()
    node.close()
    zygote.close()


def test_slurms_own_way_to_the_supervisor_is_tried_second() -> None:
    assert with_launcher("h:7,192.0.2.1:7,127.0.0.1:7", "10.0.0.1") == "h:7,10.0.0.1:7,192.0.2.1:7,127.0.0.1:7"
    assert with_launcher("h:7,10.0.0.1:7", "10.0.0.1") == "h:7,10.0.0.1:7"
    assert with_launcher("h:7", None) == "h:7"
