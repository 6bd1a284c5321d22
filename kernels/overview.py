"""What a machine has for each op, on one screen: what `auto` takes, what else is there, and why the rest is not.

Owns: the question to every implementation, the table and the JSON of `stoker kernels show`. Choosing is dispatch.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

from .device import Device
from .dispatch import automatic
from .implementations import IMPLEMENTATIONS, Implementation
from .measured import Measured
from .ops import OP_NAMES

_HEAD = ("op", "auto takes", "also here", "not here")
_WIDTH = 120


@dataclass(frozen=True)
class Row:
    """One op. takes: what `kernels=auto` comes to; None: it ends a run's start. why: where it is not just the best that
    is here, else empty. available: what runs here. lacking: the others, with what stands in their way."""

    op: str
    takes: str | None
    why: str
    available: tuple[str, ...]
    lacking: Mapping[str, str]


def overview(
    device: Device, measured: Measured | None = None, implementations: Sequence[Implementation] = IMPLEMENTATIONS
) -> list[Row]:
    """A row per op, in the order of the ops."""
    return [_row(op, device, measured, [i for i in implementations if i.op == op]) for op in OP_NAMES]


def _row(op: str, device: Device, measured: Measured | None, own: Sequence[Implementation]) -> Row:
    reasons = {i.name: i.lacks(device) for i in own}
    lacking = {name: reason for name, reason in reasons.items() if reason is not None}
    available = tuple(name for name in reasons if name not in lacking)
    found = automatic(op, device, own, measured)
    if isinstance(found, str):
        return Row(op, None, found, available, lacking)
    left_out = [i.name for i in own if device.type in i.no_gain and i.name in available]
    why = f"no gain from {', '.join(left_out)} on {device.type}" if left_out else ""
    if measured is not None and len(measured.of(op)) > 1:
        why = found.why
    return Row(op, found.implementation, why, available, lacking)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{**asdict(row), "available": list(row.available)} for row in rows]


def table(rows: Sequence[Row]) -> str:
    """Aligned columns; a reason stands once, below, under the number that is put beside what it is of."""
    notes: dict[str, int] = {}

    def noted(word: str, reason: str) -> str:
        return f"{word} [{notes.setdefault(reason, len(notes) + 1)}]" if reason else word

    lines = [_HEAD]
    for row in rows:
        others = ", ".join(name for name in row.available if name != row.takes)
        absent = ", ".join(noted(name, reason) for name, reason in row.lacking.items())
        # What stands in the way of the implementation that is expected is said of it already.
        lines.append((row.op, noted(row.takes, row.why) if row.takes else "nothing", others, absent))
    widths = [max(len(line[k]) for line in lines) for k in range(len(_HEAD))]
    text = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    below = [
        fill(f"[{n}] {reason}", _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        for reason, n in notes.items()
    ]
    if any(row.takes is None for row in rows):
        below.append("nothing: kernels=auto ends a run's start; with kernels.strict=false the next best takes over")
    return "\n".join([*text, "", *below]).rstrip()
