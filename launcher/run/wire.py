"""Messages between our processes: one line of JSON each, over TCP (supervisor, agents) or Unix sockets (agent,
zygote, workers); on the latter, file descriptors can travel with a line.

Owns: framing. Which messages there are stands in docs/architecture.md, "Messages".
"""

from __future__ import annotations

import array
import json
import socket
from typing import Any

from .files import to_json

MAX_LINE = 16 * 1024 * 1024
Message = dict[str, Any]


class Closed(ConnectionError):
    """The other side is gone."""


class Channel:
    """A connected stream socket that speaks JSON lines. `receive` never blocks; select on it first."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self.fds: list[int] = []  # descriptors that came in with the lines read so far; the taker removes them

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send one message; blocks while the other side does not read.

        Raises:
            Closed: the other side is gone.
        """
        data = to_json(message).encode() + b"\n"
        try:
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                data = data[self.sock.sendmsg([data], rights) :]
            self.sock.sendall(data)
        except OSError as e:
            raise Closed(str(e)) from e

    def receive(self) -> list[Message]:
        """All complete messages that have arrived; call it when the socket is readable.

        Raises:
            Closed: the other side is gone, or speaks something else.
        """
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
        if len(self._buffer) > MAX_LINE:
            raise Closed(f"a line of over {MAX_LINE} bytes")
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as e:  # not text, not JSON, or nested without end
            raise Closed(f"not a line of JSON: {e}") from e
        if not all(isinstance(m, dict) for m in messages):
            raise Closed("not a JSON object")
        return messages
