"""A process's offer to tell where it stands: on one signal it writes the Python stacks of all its threads to memory.

Owns: the signal, the memory file that takes the text, and the name by which others find it under /proc/PID/fd. The
text is written by the interpreter's C code, so that a process which hangs in a collective tells it too; nothing of the
run stops for it, and no file is made. Reading is launcher/stacks_node.py's. Standard library only.
"""

from __future__ import annotations

import faulthandler
import fcntl
import hashlib
import os
import signal
import socket
from dataclasses import dataclass

from .layout import RunDir

# A real-time signal: none of Slurm's, of a shell's or of the stop and warning signals. Its default action would end a
# process, so whoever sends it looks first whether it is caught.
SIGNAL = signal.SIGRTMIN + 5
_PREFIX = "stoker-stacks"
_open: list[int] = []  # this process's memory file; the interpreter keeps no reference to it


@dataclass(frozen=True)
class Offer:
    """What the name of a memory file says of its process."""

    run: str  # run_key
    attempt: int
    node: str
    role: str  # supervisor, agent, zygote, writer, or gGENERATION-rRANK
    pid: int  # in the process's own PID namespace; a fork inherits its parent's file and does not have that number

    @property
    def rank(self) -> int | None:
        generation, _, rank = self.role.partition("-r")
        return int(rank) if rank.isdecimal() and generation[1:].isdecimal() else None

    @property
    def name(self) -> str:
        return ":".join((_PREFIX, self.run, str(self.attempt), self.role, str(self.pid), self.node))

    @staticmethod
    def parse(link: str) -> Offer | None:
        """From what readlink says of /proc/PID/fd/N."""
        name = link.removeprefix("/memfd:").removesuffix(" (deleted)")
        parts = name.split(":", 5)
        if len(parts) != 6 or parts[0] != _PREFIX or not (parts[2].isdecimal() and parts[4].isdecimal()):
            return None
        return Offer(parts[1], int(parts[2]), parts[5], parts[3], int(parts[4]))


def run_key(run: RunDir) -> str:
    """The run in a file's name, whatever characters its directory has.

    Two directories may be called the same, and one may be reached by several paths (containers, links): the name goes
    together with the number that the shared file system has for it, which is the same everywhere.
    """
    try:
        number = os.stat(run.path).st_ino
    except OSError:
        number = 0
    return hashlib.blake2b(os.fsencode(f"{run.path.name}/{number}"), digest_size=8).hexdigest()


def node_name() -> str:
    """What this node is called: by our agent, else by Slurm, else by itself."""
    return os.environ.get("STOKER_NODE") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def offer(run: RunDir, attempt: int, role: str) -> None:
    """Have this process tell its stacks on SIGNAL; a later call, also in a fork, replaces the earlier one."""
    try:
        fd = os.memfd_create(Offer(run_key(run), attempt, node_name()[:100], role, os.getpid()).name)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    except OSError:  # a kernel without memfd: only /proc will tell
        return
    while _open:
        os.close(_open.pop())
    _open.append(fd)
