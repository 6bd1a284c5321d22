"""Signals as readable bytes: handlers do nothing, the loop that owns them decides."""

from __future__ import annotations

import os
import signal

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class SignalPipe:
    """From its construction on no handled signal is lost; select on `read_end`."""

    def __init__(self) -> None:
        self.read_end, write_end = os.pipe()
        for fd in (self.read_end, write_end):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for s in HANDLED:
            signal.signal(s, lambda *_: None)

    def take(self) -> list[signal.Signals]:
        """Those that came since the last call. SIGCONT, which comes with every signal of Slurm's, is not among them."""
        try:
            numbers = os.read(self.read_end, 256)
        except BlockingIOError:
            return []
        return [signal.Signals(n) for n in numbers if n in HANDLED]
