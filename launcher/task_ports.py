"""Ports for the meeting point of a user's own script (MASTER_PORT): free, kept from other jobs, outside of what the
kernel gives to anybody.

Owns: choosing and reserving. A block of ports is reserved for an attempt, so that each generation of processes gets
another one and does not wait for the last one's connections to be forgotten.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

BLOCK = 8  # ports of an attempt; generation n takes number n modulo this
_LOWEST, _HIGHEST = 10240, 65535
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Ports:
    """Reserves on creation; a reservation lasts as long as this object, or the process.

    It is an abstract Unix socket per port: like ports, these belong to the network namespace, two processes cannot
    have the same, and nothing remains of a killed one. The ports themselves stay unbound, for the script to bind.
    """

    def __init__(self, first: int, held: list[socket.socket]) -> None:
        self.first, self._held = first, held

    @classmethod
    def reserve(cls) -> Ports:
        """Raises OSError: there is no free block on this machine."""
        for first in blocks(*ephemeral(), start=secrets.randbelow(1 << 16)):
            held: list[socket.socket] = []
            if all(_hold(port, held) and is_free(port) for port in range(first, first + BLOCK)):
                return cls(first, held)
            for taken in held:
                taken.close()
        raise OSError(errno.EADDRINUSE, f"no {BLOCK} free ports in a row on this machine")

    def close(self) -> None:
        for held in self._held:
            held.close()


def port_of(first: int, generation: int) -> int:
    return first + (generation - 1) % BLOCK


def ephemeral() -> tuple[int, int]:
    """The range out of which the kernel takes ports for whoever does not ask for one."""
    try:
        low, high = _EPHEMERAL.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


def blocks(low: int, high: int, start: int) -> Iterator[int]:
    """First ports of all blocks, those outside of `low`..`high` first; `start`, any number, says where to begin."""
    every = range(_LOWEST, _HIGHEST - BLOCK + 2, BLOCK)
    outside = [first for first in every if first + BLOCK <= low or first > high]
    inside = [first for first in every if not (first + BLOCK <= low or first > high)]
    for part in (outside, inside):
        turn = start % len(part) if part else 0
        yield from part[turn:] + part[:turn]


def _hold(port: int, held: list[socket.socket]) -> bool:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.bind(f"\0stoker-port-{port}")
    except OSError:
        made.close()
        return False
    held.append(made)
    return True


def is_free(port: int) -> bool:
    """Whether nothing is bound there, nor has connections that linger."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(("::", port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return False
    with socket.socket(socket.AF_INET) as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
