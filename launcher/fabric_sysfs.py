"""What a node has: RDMA ports, NVIDIA GPUs, network interfaces and CPU cores, read from sysfs below a root directory.

Owns: reading, into typed facts; what cannot be read is left out. Does not own: what follows from it (fabric.py,
fabric_bind.py). Formats: the kernel's Documentation/ABI/stable/sysfs-class-infiniband, sysfs-bus-pci, cputopology.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NVIDIA, AMAZON = "0x10de", "0x1d0f"  # PCI vendors
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

PciPath = tuple[str, ...]  # addresses of the bridges above a function from the root port down, and its own


@dataclass(frozen=True)
class Gid:
    """One entry of a port's table of addresses."""

    index: int
    kind: str  # "IB/RoCE v1" or "RoCE v2"
    value: str  # eight groups of four hexadecimal digits

    @property
    def is_ipv4(self) -> bool:
        return self.value.startswith("0000:0000:0000:0000:0000:ffff:")


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device. `rate` is in Gb/s and means something on an active port only."""

    device: str
    number: int
    state: str  # DOWN, INIT, ARMED, ACTIVE, ...
    phys_state: str  # Polling, Disabled, LinkUp, ...
    link_layer: str  # InfiniBand, Ethernet, or Unknown (EFA)
    rate: float
    node_type: str = "CA"  # RNIC is iWARP
    pci: PciPath = ()
    is_virtual: bool = False  # a virtual function whose physical one is on this host, too
    gids: tuple[Gid, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def roce_index(self) -> int | None:
        """Where its RoCE v2 address over IPv4 stands."""
        return next((g.index for g in self.gids if g.kind == "RoCE v2" and g.is_ipv4), None)


@dataclass(frozen=True)
class Gpu:
    address: str  # PCI: domain:bus:device.function
    pci: PciPath
    cpus: frozenset[int]  # near it; empty if the machine does not say
    uuid: str | None = None
    minor: int | None = None  # of /dev/nvidiaN: the number that Slurm counts by


@dataclass(frozen=True)
class Facts:
    ports: tuple[Port, ...] = ()
    gpus: tuple[Gpu, ...] = ()  # in PCI order
    efa: tuple[str, ...] = ()  # RDMA devices of Amazon's
    interfaces: tuple[str, ...] = ()
    siblings: tuple[frozenset[int], ...] = ()  # CPUs of each core


def read_facts(root: Path) -> Facts:
    """Facts of the machine whose /sys and /proc lie below `root` (`/` for this one)."""
    sys = root / "sys"
    ports = tuple(_ports(sys / "class" / "infiniband"))
    efa = {p.device for p in ports if _text(sys / "class/infiniband" / p.device / "device/vendor") == AMAZON}
    return Facts(
        ports=ports,
        gpus=tuple(_gpus(root)),
        efa=tuple(sorted(efa)),
        interfaces=tuple(_names(sys / "class" / "net")),
        siblings=tuple(_siblings(sys / "devices" / "system" / "cpu")),
    )


def _ports(infiniband: Path) -> Iterator[Port]:
    for device in _names(infiniband):
        here = infiniband / device
        function = here / "device"
        pci = _pci_path(function)
        for number in _names(here / "ports"):
            port = here / "ports" / number
            rate = re.match(r"[\d.]+", _text(port / "rate"))
            if not number.isdecimal():
                continue
            yield Port(
                device,
                int(number),
                _after_colon(_text(port / "state")),
                _after_colon(_text(port / "phys_state")),
                _text(port / "link_layer"),
                float(rate[0]) if rate else 0.0,
                _after_colon(_text(here / "node_type")),
                pci,
                (function / "physfn").exists(),
                tuple(_gids(port)),
            )


def _gids(port: Path) -> Iterator[Gid]:
    for index in sorted(int(n) for n in _names(port / "gids") if n.isdecimal()):
        # An entry that is not in use has no type (reading it is an error) and is all zeros.
        kind, value = _text(port / "gid_attrs" / "types" / str(index)), _text(port / "gids" / str(index))
        if kind and value.strip("0:"):
            yield Gid(index, kind, value.lower())


def _gpus(root: Path) -> Iterator[Gpu]:
    devices = root / "sys" / "bus" / "pci" / "devices"
    for address in _names(devices):
        here = devices / address
        if _text(here / "vendor") != NVIDIA or _text(here / "class")[:6] not in _GPU_CLASSES:
            continue
        # numa_node is -1, and all CPUs are local, where the firmware does not say: then nothing is near.
        is_known = _text(here / "numa_node") not in ("", "-1")
        cpus = parse_cpus(_text(here / "local_cpulist")) if is_known else frozenset()
        said = _text(root / "proc" / "driver" / "nvidia" / "gpus" / address / "information")
        uuid, minor = re.search(r"GPU UUID:\s*(GPU-[\w-]+)", said), re.search(r"Device Minor:\s*(\d+)", said)
        yield Gpu(address, _pci_path(here), cpus, uuid[1] if uuid else None, int(minor[1]) if minor else None)


def _siblings(cpus: Path) -> Iterator[frozenset[int]]:
    seen: set[int] = set()
    numbers = sorted(int(n[3:]) for n in _names(cpus) if re.fullmatch(r"cpu\d+", n))
    for number in numbers:
        if number not in seen:
            core = parse_cpus(_text(cpus / f"cpu{number}" / "topology" / "thread_siblings_list")) or {number}
            seen |= core
            yield frozenset(core)


def parse_cpus(text: str) -> frozenset[int]:
    """A list of CPUs as the kernel writes it: `0-3,8,10-11`. Empty for what is none."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        if (m := re.fullmatch(r"(\d+)(?:-(\d+))?", part)) is None:
            return frozenset()
        found |= set(range(int(m[1]), int(m[2] or m[1]) + 1))
    return frozenset(found)


def share_switch(one: PciPath, other: PciPath) -> bool:
    """Whether two functions lie below one PCIe bridge: data between them need not pass the processor."""
    return bool(one[:-1] and other[:-1]) and one[0] == other[0]


def _pci_path(link: Path) -> PciPath:
    try:
        parts = Path(os.path.realpath(link, strict=True)).parts
    except OSError:
        return ()
    return tuple(p for p in parts if _PCI_ADDRESS.fullmatch(p))


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _text(path: Path) -> str:
    """The file's text; empty where it cannot be read: devices come and go while we look."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii").strip()
    return ""


def _after_colon(text: str) -> str:
    """`4: ACTIVE` -> `ACTIVE`."""
    return text.partition(":")[2].strip()
