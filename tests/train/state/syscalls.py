"""Lets a test see, fail, tear, freeze or kill a process at any one of its system calls that change files.

A process under test calls `install`; from then on the kernel asks the test process about each such call before it is
made, whichever library or thread makes it (seccomp, "user notification"; children inherit it). `Tap` answers: it counts
the calls below one directory and acts at one of them. Does not own: what must hold afterwards.
Sources: seccomp_unotify(2), seccomp(2), linux/seccomp.h. x86-64 only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import select
import signal
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

_X86_64 = 0xC000003E
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER = 317, 1, 8
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECV, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_AT_FDCWD = -100
_PIDFD_GETFD, _PWRITE = 438, 18
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

# Number: name, kind, place of its argument. "fd": a descriptor; "path": a path; "at": a directory's descriptor, a path.
_CALLS: dict[int, tuple[str, str, int]] = {
    2: ("open", "path", 0),
    257: ("openat", "at", 0),
    1: ("write", "fd", 0),
    20: ("writev", "fd", 0),
    18: ("pwrite64", "fd", 0),
    296: ("pwritev", "fd", 0),
    328: ("pwritev2", "fd", 0),
    40: ("sendfile", "fd", 0),
    326: ("copy_file_range", "fd", 2),
    74: ("fsync", "fd", 0),
    75: ("fdatasync", "fd", 0),
    277: ("sync_file_range", "fd", 0),
    285: ("fallocate", "fd", 0),
    76: ("truncate", "path", 0),
    77: ("ftruncate", "fd", 0),
    82: ("rename", "path", 0),
    264: ("renameat", "at", 0),
    316: ("renameat2", "at", 0),
    87: ("unlink", "path", 0),
    263: ("unlinkat", "at", 0),
    83: ("mkdir", "path", 0),
    258: ("mkdirat", "at", 0),
    84: ("rmdir", "path", 0),
    86: ("link", "path", 1),
    265: ("linkat", "at", 2),
    88: ("symlink", "path", 1),
    266: ("symlinkat", "at", 1),
}
_FLAGS = {2: 1, 257: 2}  # of opening calls: where their flags are; those that only read are not asked about


def is_possible() -> bool:
    """Whether this machine's kernel asks."""
    try:
        actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()
    except OSError:
        return False
    return platform.machine() == "x86_64" and "user_notif" in actions


def install(tap: str) -> None:
    """In the process under test, before it has threads: ask the Tap whose socket is `tap` from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    # Where the file descriptor of the socket is made before the filter is: opening and sending are not asked about.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to_test:
        to_test.connect(tap)
        program = ctypes.create_string_buffer(_filter())
        head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(program)))
        listener = libc.syscall(_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, head)
        if listener < 0:
            raise OSError(ctypes.get_errno(), "seccomp")
        socket.send_fds(to_test, [b"x"], [listener])
        os.close(listener)
        to_test.recv(1)  # the Tap listens


def _filter() -> bytes:
    """A classic BPF program: one comparison per call; opening calls are asked about if their flags write."""
    load, equal, any_of, give = 0x20, 0x15, 0x45, 0x06
    code = [(load, 0, 0, 4), (equal, 1, 0, _X86_64), (give, 0, 0, _ALLOW), (load, 0, 0, 0)]
    for number in _CALLS:
        if number in _FLAGS:
            code += [
                (equal, 0, 4, number),
                (load, 0, 0, 16 + 8 * _FLAGS[number]),
                (any_of, 0, 1, _WRITING),
                (give, 0, 0, _NOTIFY),
                (give, 0, 0, _ALLOW),
            ]
        else:
            code += [(equal, 0, 1, number), (give, 0, 0, _NOTIFY)]
    return b"".join(struct.pack("HBBI", *c) for c in [*code, (give, 0, 0, _ALLOW)])


@dataclass(frozen=True)
class Call:
    name: str
    path: str  # relative to the watched directory; what chance has put into it is cut out

    def __str__(self) -> str:
        return f"{self.name} {self.path}"

    @property
    def is_write(self) -> bool:
        return self.name in ("write", "pwrite64")


class Tap:
    """Watches the calls below `directory`; at number `at` (from 0) it acts, once:

    (`lasting`: at all from there on)
    `kill`: SIGKILL instead of the call; `torn`: half of a write, then SIGKILL; `freeze`: SIGSTOP before the call;
    `short`: this and all later writes write half of what they could; an errno: that error instead of the call.
    """

    def __init__(
        self, directory: Path, at: int | None = None, action: str | int = "kill", lasting: bool = False
    ) -> None:
        self.calls: list[Call] = []
        self.acted = threading.Event()
        self.process = 0  # that was struck
        self._directory, self._at, self._action, self._lasting = directory, at, action, lasting
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.address = f"\0stoker-tap-{os.getpid()}-{id(self)}"
        self._socket.bind(self.address)
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """When the processes have ended."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # closed: nobody came
            return
        with connection:
            _, (listener, *_), _, _ = socket.recv_fds(connection, 1, 1)
            connection.send(b"x")
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while True:
            ((_, event),) = poll.poll()
            if not event & select.POLLIN:  # nobody is left to ask
                break
            notice = bytearray(80)
            try:
                fcntl.ioctl(listener, _RECV, notice)
                self._answer(listener, notice)
            except OSError as e:
                if e.errno != errno.ENOENT:  # it died meanwhile
                    raise
        os.close(listener)

    def _answer(self, listener: int, notice: bytearray) -> None:
        notice_id, thread, _, number, _, _, *arguments = struct.unpack("QIIiIQ6Q", notice)
        value, error, flags = 0, 0, _CONTINUE
        try:
            call = self._call(thread, number, arguments)
        except OSError:  # it died meanwhile
            return
        if call is not None:
            self.calls.append(call)
            is_now = self._at is not None and len(self.calls) > self._at and (self._lasting or not self.acted.is_set())
            if is_now and self._action in ("kill", "torn"):
                if self._action == "torn" and call.is_write:
                    _write_half(thread, number, arguments)
                self._signal(thread, signal.SIGKILL)
                return
            if is_now and self._action == "freeze":
                self._signal(thread, signal.SIGSTOP)
                return  # the stop interrupts the call, and it is made (and asked about) anew when the process goes on
            if is_now and isinstance(self._action, int):
                self.acted.set()
                error, flags = -self._action, 0
            if self._action == "short" and call.is_write and arguments[2] > 1:
                self.acted.set()
                value = _write_half(thread, number, arguments)
                flags = 0 if value else _CONTINUE
        fcntl.ioctl(listener, _SEND, bytearray(struct.pack("QqiI", notice_id, value, error, flags)))

    def _signal(self, thread: int, number: int) -> None:
        self.process = _process(thread)
        os.kill(self.process, number)
        self.acted.set()

    def _call(self, thread: int, number: int, arguments: list[int]) -> Call | None:
        """None if it is of no file below the directory."""
        name, kind, place = _CALLS[number]
        if kind == "fd":
            path = os.readlink(f"/proc/{thread}/fd/{arguments[place] & 0xFFFFFFFF}")
        else:
            path = _text(thread, arguments[place + (kind == "at")])
            if kind == "at" and not path.startswith("/"):
                at = ctypes.c_int(arguments[place] & 0xFFFFFFFF).value
                base = os.readlink(f"/proc/{thread}/" + ("cwd" if at == _AT_FDCWD else f"fd/{at}"))
                path = f"{base}/{path}"
        try:
            relative = Path(path).relative_to(self._directory)
        except ValueError:
            return None
        return Call(name, re.sub(r"(-\d+)?-[0-9a-f]{8}(?=$|/)", "-*", str(relative)))


def _text(thread: int, address: int) -> str:
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(4096).partition(b"\0")[0].decode()


def _process(thread: int) -> int:
    status = Path(f"/proc/{thread}/status").read_text()
    return int(status.partition("\nTgid:")[2].split()[0])


def _write_half(thread: int, number: int, arguments: list[int]) -> int:
    """Do half of the thread's write for it, through its own open file; returns the bytes."""
    fd, address, count, position = arguments[:4]
    process = os.pidfd_open(_process(thread))
    file = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, fd & 0xFFFFFFFF, 0)
    os.close(process)
    half = count // 2
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
        half -= half % mmap.PAGESIZE
    try:
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory, mmap.mmap(-1, max(half, 1)) as data:
            memory.seek(address)
            data.write(memory.read(half))
            view = memoryview(data)[:half]
            done = os.pwrite(file, view, position) if number == _PWRITE else os.write(file, view)
            view.release()
            return done
    finally:
        os.close(file)
