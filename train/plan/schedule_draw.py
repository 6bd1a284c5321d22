"""A simulated schedule as text for a terminal and as a PNG file. matplotlib is an optional dependency.

Owns: how a timeline looks. What it says (order, durations, bubble, activations in flight) is schedule.py's.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from ...launcher.run.files import write_atomic
from .schedule import Kind, Span, Timeline, peak_in_flight

_COLOURS = {  # (even, odd) stages of a rank
    Kind.FORWARD: ("#4c78a8", "#9ecae9"),
    Kind.BACKWARD: ("#54a24b", "#a6d8a1"),
    Kind.INPUT: ("#f58518", "#ffbf79"),
    Kind.WEIGHT: ("#b279a2", "#e0c1d9"),
}
_NAMES = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.INPUT: "I backward of inputs",
    Kind.WEIGHT: "W backward of weights",
}
_NUMBERED = 600  # actions that still get their micro-batch's number in the picture
_IDLE = "."


def headline(timeline: Timeline) -> str:
    """What was drawn, in one line, with the bubble."""
    order = timeline.order
    stages = f"{order.stages} stages on {order.pipeline} ranks" if order.chunks > 1 else f"{order.pipeline} stages"
    return f"{order.schedule}: {stages}, {order.micro_steps} micro-batches, bubble {100 * timeline.bubble:.1f} %"


def draw_text(timeline: Timeline, width: int = 120) -> str:
    """One line per rank, time to the right: F3 is the forward pass of micro-batch 3, B its backward pass (I of the
    inputs, W of the weights); small letters mark every second stage of a rank. Lines are as long as they must be, but
    where they would pass `width`, only the letters are left, and then letters stand for more time."""
    order = timeline.order
    unit = min(span.end - span.start for spans in timeline.ranks for span in spans)
    units = timeline.length / unit
    label = len(str(order.micro_steps - 1)) + 2  # letter, number, gap
    left = len(f"rank {order.pipeline - 1}  ")
    room = max(width - left, 20)
    per_unit = label if units * label <= room else min(1.0, room / units)
    scale = per_unit / unit
    lines = [headline(timeline), ""]
    for rank, spans in enumerate(timeline.ranks):
        lines.append(f"{f'rank {rank}':<{left}}{_row(timeline, spans, scale, label if per_unit == label else 0)}")
    used = {span.action.kind for spans in timeline.ranks for span in spans}
    lines += ["", "  ".join(_NAMES[kind] for kind in Kind if kind in used) + f"  {_IDLE} waits", ""]
    peaks = peak_in_flight(order)
    lines += [
        f"{f'rank {rank}':<{left}}waits {100 * (1 - busy / timeline.length):.1f} % of the step; "
        f"holds activations of up to {sum(peak.full.values()) + sum(peak.waiting.values())} micro-batches"
        for rank, (busy, peak) in enumerate(zip(timeline.busy, peaks, strict=True))
    ]
    return "\n".join(lines) + "\n"


def _row(timeline: Timeline, spans: Sequence[Span], scale: float, label: int) -> str:
    """label: least columns that a number takes; 0: letters only."""
    row = [_IDLE] * round(timeline.length * scale)
    for span in spans:
        begin, end = round(span.start * scale), round(span.end * scale)
        text = _letter(timeline, span)
        if label:
            text = f"{text}{span.action.micro}".ljust(end - begin)
        row[begin:end] = text[: end - begin] if label else text * (end - begin)
    return "".join(row)


def _letter(timeline: Timeline, span: Span) -> str:
    letter = span.action.kind.value
    return letter.lower() if _is_odd(timeline, span) else letter


def _is_odd(timeline: Timeline, span: Span) -> bool:
    return span.action.stage // timeline.order.pipeline % 2 == 1


def draw_png(path: Path, timeline: Timeline, title: str | None = None) -> None:
    """Write the picture; `title` stands above it (default: headline).

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    order = timeline.order
    figure = Figure(figsize=(13, 1.6 + 0.45 * order.pipeline), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    is_numbered = sum(map(len, timeline.ranks)) <= _NUMBERED
    for rank, spans in enumerate(timeline.ranks):
        bars = [(span.start, span.end - span.start) for span in spans]
        colours = [_COLOURS[span.action.kind][_is_odd(timeline, span)] for span in spans]
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colours, edgecolor="white", linewidth=0.5)
        for span in spans if is_numbered else ():
            middle = (span.start + span.end) / 2
            axes.text(middle, rank, str(span.action.micro), ha="center", va="center", fontsize=7)
    used = [kind for kind in Kind if any(s.action.kind is kind for spans in timeline.ranks for s in spans)]
    handles = [Patch(color=_COLOURS[kind][0], label=_NAMES[kind]) for kind in used]
    if order.chunks > 1:
        handles += [Patch(color="0.8", label="pale: every second stage of a rank")]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    axes.set(title=title or headline(timeline), xlabel="time", xlim=(0, timeline.length))
    axes.set_yticks(range(order.pipeline), [f"rank {r}" for r in range(order.pipeline)])
    axes.invert_yaxis()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomic(path, buffer.getvalue())
