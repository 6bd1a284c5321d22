"""What follows from a node's devices for NCCL, gloo and libfabric, on the trees in sysfs/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from stoker.launcher.fabric import Given, Plan, matches, plan, read_nccl_file
from stoker.launcher.fabric_sysfs import Port, parse_cpus, read_facts

Machine = Callable[..., Path]
PORT = "sys/class/infiniband/{}/ports/1/{}"
NEAR = "=mlx5_0:1,mlx5_10:1,mlx5_11:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_9:1"


def planned(root: Path, **given: object) -> Plan:
    values: dict[str, object] = {"environ": {}, "files": {}, "leading": "eno1", **given}
    return plan(read_facts(root), Given(**values))  # type: ignore[arg-type]


def test_infiniband_takes_the_ports_behind_the_gpus_switches_and_not_storage_of_the_same_rate(machine: Machine) -> None:
    found = planned(machine("infiniband"))
    assert found.kind == "infiniband"
    assert found.environment() == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GLOO_SOCKET_IFNAME": "eno1",
        "NCCL_IB_HCA": NEAR,
        "NCCL_SOCKET_IFNAME": "=eno1",
    }
    assert found.left_out == (
        ("mlx5_1:1", "not behind a GPU's PCIe switch"),
        ("mlx5_2:1", "not behind a GPU's PCIe switch"),
        ("mlx5_7:1", "Ethernet beside InfiniBand"),
        ("mlx5_8:1", "Ethernet beside InfiniBand"),
    )
    assert (found.dead, found.hints) == ((), ())


@pytest.mark.parametrize(
    ("state", "phys_state"), [("1: DOWN", "2: Polling"), ("1: DOWN", "6: LinkErrorRecovery"), ("2: INIT", "5: LinkUp")]
)
def test_a_dead_rail_is_named_and_the_others_go_on(machine: Machine, state: str, phys_state: str) -> None:
    changes = {PORT.format("mlx5_4", "state"): state, PORT.format("mlx5_4", "phys_state"): phys_state}
    found = planned(machine("infiniband", changes))
    assert found.environment()["NCCL_IB_HCA"] == NEAR.replace("mlx5_4:1,", "")
    assert [(p.name, f"{p.state}") for p in found.dead] == [("mlx5_4:1", state.split(": ")[1])]


def test_a_rail_at_half_its_rate_stays_a_rail_and_is_told(machine: Machine) -> None:
    found = planned(machine("infiniband", {PORT.format("mlx5_4", "rate"): "200 Gb/sec (4X HDR)"}))
    assert found.environment()["NCCL_IB_HCA"] == NEAR
    assert found.hints == ("mlx5_4:1 runs at 200 of 400 Gb/s",)


def test_dual_rail_with_a_dead_port_and_no_switches(machine: Machine) -> None:
    found = planned(machine("dual-rail-dead-port"))
    assert found.environment()["NCCL_IB_HCA"] == "=mlx5_0:1"
    assert [p.name for p in found.dead] == ["mlx5_1:1"]
    assert found.left_out == (("mlx5_2:1", "Ethernet beside InfiniBand"), ("mlx5_3:1", "100 of 200 Gb/s"))


def test_no_infiniband_port_that_works_is_not_replaced_by_ethernet(machine: Machine) -> None:
    dead = {PORT.format(d, "state"): "1: DOWN" for d in ("mlx5_0", "mlx5_3")}
    found = planned(machine("dual-rail-dead-port", dead))
    assert "NCCL_IB_HCA" not in found.environment()
    assert found.hints == ("no InfiniBand port is active: NCCL has no fast network on this node",)


def test_a_port_that_an_administrator_switched_off_is_no_dead_one(machine: Machine) -> None:
    found = planned(machine("dual-rail-dead-port", {PORT.format("mlx5_1", "phys_state"): "3: Disabled"}))
    assert found.dead == ()
    assert ("mlx5_1:1", "no link (DOWN, Disabled)") in found.left_out


def test_roce_takes_the_gpus_ports_with_an_address(machine: Machine) -> None:
    found = planned(machine("roce"), nccl=(2, 29))
    assert found.kind == "roce"
    assert found.environment()["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1,mlx5_2:1"
    assert [p.name for p in found.dead] == ["mlx5_3:1"]
    assert found.left_out == (("mlx5_bond_0:1", "not behind a GPU's PCIe switch"), ("rxe0:1", "a software device"))
    # NCCL 2.21 and later find the address of each port themselves.
    assert "NCCL_IB_GID_INDEX" not in found.environment()


def test_a_virtual_function_is_a_rail_only_where_there_is_nothing_else(machine: Machine) -> None:
    virtual = "sys/devices/pci0000:64/0000:64:02.0/0000:65:00.0/physfn"
    changes = {PORT.format("mlx5_1", "state"): "4: ACTIVE", PORT.format("mlx5_1", "rate"): "200 Gb/sec (4X HDR)"}
    found = planned(machine("dual-rail-dead-port", changes | {virtual: ""}))
    assert found.environment()["NCCL_IB_HCA"] == "=mlx5_0:1"
    assert ("mlx5_1:1", "a virtual function") in found.left_out
    others = {PORT.format(d, "state"): "1: DOWN" for d in ("mlx5_0", "mlx5_2", "mlx5_3")}
    found = planned(machine("dual-rail-dead-port", changes | others | {virtual: ""}))
    assert found.environment()["NCCL_IB_HCA"] == "=mlx5_1:1"


def test_an_older_nccl_is_told_the_roce_address_when_it_stands_in_one_place(machine: Machine) -> None:
    assert planned(machine("roce"), nccl=(2, 20)).environment()["NCCL_IB_GID_INDEX"] == "3"
    elsewhere = {PORT.format("mlx5_1", f"gid_attrs/types/{i}"): kind for i, kind in ((2, "RoCE v2"), (3, "IB/RoCE v1"))}
    moved = machine("roce", elsewhere)
    assert "NCCL_IB_GID_INDEX" not in planned(moved, nccl=(2, 20)).environment()


def test_efa_needs_libfabrics_provider_and_a_plugin(machine: Machine) -> None:
    root = machine("efa")
    found = planned(root)
    assert found.kind == "efa"
    assert [p.name for p in found.rails] == ["rdmap144s27:1", "rdmap160s27:1", "rdmap16s27:1", "rdmap32s27:1"]
    assert found.environment() == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "FI_PROVIDER": "efa",
        "GLOO_SOCKET_IFNAME": "eno1",
        "NCCL_SOCKET_IFNAME": "=eno1",
    }
    assert found.hints == ("EFA without its plug-in for NCCL (aws-ofi-nccl: libnccl-net*.so): NCCL would use TCP",)
    assert planned(root, has_plugin=True).hints == ()


def test_without_rdma_only_the_interface_is_set(machine: Machine) -> None:
    found = planned(machine("none"))
    assert found.kind == "none"
    assert found.environment() == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GLOO_SOCKET_IFNAME": "eno1",
        "NCCL_SOCKET_IFNAME": "=eno1",
    }


def test_without_gpus_nccl_is_left_alone(tmp_path: Path) -> None:
    assert planned(tmp_path).environment() == {"GLOO_SOCKET_IFNAME": "eno1"}
    assert planned(tmp_path, leading=None).environment() == {}


def test_what_the_user_or_the_site_set_stays_and_is_told(machine: Machine) -> None:
    environ = {"NCCL_IB_HCA": "mlx5_0", "GLOO_SOCKET_IFNAME": "", "HOME": "/h"}
    found = planned(
        machine("infiniband", {PORT.format("mlx5_4", "state"): "1: DOWN"}),
        environ=environ,
        files={"NCCL_SOCKET_IFNAME": ("ib0", "/etc/nccl.conf"), "NCCL_IB_HCA": ("other", "/etc/nccl.conf")},
        interface="eth7",
    )
    assert found.environment() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [(s.name, s.value, s.source) for s in found.settings] == [
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "detected"),
        ("GLOO_SOCKET_IFNAME", "", "environment"),
        ("NCCL_IB_HCA", "mlx5_0", "environment"),
        ("NCCL_SOCKET_IFNAME", "ib0", "/etc/nccl.conf"),
    ]
    # The dead port is not among those the user named.
    assert found.dead == ()


def test_a_configured_interface_wins_over_the_detected_one_and_is_looked_for(machine: Machine) -> None:
    found = planned(machine("roce"), interface="gpu0_eth")
    assert found.environment()["GLOO_SOCKET_IFNAME"] == "gpu0_eth"
    assert found.environment()["NCCL_SOCKET_IFNAME"] == "=gpu0_eth"
    assert {s.source for s in found.settings if "IFNAME" in s.name} == {"fabric.interface"}
    (hint,) = planned(machine("none"), interface="ib9").hints
    assert hint == "fabric.interface=ib9: no such interface on this node (it has eno1, lo, virbr0)"


@pytest.mark.parametrize(
    ("selection", "is_selected"),
    [
        ("mlx5_1", True),
        ("=mlx5_1", False),
        ("=mlx5_10", True),
        ("mlx5_1:2", False),
        ("=mlx5_10:1", True),
        ("^mlx5_1", False),
        ("^=mlx5_1", True),
        ("mlx4_0,mlx5_10", True),
        ("", False),
    ],
)
def test_selections_as_nccl_reads_them(selection: str, is_selected: bool) -> None:
    port = Port("mlx5_10", 1, "ACTIVE", "LinkUp", "InfiniBand", 400.0)
    assert matches(selection, port) is is_selected


def test_small_formats() -> None:
    assert parse_cpus("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpus("") == parse_cpus("what") == frozenset()
    assert read_nccl_file("# site\nNCCL_DEBUG=WARN\n NCCL_SOCKET_IFNAME==ens1f0 # out of band\nnonsense\n") == {
        "NCCL_DEBUG": "WARN",
        "NCCL_SOCKET_IFNAME": "=ens1f0",
    }
