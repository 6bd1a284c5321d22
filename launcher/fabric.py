"""Network settings of a node's workers: from what the node has, and what the user has set, to variables with reasons.

Owns: which RDMA ports are the compute rails, and NCCL's, gloo's and libfabric's variables. Pure: facts in, plan out.
As little is set as is needed; what the user or the site has set is never changed. What each rule is for stands in
docs/fabric.md. Sources: NCCL's user guide, "Environment Variables"; torch's ProcessGroupGloo.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .fabric_sysfs import Facts, Port, share_switch

IB_HCA, SOCKET, GLOO = "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
GID_INDEX, PROVIDER, DEVICE_ORDER = "NCCL_IB_GID_INDEX", "FI_PROVIDER", "CUDA_DEVICE_ORDER"
_WATCHED = ("NCCL_", "GLOO_", "FI_", "TORCH_NCCL_", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")
OWN_GID_CHOICE = (2, 21)  # NCCL from here on chooses the RoCE address of each port itself


@dataclass(frozen=True)
class Setting:
    name: str
    value: str
    source: str  # "environment", a file of NCCL's, "fabric.interface" or "detected"
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    kind: str  # infiniband, roce, efa or none
    rails: tuple[Port, ...] = ()
    dead: tuple[Port, ...] = ()  # ports of the same fabric that do not work
    left_out: tuple[tuple[str, str], ...] = ()  # port, why it is no rail
    settings: tuple[Setting, ...] = ()  # effective ones, the user's too
    hints: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """What is to be added to a worker's environment."""
        return {s.name: s.value for s in self.settings if s.source in ("detected", "fabric.interface")}


@dataclass(frozen=True)
class Given:
    """What is known besides the machine."""

    environ: Mapping[str, str]
    files: Mapping[str, tuple[str, str]]  # name -> value, file: what NCCL reads from its configuration files
    interface: str | None = None  # fabric.interface
    leading: str | None = None  # the interface by which other nodes reach this one; None: there are no others
    nccl: tuple[int, int] | None = None  # its version, where known
    has_plugin: bool = False  # a network plug-in of NCCL's lies where the loader looks


@dataclass(frozen=True)
class Choice:
    kind: str
    rails: tuple[Port, ...] = ()
    dead: tuple[Port, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()


def plan(facts: Facts, given: Given, *, sets_devices: bool = True) -> Plan:
    """The settings of this node's workers. `sets_devices`: False leaves all but the interface alone."""
    found = choose(facts)
    wanted = [*_interfaces(facts, given)]
    if facts.gpus and sets_devices:
        wanted.append(Setting(DEVICE_ORDER, "PCI_BUS_ID", "detected", "GPUs are counted as nvidia-smi counts them"))
        wanted += _rails(found, given)
    user = {name: Setting(name, value, "environment") for name, value in given.environ.items() if _is_watched(name)}
    user |= {n: Setting(n, v, file) for n, (v, file) in given.files.items() if n not in user}
    ours = {s.name: s for s in wanted if s.name not in user}
    settings = tuple(sorted([*user.values(), *ours.values()], key=lambda s: s.name))
    # The user may have named the ports: only a dead one among those is news.
    dead = tuple(p for p in found.dead if IB_HCA not in user or matches(user[IB_HCA].value, p))
    hints = tuple(_hints(facts, found, given))
    return Plan(found.kind, found.rails, dead, found.left_out, settings, hints)


def choose(facts: Facts) -> Choice:
    """Which ports carry the training's traffic.

    Ports behind a GPU's PCIe switch are the rails where every GPU has one; elsewhere those of the highest rate. The
    rest are taken for storage and management. InfiniBand wins over Ethernet even when no InfiniBand port works here:
    the other nodes talk InfiniBand.
    """
    if facts.efa:
        ports = [p for p in facts.ports if p.device in facts.efa]
        return Choice("efa", tuple(p for p in ports if p.is_active), tuple(p for p in ports if not p.is_active))
    candidates = [p for p in facts.ports if p.pci and p.node_type == "CA"]
    if any(p.is_active and not p.is_virtual for p in candidates):
        candidates = [p for p in candidates if not p.is_virtual]
    out = [(p.name, _not_hardware(p)) for p in facts.ports if p not in candidates]
    near = [p for p in candidates if any(share_switch(p.pci, g.pci) for g in facts.gpus)]
    has_rails = bool(near) and all(any(share_switch(p.pci, g.pci) for p in near) for g in facts.gpus)
    layer = "InfiniBand" if any(_is_infiniband(p) for p in (near if has_rails else candidates)) else "Ethernet"
    out += [(p.name, f"{p.link_layer} beside {layer}") for p in candidates if p.link_layer != layer]
    candidates = [p for p in candidates if p.link_layer == layer]
    # Where all hang below one switch (a small server, a virtual machine), the switch tells nothing.
    is_by_switch = has_rails and any(p not in near for p in candidates)
    if is_by_switch:
        out += [(p.name, "not behind a GPU's PCIe switch") for p in candidates if p not in near]
        candidates = [p for p in candidates if p in near]
    dead = [p for p in candidates if not p.is_active and _is_missed(p, is_by_switch)]
    out += [(p.name, f"no link ({p.state}, {p.phys_state})") for p in candidates if not p.is_active and p not in dead]
    rails = [p for p in candidates if p.is_active]
    best = max((p.rate for p in rails), default=0.0)
    if not is_by_switch:
        out += [(p.name, f"{p.rate:g} of {best:g} Gb/s") for p in rails if p.rate < best]
        rails = [p for p in rails if p.rate == best]
    if layer == "Ethernet" and any(p.roce_index is not None for p in rails):
        out += [(p.name, "no IPv4 address for RoCE v2") for p in rails if p.roce_index is None]
        rails = [p for p in rails if p.roce_index is not None]
    kind = "infiniband" if layer == "InfiniBand" else "roce" if rails or dead else "none"
    return Choice(kind, tuple(rails), tuple(dead), tuple(sorted(out)))


def _is_infiniband(port: Port) -> bool:
    return port.link_layer == "InfiniBand" and port.phys_state != "Disabled"


def _is_missed(port: Port, is_rail: bool) -> bool:
    """Whether a port without a link was meant to have one. "Disabled" is an administrator's word on InfiniBand; an
    Ethernet port without a carrier says it too, and is missed only where its place shows that it is a rail."""
    return is_rail if port.link_layer == "Ethernet" else port.phys_state != "Disabled"


def _not_hardware(port: Port) -> str:
    if not port.pci:
        return "a software device"
    return "a virtual function" if port.is_virtual else f"not for NCCL ({port.node_type})"


def _interfaces(facts: Facts, given: Given) -> Iterable[Setting]:
    name, source, why = given.interface, "fabric.interface", ""
    if name is None:
        name, source, why = given.leading, "detected", "by it the other nodes reach this one"
    if name is None:
        return
    yield Setting(GLOO, name, source, why)
    if facts.gpus:
        yield Setting(SOCKET, f"={name}", source, why)


def _rails(found: Choice, given: Given) -> Iterable[Setting]:
    if found.kind == "efa":
        yield Setting(PROVIDER, "efa", "detected", "this node has Amazon's EFA")
        return
    if not found.rails:
        return
    names = ",".join(p.name for p in found.rails)
    yield Setting(IB_HCA, f"={names}", "detected", f"active {found.kind} ports of the compute network")
    indices = {p.roce_index for p in found.rails}
    is_old = given.nccl is None or given.nccl < OWN_GID_CHOICE
    if found.kind == "roce" and is_old and len(indices) == 1 and None not in indices:
        yield Setting(GID_INDEX, str(indices.pop()), "detected", "RoCE v2 over IPv4 on all of these ports")


def _hints(facts: Facts, found: Choice, given: Given) -> Iterable[str]:
    if found.kind == "infiniband" and not found.rails and facts.gpus:
        yield "no InfiniBand port is active: NCCL has no fast network on this node"
    best = max((p.rate for p in found.rails), default=0.0)
    yield from (f"{p.name} runs at {p.rate:g} of {best:g} Gb/s" for p in found.rails if p.rate < best)
    if found.kind == "efa" and facts.gpus and not given.has_plugin and "NCCL_NET_PLUGIN" not in given.environ:
        yield "EFA without its plug-in for NCCL (aws-ofi-nccl: libnccl-net*.so): NCCL would use TCP"
    if not set((given.interface or "").split(",")) <= {"", *facts.interfaces}:
        there = ", ".join(facts.interfaces) or "none"
        yield f"fabric.interface={given.interface}: no such interface on this node (it has {there})"


def matches(selection: str, port: Port) -> bool:
    """Whether a value of NCCL_IB_HCA selects a port: prefixes with commas, `=` exact, `^` all but."""
    is_excluding, rest = selection.startswith("^"), selection.lstrip("^")
    is_exact, rest = rest.startswith("="), rest.lstrip("=")
    is_listed = False
    for item in filter(None, rest.split(",")):
        device, _, number = item.partition(":")
        is_device = port.device == device if is_exact else port.device.startswith(device)
        is_listed |= is_device and number in ("", str(port.number))
    return is_listed != is_excluding


def _is_watched(name: str) -> bool:
    return name.startswith(_WATCHED)


def read_nccl_file(text: str) -> dict[str, str]:
    """NAME=VALUE per line, `#` begins a comment: nccl.conf."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {n.strip(): v.strip() for n, is_set, v in (line.partition("=") for line in lines) if is_set}
