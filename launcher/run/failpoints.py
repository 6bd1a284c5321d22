"""Places where a drill or a test may break the product on purpose.

`STOKER_FAILPOINTS="checkpoint.publish@attempt=1:freeze,step@step=7@rank=1@attempt=1:exit"` in the environment makes
the process that reaches that place with those values act once. Without the variable a failpoint costs one check of a
module constant. Actions: `exit` (os._exit(66)), `kill` (SIGKILL to itself), `freeze` (SIGSTOP to itself), `hang`
(sleeps for ever), `raise` (RuntimeError), `signal-NAME` (that signal to itself), and `pause-MS` (sleeps that many
milliseconds, each time).
"""

from __future__ import annotations

import os
import signal
import time

_VARIABLE = "STOKER_FAILPOINTS"
_ACTIONS = ("exit", "kill", "freeze", "hang", "raise")


def _is_action(action: str) -> bool:
    if action.startswith("pause-"):
        return action.removeprefix("pause-").isdecimal()
    if action.startswith("signal-"):
        return f"SIG{action.removeprefix('signal-')}" in signal.Signals.__members__
    return action in _ACTIONS


def _parse(text: str) -> list[tuple[str, dict[str, str], str]]:
    points = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        where, _, action = item.rpartition(":")
        name, *conditions = where.split("@")
        if not name or not all("=" in c for c in conditions) or not _is_action(action):
            raise ValueError(
                f"{_VARIABLE}={item!r}: expected NAME[@key=value...]:ACTION, where ACTION is one of "
                f"{', '.join(_ACTIONS)}, pause-MS, signal-NAME"
            )
        points.append((name, dict(c.split("=", 1) for c in conditions), action))
    return points


_POINTS = _parse(os.environ.get(_VARIABLE, ""))


def failpoint(name: str, **values: int | str) -> None:
    """Act if the environment asks for it at this place with these values."""
    if not _POINTS:
        return
    for point in _POINTS:
        wanted, conditions, action = point
        if wanted == name and all(str(values.get(k)) == v for k, v in conditions.items()):
            if action.startswith("pause-"):
                time.sleep(int(action.removeprefix("pause-")) / 1000)
                continue
            _POINTS.remove(point)
            return _act(name, action)


def _act(name: str, action: str) -> None:
    if action == "exit":
        os._exit(66)
    if action == "raise":
        raise RuntimeError(f"failpoint {name}")
    if action == "hang":
        while True:
            time.sleep(3600)
    if action in ("kill", "freeze"):
        # To this thread: it would otherwise go on for a while, until another thread has taken the signal.
        signal.raise_signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    else:
        os.kill(os.getpid(), signal.Signals[f"SIG{action.removeprefix('signal-')}"])
