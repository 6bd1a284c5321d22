"""A node's fabric at work: looks at the machine when workers are formed, gives their variables and CPUs, and tells.

Owns: reading the machine, the events `fabric` and `port_down`, the lines in the log. What follows from what is found
is fabric.py's and fabric_bind.py's. Detection that fails costs the detection, never the workers.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import importlib.metadata
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .fabric import Given, Plan, plan, read_nccl_file
from .fabric_bind import Seat, seats
from .fabric_sysfs import Facts, read_facts
from .run.events import EventLog

LOOK_LIMIT = 5.0  # seconds for a look at the machine; it takes milliseconds
_SIOCGIFCONF = 0x8912  # netdevice(7)
_IFREQ = struct.Struct("16sH2x4s16x")  # name, address family, port, IPv4 address, rest of the union
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_PLUGIN_PLACES = ("/opt/amazon/ofi-nccl/lib", "/opt/aws-ofi-nccl/lib", "/usr/local/lib", "/usr/lib/x86_64-linux-gnu")


@dataclass(frozen=True)
class Formed:
    """What the workers of this node get: variables, and one seat per local rank."""

    env: dict[str, str]
    seats: list[Seat]


@dataclass
class Fabric:
    """`settings` is the configuration's `fabric`; `log` takes lines for the node's log."""

    settings: Mapping[str, Any]
    events: EventLog
    log: Callable[[str], None]
    root: Path = Path("/")
    _told: dict[str, Any] = field(default_factory=dict)

    def form(self, count: int, address: str | None) -> Formed:
        """For `count` workers. `address`: by which the other nodes reach this one; None if there are none.

        Looks anew each time: a port that has died since the last generation is not used by the next.
        """
        if not (self.settings["detect"] or self.settings["bind"] or self.settings["interface"]):
            return Formed({}, [Seat()] * count)
        looked: list[tuple[Plan, list[Seat]]] = []
        errors: list[str] = []

        def look() -> None:
            try:
                looked.append(self._look(count, address))
            except Exception as e:  # a machine that nobody foresaw
                errors.append(f"{type(e).__name__}: {e}")

        # In a thread of its own: a driver whose device does not answer holds up who reads its files.
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(LOOK_LIMIT)
        if not looked:
            error = errors[0] if errors else f"a device did not answer within {LOOK_LIMIT:g} s"
            self.events.write("fabric_failed", error=error)
            self.log(f"fabric: not detected: {error}")
            return Formed({}, [Seat()] * count)
        found, places = looked[0]
        self._tell(found, places)
        return Formed(found.environment(), places)

    def _look(self, count: int, address: str | None) -> tuple[Plan, list[Seat]]:
        facts = read_facts(self.root)
        found = self._plan(facts, address)
        if not self.settings["bind"]:
            return found, [Seat()] * count
        return found, seats(facts, found.rails, os.environ, frozenset(os.sched_getaffinity(0)), count)

    def _plan(self, facts: Facts, address: str | None) -> Plan:
        wished = self.settings["interface"]
        files = nccl_files(self.root, os.environ)
        if not self.settings["detect"]:
            only = Facts(gpus=facts.gpus, interfaces=facts.interfaces)
            return plan(only, Given(os.environ, files, wished), sets_devices=False)
        leading = next((n for n, a in local_addresses() if a == address), None)
        version = nccl_version() if facts.gpus and facts.ports else None
        has_plugin = bool(facts.efa) and _has_plugin(self.root, os.environ)
        return plan(facts, Given(os.environ, files, wished, leading, version, has_plugin))

    def _tell(self, found: Plan, places: list[Seat]) -> None:
        """Once, and again when something has changed."""
        told: dict[str, Any] = {
            "kind": found.kind,
            "rails": [f"{p.name} {p.rate:g} Gb/s" for p in found.rails],
            "left_out": dict(found.left_out),
            "settings": {s.name: {"value": s.value, "from": s.source, "why": s.reason} for s in found.settings},
            "workers": {str(i): d for i, s in enumerate(places) if (d := s.describe())},
            "hints": list(found.hints),
        }
        dead = {p.name: {"state": p.state, "phys_state": p.phys_state} for p in found.dead}
        before, self._told = self._told, told | {"dead": dead}
        for p in found.dead:
            if before.get("dead", {}).get(p.name) != dead[p.name]:
                left = len(found.rails)
                self.events.write("port_down", device=p.device, port=p.number, **dead[p.name], rails_left=left)
                self.log(f"fabric: port {p.name} is down ({p.state}, {p.phys_state}); {left} rails are left")
        if before == self._told:
            return
        self.events.write("fabric", **told)
        values = ", ".join(f"{s.name}={s.value} ({s.source})" for s in found.settings) or "no variable set"
        self.log(f"fabric: {found.kind}, {len(found.rails)} rails; {values}")
        for rank, seat in told["workers"].items():
            self.log(f"fabric: worker {rank} of this node: " + ", ".join(f"{k} {v}" for k, v in seat.items()))
        for hint in found.hints:
            self.log(f"fabric: {hint}")


def local_addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 address) of this host, all addresses of each interface; labels (`eth0:1`) are left off."""
    size = 8192
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        while True:
            buffer = array.array("B", bytes(size))
            answer = fcntl.ioctl(s, _SIOCGIFCONF, struct.pack("iL", size, buffer.buffer_info()[0]))
            filled: int = struct.unpack("iL", answer)[0]
            if filled + _IFREQ.size <= size:
                break
            size *= 2
    entries = _IFREQ.iter_unpack(buffer.tobytes()[:filled])
    return [
        (name.rstrip(b"\0").decode().partition(":")[0], socket.inet_ntoa(address))
        for name, family, address in entries
        if family == socket.AF_INET
    ]


def nccl_files(root: Path, environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What NCCL reads besides the environment (which wins): NCCL_CONF_FILE or ~/.nccl.conf, then /etc/nccl.conf.

    A variable set by us would win over these, too, so it counts as set by the user or the site.
    """
    home = environ.get("NCCL_CONF_FILE") or os.path.join(environ.get("HOME", "/nonexistent"), ".nccl.conf")
    found: dict[str, tuple[str, str]] = {}
    for path in (Path(home), root / "etc" / "nccl.conf"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for name, value in read_nccl_file(path.read_text()).items():
                found.setdefault(name, (value, str(path)))
    return found


def nccl_version() -> tuple[int, int] | None:
    """Of the NCCL that torch brought along as a package; None where it came in another way."""
    for package in _NCCL_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if found := re.match(r"(\d+)\.(\d+)", importlib.metadata.version(package)):
                return int(found[1]), int(found[2])
    return None


def _has_plugin(root: Path, environ: Mapping[str, str]) -> bool:
    places = [Path(p) for p in environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    places += [root / p.lstrip("/") for p in _PLUGIN_PLACES]
    return any(True for place in places for _ in place.glob("libnccl-net*.so*"))
