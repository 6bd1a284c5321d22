"""The few system calls that Python 3.10 has no name for: namespaces, mounts, prctl, capabilities. No policy.

Each raises OSError with the kernel's reason. Sources: unshare(2), mount(2), prctl(2), capabilities(7) and
user_namespaces(7).
"""

from __future__ import annotations

import ctypes
import os
import signal

NEW_MOUNT = 0x00020000
NEW_HOSTNAME = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PID = 0x20000000
NEW_NETWORK = 0x40000000

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_CAP_AMBIENT = 1, 15, 36, 47
_PR_CAP_AMBIENT_RAISE = 2
_MNT_DETACH = 2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityWord(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(namespaces: int) -> None:
    """Move this process into new namespaces (a new PID namespace is for its children)."""
    _check(_libc.unshare(ctypes.c_int(namespaces)), "unshare")


def new_user_namespace(others: int) -> None:
    """A user namespace in which we keep our own ids but hold every capability, and `others` owned by it.

    Not mapped to root on purpose: slurmd run as root calls setgroups, which such a namespace denies.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEW_USER | others)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    extra = None if data is None else os.fsencode(data)
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), extra), f"mount on {target}")


def make_mounts_private() -> None:
    """What is mounted from now on stays in this mount namespace."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def bind(source: str, target: str) -> None:
    """Let `target`, which exists, show `source` and what is mounted below it."""
    _mount(source, target, None, _MS_BIND | _MS_REC)


def unbind(target: str) -> None:
    """Undo bind; who still uses what is below it may go on."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(_MNT_DETACH)), f"unmount {target}")


def mount_proc() -> None:
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def mount_tmpfs(target: str) -> None:
    _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")


def _prctl(option: int, *arguments: int | bytes) -> None:
    padded = [*arguments, *[0] * (4 - len(arguments))]
    words = [ctypes.c_char_p(word) if isinstance(word, bytes) else ctypes.c_ulong(word) for word in padded]
    _check(_libc.prctl(ctypes.c_int(option), *words), f"prctl {option}")


def die_with_parent() -> None:
    """Be killed when the parent dies, however it dies."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none leaves the tree below us."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """The name that /proc/PID/comm shows (15 bytes)."""
    _prctl(_PR_SET_NAME, name.encode())


def keep_capabilities_over_exec() -> None:
    """Let the next program keep this process's capabilities though its user is not root (ambient capabilities)."""
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    words = (_CapabilityWord * 2)()
    _check(_libc.capget(ctypes.byref(header), words), "capget")
    for word in words:
        word.inheritable = word.permitted
    _check(_libc.capset(ctypes.byref(header), words), "capset")
    held = words[0].permitted | words[1].permitted << 32
    for capability in range(64):
        if held >> capability & 1:
            _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability)
