"""The supervisor's port: our agents get in, strangers do not, and neither can hold up the others."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import agent as agent_module
from stoker.launcher import agents as agents_module
from stoker.launcher import policy_types as p
from stoker.launcher.agents import Agents, AgentSignalled
from stoker.launcher.protocol import answer
from stoker.launcher.run.heartbeat import Phase
from stoker.launcher.run.wire import Channel, Closed

TOKEN = "token of the attempt"
CONFIG = {"cluster": {"nodes": 2}, "x": 1}


@pytest.fixture
def agents() -> Iterator[Agents]:
    made = Agents(TOKEN, CONFIG, lease=5.0)
    yield made
    made.close()


def port(agents: Agents) -> int:
    return int(agents.addresses.rpartition(":")[2])


def read(agents: Agents, seconds: float = 0.3) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found += agents.read(agents.wait(0.05))
    return found


def receive(channel: Channel, agents: Agents, kind: str) -> dict[str, Any]:
    for _ in range(100):
        list(agents.read(agents.wait(0.02)))
        if select.select([channel], [], [], 0.02)[0]:
            for message in channel.receive():
                if message["kind"] == kind:
                    return message
    raise AssertionError(f"no {kind}")


def join(agents: Agents, node: str) -> tuple[Channel, list[Any]]:
    channel = Channel(socket.create_connection(("127.0.0.1", port(agents))))
    nonce = receive(channel, agents, "challenge")["nonce"]
    hello = {"kind": "hello", "answer": answer(TOKEN, nonce), "nonce": "n", "node": node, "address": "10.0.0.1"}
    channel.send(hello)
    return channel, read(agents)


def test_an_agent_and_its_news(agents: Agents) -> None:
    channel, events = join(agents, "n1")
    assert events == [p.AgentJoined("n1", "10.0.0.1")]
    welcome = receive(channel, agents, "welcome")
    assert welcome == {"kind": "welcome", "answer": answer(TOKEN, "n"), "config": CONFIG}
    rank = {"generation": 1, "rank": 3, "step": 7, "phase": 2, "sequence": 9, "age": 0.5, "median": 0.1}
    channel.send({"kind": "status", "ranks": [rank]})
    channel.send({"kind": "signal", "name": "SIGUSR1"})
    channel.send(
        {"kind": "report", "event": "eval", "generation": 1, "rank": 3, "fields": {"cause": 1, "seconds": None}}
    )
    assert read(agents) == [
        p.NodeStatus((p.RankStatus(1, 3, 7, Phase.STEP, 9, 0.5, 0.1),)),
        AgentSignalled("n1", "SIGUSR1"),
    ]
    channel.close()
    assert read(agents) == [p.AgentLost("n1", "connection lost (end of stream)", is_closed=True)]


def test_the_welcome_comes_before_anything_that_follows_from_joining(agents: Agents) -> None:
    channel = Channel(socket.create_connection(("127.0.0.1", port(agents))))
    nonce = receive(channel, agents, "challenge")["nonce"]
    channel.send({"kind": "hello", "answer": answer(TOKEN, nonce), "nonce": "n", "node": "n1", "address": "10.0.0.1"})
    for event in agents.read(agents.wait(5.0)):
        assert event == p.AgentJoined("n1", "10.0.0.1")
        agents.do(p.StartStore("n1"), p.Settings(1, 1, True))
    kinds: list[str] = []
    while len(kinds) < 2:
        kinds += [m["kind"] for m in channel.receive()]
    assert kinds[:2] == ["welcome", "store"]
    channel.close()


def test_an_agent_that_falls_silent_is_lost_after_the_lease(agents: Agents) -> None:
    channel, _ = join(agents, "n1")
    agents._lease = 0.2
    assert read(agents, 0.6) == [p.AgentLost("n1", "no word for 0 s")]
    channel.close()


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"kind":"hello","answer":"x","nonce":"n","node":"n1","address":"a"}\n',
        b"x" * 10_000,
    ],
)
def test_strangers_are_turned_away(agents: Agents, words: bytes) -> None:
    stranger = socket.create_connection(("127.0.0.1", port(agents)))
    read(agents, 0.1)
    stranger.sendall(words)
    assert read(agents) == []
    assert agents._agents == {}
    channel, events = join(agents, "n1")
    assert events == [p.AgentJoined("n1", "10.0.0.1")]
    channel.close()
    stranger.close()


def test_a_crowd_of_silent_strangers_keeps_no_agent_out(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = [socket.create_connection(("127.0.0.1", port(agents))) for _ in range(100)]
    read(agents, 0.1)
    assert len(agents._agents) == agents_module.STRANGERS
    monkeypatch.setattr(agents_module, "HELLO_LIMIT", 0.5)
    assert read(agents, 0.8) == []
    assert agents._agents == {}
    channel, events = join(agents, "n1")
    assert events == [p.AgentJoined("n1", "10.0.0.1")]
    for sock in (channel, *crowd):
        sock.close()


def test_an_agent_does_not_obey_who_does_not_know_the_token() -> None:
    """Somebody who listens where the supervisor might: it can ask, but not prove."""
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        sock, _ = listener.accept()
        impostor = Channel(sock)
        impostor.send({"kind": "challenge", "nonce": "x"})
        select.select([impostor], [], [], 5.0)
        impostor.receive()
        impostor.send({"kind": "welcome", "answer": "guess", "config": {}})
        os._exit(0)
    with pytest.raises(Closed, match="somebody else"):
        agent_module._greet(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN, "n1", 5.0)
    os.waitpid(pid, 0)
    listener.close()


def test_what_comes_together_with_the_welcome_is_not_lost(agents: Agents) -> None:
    """The last agent to join is asked for the store in the same breath as it is welcomed."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        channel, _ = agent_module._greet(f"127.0.0.1:{port(agents)}", TOKEN, "n1", 5.0)
        time.sleep(0.5)
        os.write(write_end, channel.next()["kind"].encode())
        os._exit(0)
    joined: list[Any] = []
    while not joined:
        joined = list(agents.read(agents.wait(0.1)))
    agents.do(p.StartStore("n1"), p.Settings(1, 1, True))
    assert select.select([read_end], [], [], 10.0)[0]
    assert os.read(read_end, 100) == b"store"
    os.waitpid(pid, 0)


def test_the_token_is_in_no_file_and_no_argument_list(tmp_path: Path) -> None:
    from stoker.launcher.container import Entry
    from stoker.launcher.launch_agents import srun_command
    from stoker.launcher.run.layout import RunDir

    config = {"cluster": {"nodes": 2, "cpus_per_task": 3, "stage_env": False}}
    assert srun_command(RunDir(Path("/runs/a b")), config, Entry((), (), "/py thon")) == [
        "srun",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=3",
        "--wait=0",
        "--kill-on-bad-exit=0",
        "--mpi=none",
        "--input=none",
        "--overlap",
        "--cpu-bind=none",
        "--export=ALL",
        "/py thon",
        "/runs/a b/bootstrap.py",
        "stoker.launcher.agent",
        "/runs/a b",
    ]


def test_a_node_that_has_come_back_by_another_connection_is_not_lost(agents: Agents) -> None:
    first, _ = join(agents, "n1")
    second, _ = join(agents, "n1")
    first.close()
    assert read(agents) == []
    second.close()
    assert [e.node for e in read(agents)] == ["n1"]
