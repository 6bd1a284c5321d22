"""TCP ports of a cluster, and the bridge and cables between isolated nodes (as commands for `ip -batch`).

Isolated clusters live in a network namespace of their own, so bridge, cables and addresses can be the same for every
cluster, meet no other network, and vanish with the last process. Ports matter for plain clusters only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import linux
from .config import CONTROLLER_ADDRESS, PORTS_NEEDED, node_address
from .spec import ClusterSpec

BRIDGE = "nodes"
_FIRST_PORT, _LAST_PORT, _BLOCK = 10_000, 32_767, 128


@dataclass(frozen=True)
class PortClaim:
    """A block of TCP ports that no other cluster on this machine takes while `lock` is open."""

    first_port: int
    lock: socket.socket


def claim_ports(directory: str) -> PortClaim:
    """Claim PORTS_NEEDED consecutive free ports below the ephemeral range, starting the search at a place that depends
    on the directory. Raises OSError when there are none.

    The claim is an abstract Unix socket named after the block: the kernel drops it when we die, and it is shared by
    all users of the machine.
    """
    low, high = (int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    starts = range(_FIRST_PORT, _LAST_PORT - _BLOCK, _BLOCK)
    blocks = [start for start in starts if start + _BLOCK <= low or start > high]
    offset = zlib.crc32(directory.encode()) % max(1, len(blocks))
    for start in blocks[offset:] + blocks[:offset]:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):
            lock.bind(f"\0stoker-rehearsal-ports-{start}")
            if all(_is_free(port) for port in range(start, start + PORTS_NEEDED)):
                return PortClaim(start, lock)
        lock.close()
    raise OSError(f"no {PORTS_NEEDED} free TCP ports in a row outside the ephemeral range {low}-{high}")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def listens(port: int) -> bool:
    """Whether some process of this network namespace listens on a TCP port. Read from /proc: a trial connection would
    leave an error in the daemon's log."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state = line.split()[:4]
                if state == "0A" and int(local.rsplit(":", 1)[1], 16) == port:
                    return True
    return False


def bridge_commands() -> str:
    return (
        "link set lo up\n"
        f"link add {BRIDGE} type bridge\n"
        f"addr add {CONTROLLER_ADDRESS}/24 dev {BRIDGE}\n"
        f"link set {BRIDGE} up\n"
    )


def cable_commands(spec: ClusterSpec, pids: Mapping[str, int]) -> str:
    """A cable from the bridge to eth0 of each node, whose network namespace is that of the given process. The hardware
    address stays the same when a node is restarted, so that neighbours need not learn a new one."""
    lines = []
    for node, pid in pids.items():
        hardware = f"02:00:00:00:00:{spec.node_number(node):02x}"
        lines.append(f"link add {node} type veth peer name eth0 address {hardware} netns {pid}\n")
        lines.append(f"link set {node} master {BRIDGE} up\n")
    return "".join(lines)


def node_commands(spec: ClusterSpec, node: str) -> str:
    return (
        "link set lo up\n"
        f"addr add {node_address(spec, node)}/24 dev eth0\n"
        "link set eth0 up\n"
        f"route add default via {CONTROLLER_ADDRESS}\n"
    )


def has_link(name: str) -> bool:
    return any(name == present for _, present in socket.if_nameindex())


def run_ip(commands: str, path: str) -> None:
    """Run commands in one `ip -batch`. Raises OSError with what `ip` said."""
    argv = [shutil.which("ip", path=path) or "ip", "-batch", "-"]
    # Not root, we hold the needed capabilities only in our own namespaces and would lose them with the exec.
    prepare = None if os.geteuid() == 0 else linux.keep_capabilities_over_exec
    done = subprocess.run(argv, input=commands, capture_output=True, text=True, preexec_fn=prepare, check=False)
    if done.returncode != 0:
        raise OSError(f"ip: {done.stderr.strip() or done.stdout.strip()}")
