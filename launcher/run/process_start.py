"""When a process began, by which it is told from a later one with the same number.

Owns: that look into /proc. Does not own: what is done with it. Standard library only.
"""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Start time of a running process, in clock ticks since boot; None if there is none (a zombie has ended)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name, in parentheses, may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
