"""`python task_start.py PARENT ERRORS DIRECTORY WORD...`: becomes the user's command, which dies with its parent.

Owns: what must happen between fork and exec: the kernel kills it when its parent dies, signals mean what they do by
default, and a command that cannot be started says so on the descriptor ERRORS, which a successful exec closes. Run by
its path: it imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    parent, errors, directory, *words = argv
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before the call
        return 1
    os.set_inheritable(int(errors), False)
    # An ignored signal stays ignored over exec; Python ignores SIGPIPE, and a shell's background jobs ignore SIGINT.
    for s in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(s, signal.SIG_DFL)
        except (OSError, ValueError):  # those that the C library keeps for itself
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.chdir(directory)
        os.execvp(words[0], words)
    except OSError as e:
        what = directory if e.filename == directory else words[0]
        os.write(int(errors), f"cannot start {words[0]!r}: {what}: {e.strerror}".encode())
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
