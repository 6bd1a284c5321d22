"""The agent's part of our saves: state segments and the node's writer process.

As a program it is that writer: `python node.py FD RUN`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stoker.conf.load import to_plain
from stoker.conf.schema import Config
from stoker.launcher.run.wire import Channel


@dataclass(frozen=True)
class Node:
    """`fds`: by rank, two memfds and a socket to the writer."""

    writer: subprocess.Popen[bytes]
    channel: Channel
    fds: list[tuple[int, int, int]]

    @staticmethod
    def start(run: Path, size: int, log: Path) -> Node:
        ours, theirs = socket.socketpair()
        with log.open("ab") as output:
            writer = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(run)],
                pass_fds=[theirs.fileno()],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        theirs.close()
        channel, fds = Channel(ours), []
        for rank in range(size):
            segments = [os.memfd_create(f"state-{rank}-{k}") for k in (0, 1)]
            worker, client = socket.socketpair()
            channel.send({"kind": "client", "generation": 1, "rank": rank}, (client.fileno(), *segments))
            client.close()
            fds.append((*segments, worker.detach()))
        return Node(writer, channel, fds)

    def end(self) -> None:
        for fd in (fd for rank in self.fds for fd in rank):
            os.close(fd)
        self.channel.close()
        self.writer.wait(60)


if __name__ == "__main__":
    from stoker.train.state import persist_writer

    spec = {"run": sys.argv[2], "attempt": 1, "config": to_plain(Config()), "cpus": None}
    sys.exit(persist_writer.main(spec, Channel(socket.socket(fileno=int(sys.argv[1])))))
