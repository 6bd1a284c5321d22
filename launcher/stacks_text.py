"""Stacks for people: the text of faulthandler parsed, equal stacks told once, the heartbeat beside them. Pure.

Owns: parsing, grouping and the layout. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .stacks_node import Answer, Beat

_FRAME = re.compile(r'\s+File "(.*)", line (\d+|\?\?\?) in (.*)')
_THREAD = re.compile(r"(Current t|T)hread 0x[0-9a-f]+.*\(most recent call first\):")
# What all ranks' paths have in common and differs from node to node: the directory that the frozen code lies in.
_CODE = re.compile(r"^.*/stoker-[^/]+/[0-9a-f]{32}(?:\.\d+)?/(?:code/)?")
_LIBRARY = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python3\.\d+)/")
# How every process of ours, and every thread, begins: the same for all, and never where one hangs.
_OUTERMOST = re.compile(
    r"<frozen runpy>:.*|(?:.*/)?bootstrap\.py:.*|stoker/train/zygote\.py:\d+ in (?:_fork|main|<module>)"
    r"|threading\.py:\d+ in (?:_bootstrap|_bootstrap_inner)"
)
_ROLES = ("supervisor", "agent", "zygote", "writer")  # in the order of show


@dataclass(frozen=True)
class Thread:
    frames: tuple[str, ...]  # `file:line in function`, most recent call first
    is_main: bool  # the one that took the signal: the main thread, unless that blocks it


def parse(text: str) -> tuple[Thread, ...]:
    """Threads with Python frames, the main one first; what is no frame is passed over."""
    found: list[tuple[list[str], bool]] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        frame = _FRAME.fullmatch(line)
        if head:
            found.append(([], head[1].startswith("C")))
        elif frame and found:
            found[-1][0].append(f"{shorten(frame[1])}:{frame[2]} in {frame[3]}")
    threads = [Thread(_inner(frames), is_main) for frames, is_main in found if frames]
    return tuple(sorted(threads, key=lambda t: not t.is_main))


def _inner(frames: list[str]) -> tuple[str, ...]:
    """Without the outermost frames that say nothing; one is always left."""
    while len(frames) > 1 and _OUTERMOST.fullmatch(frames[-1]):
        frames = frames[:-1]
    return tuple(frames)


def shorten(path: str) -> str:
    """`stoker/train/loop.py`, `torch/nn/modules/module.py`, `threading.py`; other paths as they are."""
    for pattern in (_LIBRARY, _CODE):
        if pattern.match(path):
            return pattern.sub("", path)
    return path


def innermost(text: str) -> str:
    """Where the main thread is: `file:line in function`; empty if that is not known."""
    threads = parse(text)
    return threads[0].frames[0] if threads else ""


def ranges(numbers: Iterable[int]) -> str:
    """`0-6, 9`."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def behind(answers: Sequence[Answer]) -> list[int]:
    """Ranks that the others wait for, if the heartbeats tell: fewer steps, then fewer collectives, than some other."""
    places = {a.rank: (a.beat.step, a.beat.sequence) for a in answers if a.rank is not None and a.beat is not None}
    least = min(places.values(), default=None)
    if least is None or least == max(places.values()):
        return []
    return sorted(rank for rank, place in places.items() if place == least)


def render(answers: Sequence[Answer]) -> str:
    """All processes, those of equal stacks together: ranks first."""
    groups: dict[tuple[object, ...], list[Answer]] = {}
    for a in sorted(answers, key=_order):
        kind = a.role if a.rank is None else "rank"
        groups.setdefault((kind, a.state, a.wchan, a.kernel, _key(a)), []).append(a)
    late = behind(answers)
    blocks = [_block(group) for group in groups.values()]
    if late:
        several = "s" if len(late) > 1 else ""
        where = ", ".join(sorted({a.node for a in answers if a.rank in late}))
        blocks.append(f"rank{several} {ranges(late)} ({where}) behind the others: fewest steps, then collectives")
    return "\n\n".join(blocks)


def _order(a: Answer) -> tuple[int, int, str]:
    return (0, a.rank, a.node) if a.rank is not None else (1, _ROLES.index(a.role) if a.role in _ROLES else 9, a.node)


def _key(a: Answer) -> object:
    threads = parse(a.text)
    return threads or a.text


def _block(group: Sequence[Answer]) -> str:
    first = group[0]
    nodes = ", ".join(dict.fromkeys(a.node for a in group))
    if first.rank is not None:
        who = f"[{ranges(a.rank for a in group if a.rank is not None)}] on {nodes}"
    else:
        who = f"{first.role} on {nodes}"
    lines = [who + (f", pid {first.pid}" if len(group) == 1 else "")]
    lines += [f"  {line}" for line in _beats(group)]
    if first.state:
        state, mark, rest = first.state.partition(";")
        lines.append(f"  {state}{f' in {first.wchan}' if first.wchan else ''}{mark}{rest}")
    if first.kernel:
        lines += ["  kernel, most recent call first:", *(f"    {line}" for line in first.kernel)]
    return "\n".join(lines + _threads(first.text))


def _beats(group: Sequence[Answer]) -> list[str]:
    """One line per place in which ranks of the group are."""
    places: dict[tuple[object, ...], list[Answer]] = {}
    for a in group:
        if a.beat is not None:
            b = a.beat
            places.setdefault((b.phase, b.step, b.micro, b.sequence), []).append(a)
    lines = []
    for there in places.values():
        oldest = max((a.beat for a in there if a.beat), key=lambda b: b.age)
        who = f"{ranges(a.rank for a in there if a.rank is not None)}: " if len(places) > 1 else ""
        lines.append(who + _place(oldest))
    return lines


def _place(b: Beat) -> str:
    return (
        f"phase {b.phase}, {b.step} steps done, micro-batch {b.micro}, {b.sequence} collectives begun; "
        f"moved {b.age:.1f} s ago"
    )


def _threads(text: str) -> list[str]:
    threads = parse(text)
    if not threads:
        return [f"  {line}" for line in text.splitlines()]
    lines = []
    for t in threads:
        lines += ["  main thread:" if t.is_main else "  another thread:", *(f"    {f}" for f in t.frames)]
    return lines
