"""Messages between our processes: one line of JSON each, over TCP (supervisor, agents) or Unix sockets (agent,
zygote, workers); on the latter, file descriptors can travel with a line.

Owns: framing. Which messages there are stands in docs/architecture.md, "Messages".
"""

from __future__ import annotations

import array
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .files import to_json

MAX_LINE = 16 * 1024 * 1024
Message = dict[str, Any]


class Closed(ConnectionError):
    """The other side is gone."""


class Channel:
    """A connected stream socket that speaks JSON lines. `receive` never blocks; select on it first.

    `send` may be called by several threads. `max_line`: bytes that a line may have; to be kept small for strangers.
    """

    def __init__(self, sock: socket.socket, max_line: int = MAX_LINE) -> None:
        self.sock, self.max_line = sock, max_line
        self._buffer = bytearray()
        self._unread: list[Message] = []
        self._sending = threading.Lock()
        self._is_broken = False
        self.fds: list[int] = []  # descriptors that came in with the lines read so far; the taker removes them

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send one message; blocks while the other side does not read, up to the socket's timeout.

        Raises:
            Closed: the other side is gone, or did not read in time. Part of the message may have been sent: the
                channel is of no use any more.
        """
        data = to_json(message).encode() + b"\n"
        with self._sending:
            if self._is_broken:
                raise Closed("an earlier message was cut off")
            self._send_all(data, fds)

    def _send_all(self, data: bytes, fds: tuple[int, ...]) -> None:
        try:
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                data = data[self.sock.sendmsg([data], rights) :]
            self.sock.sendall(data)
        except OSError as e:
            self._is_broken = True
            raise Closed(str(e)) from e

    def receive(self) -> list[Message]:
        """All complete messages that have arrived; call it when the socket is readable, or `has_unread`.

        Raises:
            Closed: the other side is gone, or speaks something else.
        """
        if self._unread:
            unread, self._unread = self._unread, []
            return unread
        try:
            if self.sock.family == socket.AF_UNIX:
                data, ancillary, _, _ = self.sock.recvmsg(65536, socket.CMSG_SPACE(64 * 4))
                for level, kind, payload in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        fds = array.array("i")
                        fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                        self.fds.extend(fds)
            else:
                data = self.sock.recv(65536)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as e:
            raise Closed(str(e)) from e
        if not data:
            raise Closed("end of stream")
        self._buffer += data
        # Many short lines may have come at once: it is the single line that must not be too long.
        *lines, rest = self._buffer.split(b"\n") if b"\n" in data else [self._buffer]
        if any(len(line) > self.max_line for line in (*lines, rest)):
            raise Closed(f"a line of over {self.max_line} bytes")
        self._buffer = rest
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as e:  # not text, not JSON, or nested without end
            raise Closed(f"not a line of JSON: {e}") from e
        if not all(isinstance(m, dict) for m in messages):
            raise Closed("not a JSON object")
        return messages

    @property
    def has_unread(self) -> bool:
        """Messages that came along with one that `next` returned: no socket will say that they are there."""
        return bool(self._unread)

    def next(self) -> Message:
        """Wait for one message, as long as the socket's timeout; those that came with it are kept for `receive`."""
        while True:
            messages = self.receive()
            if messages:
                self._unread = messages[1:]
                return messages[0]


class Keepalive(threading.Thread):
    """Sends `message` once a second to whoever `channels` names, so that a lease does not hang on a main loop that
    waits for storage or for Slurm. A main loop that has not called `beat` for `stall_limit` seconds is beyond help:
    then it falls silent too."""

    def __init__(self, message: Message, channels: Callable[[], Sequence[Channel]], stall_limit: float = 600.0) -> None:
        super().__init__(name="keepalive", daemon=True)
        self._message, self._channels, self._stall_limit = message, channels, stall_limit
        self._beaten = time.monotonic()
        self._stopped = threading.Event()

    def beat(self) -> None:
        self._beaten = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.wait(1.0):
            if time.monotonic() - self._beaten > self._stall_limit:
                continue
            for channel in self._channels():
                # Whoever cannot be reached is noticed by the main loop.
                with contextlib.suppress(Closed):
                    channel.send(self._message)
