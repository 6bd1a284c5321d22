"""Framing: messages in pieces, descriptors, and the other side's end or nonsense."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from stoker.launcher.run import wire
from stoker.launcher.run.wire import Channel, Closed


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    if request.param == "unix":
        a, b = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            a = socket.create_connection(server.getsockname())
            b, _ = server.accept()
    for s in (a, b):
        s.settimeout(30)
    yield Channel(a), Channel(b)
    a.close()
    b.close()


def test_messages_arrive_whole_and_in_order_however_they_are_cut(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    a.send({"n": 1, "text": "line\nbreak, \u00e4"})
    a.send({"n": 2})
    got = b.receive()
    while len(got) < 2:
        got += b.receive()
    assert got == [{"n": 1, "text": "line\nbreak, \u00e4"}, {"n": 2}]
    a.sock.sendall(b'{"n": ')
    assert b.receive() == []
    a.sock.sendall(b'3}\n{"n"')
    assert b.receive() == [{"n": 3}]
    a.sock.sendall(b":4}\n")
    assert b.receive() == [{"n": 4}]


def test_nothing_to_read_on_a_socket_that_does_not_block(pair: tuple[Channel, Channel]) -> None:
    pair[0].sock.setblocking(False)
    assert pair[0].receive() == []


def test_end_of_stream_is_told(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    a.close()
    with pytest.raises(Closed, match="end of stream"):
        b.receive()


def test_sending_to_one_who_left_is_told(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    b.close()
    with pytest.raises(Closed):
        list(iter(lambda: a.send({"text": "x" * 10_000}), "never"))


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\xff\xfe\x00\n", b"[1]\n", b"\n", b"[" * 60_000 + b"\n"])
def test_who_speaks_something_else_is_taken_for_lost(pair: tuple[Channel, Channel], data: bytes) -> None:
    a, b = pair
    a.sock.sendall(data)
    with pytest.raises(Closed, match="not a"):
        list(iter(b.receive, None))


@pytest.mark.parametrize("data", [b"x" * 2000, b'{"n":1}\n' + b"x" * 1001, b"x" * 1001 + b"\n"])
def test_a_line_that_is_too_long_is_not_kept(pair: tuple[Channel, Channel], data: bytes) -> None:
    a, b = pair[0], Channel(pair[1].sock, max_line=1000)
    a.sock.sendall(data)
    with pytest.raises(Closed, match="over 1000 bytes"):
        list(iter(b.receive, None))


def test_many_short_lines_at_once_are_no_long_line(pair: tuple[Channel, Channel]) -> None:
    a, b = pair[0], Channel(pair[1].sock, max_line=1000)
    a.sock.sendall(b'{"n":1}\n' * 500)
    got = b.receive()
    while len(got) < 500:
        got += b.receive()
    assert got == [{"n": 1}] * 500


def test_messages_of_several_threads_do_not_mix(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    text = "x" * 100_000  # more than a socket takes at once
    threads = [threading.Thread(target=a.send, args=({"n": n, "text": text},)) for n in range(8)]
    for thread in threads:
        thread.start()
    got = []
    while len(got) < 8:
        got += b.receive()
    for thread in threads:
        thread.join()
    assert sorted(m["n"] for m in got) == list(range(8))
    assert {m["text"] for m in got} == {text}


def test_keepalive_speaks_until_its_main_loop_is_stalled(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    keepalive = wire.Keepalive({"kind": "alive"}, lambda: [a])
    keepalive.start()
    assert b.receive() == [{"kind": "alive"}]
    keepalive._beaten -= 601  # seconds ago
    b.sock.settimeout(2.5)
    with pytest.raises(Closed, match="timed out"):
        list(iter(b.receive, None))
    b.sock.settimeout(30)
    keepalive.beat()
    assert b.receive() == [{"kind": "alive"}]
    keepalive.stop()
    keepalive.join(timeout=30)
    assert not keepalive.is_alive()


def test_descriptors_travel_with_a_message_over_a_unix_socket() -> None:
    a, b = (Channel(s) for s in socket.socketpair())
    reader, writer = os.pipe()
    a.send({"take": 1}, (writer,))
    os.close(writer)
    assert b.receive() == [{"take": 1}]
    (received,) = b.fds
    os.write(received, b"x")
    assert os.read(reader, 1) == b"x"
    for fd in (reader, received):
        os.close(fd)
    a.close()
    b.close()
