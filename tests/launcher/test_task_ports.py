"""Ports for a user's own script: free, out of the kernel's way, and no two jobs' the same."""

from __future__ import annotations

import socket
import subprocess
import sys
from itertools import islice

from stoker.launcher.task_ports import BLOCK, Ports, blocks, ephemeral, is_free, port_of


def test_blocks_lie_outside_of_what_the_kernel_gives_to_anybody() -> None:
    found = list(blocks(32768, 60999, start=5))
    outside = [first for first in found if first + BLOCK <= 32768 or first > 60999]
    assert found[: len(outside)] == outside
    assert len(outside) > 3000
    assert sorted(found) == list(range(10240, 65528 + 1, BLOCK))
    # Where the kernel may give away everything, everything will do.
    assert len(list(blocks(1024, 65535, start=0))) == len(found)


def test_each_generation_has_a_port_of_its_own_for_a_while() -> None:
    assert [port_of(20000, g) for g in (1, 2, 8, 9)] == [20000, 20001, 20007, 20000]


def test_two_jobs_on_a_node_never_get_the_same_ports() -> None:
    ours = Ports.reserve()
    low, high = ephemeral()
    assert ours.first + BLOCK <= low or ours.first > high
    program = (
        "from stoker.launcher import task_ports as t\n"
        f"t.blocks = lambda *_, **__: iter([{ours.first}, {ours.first + BLOCK}, *range(11000, 12000, 8)])\n"
        "print(t.Ports.reserve().first)"
    )

    def other() -> int:
        return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)

    assert other() != ours.first
    ours.close()
    assert other() == ours.first  # nothing remains of a reservation


def test_a_port_in_use_is_not_free_and_a_reserved_one_can_be_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free(server.getsockname()[1])
    ours = Ports.reserve()
    with socket.create_server(("", ours.first)):
        assert not is_free(ours.first)
    ours.close()


def test_the_search_begins_anywhere() -> None:
    assert next(blocks(32768, 60999, start=1)) == 10240 + BLOCK
    assert list(islice(blocks(32768, 60999, start=0), 2)) == [10240, 10240 + BLOCK]
