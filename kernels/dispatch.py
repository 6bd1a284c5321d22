"""Choosing implementations once, at start: a configuration and a device in, an immutable `Ops` out.

Holds no state and logs nothing: the caller logs `ops.choices`, one line per op, and passes `ops` to the model. An
explicit choice is honoured or refused, never replaced; only `auto` looks for the next best.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import reference
from .implementations import IMPLEMENTATIONS, Function, Implementation
from .ops import OP_NAMES, Choice, Ops

AUTO = "auto"
AUTO_ORDER = ("native", "apex", "flash", "varlen", "sdpa", "reference")


def select(
    config: Mapping[str, str] | None = None,
    device: str = "cpu",
    implementations: Sequence[Implementation] = IMPLEMENTATIONS,
) -> Ops:
    """The ops for a configuration.

    config: op name or "default" -> implementation name or "auto"; what is absent is "auto". device: torch device type
    (cpu, cuda). implementations: the table; a plug-in passes (*IMPLEMENTATIONS, its own).
    Raises ValueError with one line per problem: unknown op or implementation with the nearest known, or what a chosen
    implementation lacks. Raises TypeError for an implementation whose signature is not the op's.
    """
    config = dict(config or {})
    by_op = {op: {i.name: i for i in implementations if i.op == op} for op in OP_NAMES}
    problems = _unknown(config, {name for rows in by_op.values() for name in rows})
    if problems:
        raise ValueError("\n".join(problems))
    chosen: dict[str, Implementation] = {}
    choices: list[Choice] = []
    for op in OP_NAMES:
        field = op if op in config else "default"
        wanted = config.get(field, AUTO)
        row, text = _resolve(op, field, wanted, by_op[op], device)
        if row is None:
            problems.append(text)
        else:
            chosen[op] = row
            choices.append(Choice(op, row.name, "; ".join(filter(None, (text, row.note)))))
    if problems:
        raise ValueError("\n".join(problems))
    functions: dict[str, Any] = {op: _load(row) for op, row in chosen.items()}
    return Ops(**functions, choices=tuple(choices))


def _unknown(config: Mapping[str, str], names: set[str]) -> list[str]:
    """One line per key that is no op and per value that no op knows."""
    problems = []
    fields, values = ("default", *OP_NAMES), sorted({AUTO, *names})
    for key, value in config.items():
        if key not in fields:
            problems.append(f"kernels.{key}: unknown op{_nearest(key, fields)}")
        elif value not in values:
            problems.append(f"kernels.{key}={value}: unknown implementation{_nearest(value, values)}")
    return problems


def _resolve(
    op: str, field: str, wanted: str, rows: Mapping[str, Implementation], device: str
) -> tuple[Implementation | None, str]:
    """(implementation, why) or (None, problem)."""
    if wanted == AUTO:
        return _automatic(op, rows, device)
    row = rows.get(wanted)
    available = [name for name, other in rows.items() if not other.lacks(device)]
    instead = f"choose {' or '.join([AUTO, *available])} for kernels.{op}"
    if row is None:
        return None, f"kernels.{field}={wanted}: {op} has no such implementation; {instead}"
    reasons = row.lacks(device)
    if reasons:
        return None, f"kernels.{field}={wanted}: {op}: {'; '.join(reasons)}; {instead}"
    return row, "as configured" if field == op else "by kernels.default"


def _automatic(op: str, rows: Mapping[str, Implementation], device: str) -> tuple[Implementation | None, str]:
    """The first of AUTO_ORDER, then of the rest, that lacks nothing; the better ones' reasons go into the log line."""
    order = [name for name in AUTO_ORDER if name in rows] + [name for name in rows if name not in AUTO_ORDER]
    passed_over: list[str] = []
    for name in order:
        if device in rows[name].no_gain:
            continue
        reasons = rows[name].lacks(device)
        if not reasons:
            return rows[name], "; ".join([AUTO, *passed_over])
        if rows[name].runs_on(device):
            passed_over.append(f"{name}: {', '.join(reasons)}")
    return None, f"kernels.{op}={AUTO}: nothing runs on {device}: {'; '.join(passed_over) or 'no implementation'}"


def _load(row: Implementation) -> Function:
    assert row.load is not None, row
    function = row.load()
    wanted, found = inspect.signature(getattr(reference, row.op)), inspect.signature(function)
    if _shape(wanted) != _shape(found):
        raise TypeError(f"kernels.{row.op}={row.name}: signature {found}, the op's is {wanted}")
    return function


def _shape(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def _nearest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    guess = f", did you mean {close[0]}?" if close else ";"
    return f"{guess} known: {', '.join(known)}"
