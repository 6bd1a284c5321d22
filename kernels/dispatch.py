"""Choosing implementations once, at start: a configuration and a device in, an immutable `Ops` out.

Holds no state and logs nothing: the caller logs `table(ops.choices)` and passes `ops` to the model. What is asked for
by name is honoured or refused, and replaced only with strict=False; `auto` looks for the best that is there.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import reference
from .device import Device
from .implementations import IMPLEMENTATIONS, Function, Implementation
from .measured import COMPILED, Measured
from .ops import OP_NAMES, Choice, Ops

AUTO, REFERENCE = "auto", "reference"
# Configuration has a group of these names, so that `kernels=native` is what people write for kernels.default=native.
_GROUPS = (AUTO, REFERENCE, "native", "apex")
AUTO_ORDER = ("native", "apex", "flash", "varlen", "sdpa", REFERENCE)
# What a compiler fuses with its neighbours, where a kernel of its own would read and write everything once more.
POINTWISE = ("rope", "swiglu", "geglu", "gelu", "dropout")


@dataclass(frozen=True)
class _Question:
    """What is the same for every op."""

    device: Device
    is_strict: bool
    is_compiled: bool
    measured: Measured | None
    is_float64: bool = False

    def excludes(self, row: Implementation) -> str | None:
        """Why it cannot do what the run is about, whatever is installed."""
        return "takes no float64" if self.is_float64 and not row.takes_float64 else row.cannot(self.device)

    def stands_in_the_way_of(self, row: Implementation) -> str | None:
        """What keeps it from being used, as a clause for people."""
        return self.excludes(row) or row.lacking(self.device)


@dataclass(frozen=True)
class _Refusal:
    """Why an op gets none; ops with the same one share a line."""

    setting: str
    reason: str


def select(
    config: Mapping[str, str] | None = None,
    device: str | Device = "cpu",
    implementations: Sequence[Implementation] = IMPLEMENTATIONS,
    *,
    strict: bool = True,
    is_compiled: bool = False,
    measured: Measured | None = None,
    is_float64: bool = False,
) -> Ops:
    """The ops for a configuration.

    config: op name or "default" -> implementation name or "auto"; what is absent is "auto". A default counts for the
    ops that have such an implementation, the others are "auto". device: or its type alone, when nothing more is known
    of it. implementations: the table; a plug-in passes (*IMPLEMENTATIONS, its own). strict: False lets the reference
    take over where a named implementation, or the one that `auto` expects, is not there. is_compiled: under
    torch.compile, to which `auto` leaves pointwise ops. measured: times on this device, which then decide `auto`.
    is_float64: the weights are, which few implementations take.
    Raises ValueError with one line per problem: unknown op or implementation with the nearest known, or what a chosen
    implementation lacks. Raises TypeError for an implementation whose signature is not the op's.
    """
    config = dict(config or {})
    place = Device(device) if isinstance(device, str) else device
    question = _Question(place, strict, is_compiled, measured, is_float64)
    by_op = {op: {i.name: i for i in implementations if i.op == op} for op in OP_NAMES}
    problems = _unknown(config, {name for rows in by_op.values() for name in rows})
    if problems:
        raise ValueError("\n".join(problems))
    chosen: dict[str, Implementation] = {}
    choices: list[Choice] = []
    refused: dict[_Refusal, list[str]] = {}  # -> ops
    for op in OP_NAMES:
        found = _resolve(op, config, by_op[op], question)
        if isinstance(found, _Refusal):
            refused.setdefault(found, []).append(op)
            continue
        row, why = found
        chosen[op] = row
        choices.append(Choice(op, row.name, "; ".join(filter(None, (why, row.note)))))
    if refused:
        raise ValueError("\n".join(_refused(r, ops) for r, ops in refused.items()))
    functions: dict[str, Any] = {op: _load(row) for op, row in chosen.items()}
    return Ops(**functions, choices=tuple(choices))


def table(choices: Sequence[Choice]) -> str:
    """The choices for the log: op, implementation, why, in aligned columns."""
    rows = [("kernels", "chosen", "why"), *((c.op, c.implementation, c.why) for c in choices)]
    widths = [max(len(row[k]) for row in rows) for k in (0, 1)]
    return "\n".join(f"{op:<{widths[0]}}  {name:<{widths[1]}}  {why}" for op, name, why in rows)


def automatic(
    op: str,
    device: Device,
    implementations: Sequence[Implementation] = IMPLEMENTATIONS,
    measured: Measured | None = None,
) -> Choice | str:
    """What `kernels=auto` takes for an op under kernels.strict; where that would end the start, why."""
    rows = {i.name: i for i in implementations if i.op == op}
    found = _automatic(f"kernels={AUTO}", rows, _Question(device, True, False, measured))
    return found.reason if isinstance(found, _Refusal) else Choice(op, found[0].name, found[1])


def _unknown(config: Mapping[str, str], names: set[str]) -> list[str]:
    """One line per key that is no op and per value that no op knows."""
    problems = []
    fields, values = ("default", *OP_NAMES), sorted({AUTO, *names})
    for key, value in config.items():
        if key not in fields:
            problems.append(f"kernels.{key}: unknown op{nearest(key, fields)}")
        elif value not in values:
            problems.append(f"kernels.{key}={value}: unknown implementation{nearest(value, values)}")
    return problems


def _refused(refusal: _Refusal, ops: Sequence[str]) -> str:
    """One line: the setting, the ops that it does not name itself, the reason."""
    of = "" if refusal.setting.startswith(f"kernels.{ops[0]}=") else f"{', '.join(ops)}: "
    return f"{refusal.setting}: {of}{refusal.reason}"


def _resolve(
    op: str, config: Mapping[str, str], rows: Mapping[str, Implementation], question: _Question
) -> tuple[Implementation, str] | _Refusal:
    """(implementation, why)."""
    is_named, wanted = op in config, config.get(op, config.get("default", AUTO))
    setting = f"kernels.{op if is_named else 'default'}={wanted}"
    if not is_named and wanted in _GROUPS:
        setting = f"kernels={wanted}"
    if wanted == AUTO:
        return _automatic(setting, rows, question)
    row = rows.get(wanted)
    if row is None and not is_named:
        found = _automatic(setting, rows, question)
        return found if isinstance(found, _Refusal) else (found[0], f"{found[1]}; has no {wanted}")
    others = [name for name, other in rows.items() if not question.stands_in_the_way_of(other)]
    if row is None:
        return _Refusal(setting, f"no such implementation; choose {' or '.join([AUTO, *others])}")
    reason = question.stands_in_the_way_of(row)
    if reason and question.is_strict:
        return _Refusal(setting, f"{reason}; choose {' or '.join(others)}, or set kernels.strict=false")
    if reason:
        return rows[REFERENCE], f"instead of {wanted}, with kernels.strict=false: {reason}"
    return row, "as configured" if is_named else f"by {setting}"


def _automatic(
    setting: str, rows: Mapping[str, Implementation], question: _Question
) -> tuple[Implementation, str] | _Refusal:
    """What was measured fastest, else the first of AUTO_ORDER, then of the rest, that lacks nothing; the better ones'
    reasons go into the log."""
    op = rows[REFERENCE].op
    times = question.measured.of(op) if question.measured else {}
    if question.is_compiled and COMPILED in times:
        times[REFERENCE] = times[COMPILED]
    elif question.is_compiled and op in POINTWISE:
        return rows[REFERENCE], f"{AUTO}: left to the compiler"
    order = [name for name in AUTO_ORDER if name in rows] + [name for name in rows if name not in AUTO_ORDER]
    usable: list[Implementation] = []
    passed_over: list[str] = []
    for row in (rows[name] for name in order if question.device.type not in rows[name].no_gain):
        reason = question.stands_in_the_way_of(row)
        if reason is None:
            usable.append(row)
        elif not row.devices or question.device.type in row.devices:
            if row.is_expected and question.is_strict and question.excludes(row) is None:
                return _Refusal(setting, f"{row.name}: {reason}; or kernels.strict=false, and the next best takes over")
            if not usable:
                passed_over.append(f"{row.name}: {reason}")
    timed = sorted((row for row in usable if row.name in times), key=lambda row: times[row.name])
    if len(timed) > 1:
        shown = ", ".join(f"{row.name} {times[row.name]:.1f} us" for row in timed)
        return timed[0], f"{AUTO}, measured here: {shown}"
    return usable[0], "; ".join([AUTO, *passed_over])


def _load(row: Implementation) -> Function:
    function = row.load()
    wanted, found = inspect.signature(getattr(reference, row.op)), inspect.signature(function)
    if _shape(wanted) != _shape(found):
        raise TypeError(f"kernels.{row.op}={row.name}: signature {found}, the op's is {wanted}")
    return function


def _shape(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that refuses a name: the one that may have been meant, and all that are known."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    guess = f", did you mean {close[0]}?" if close else ";"
    return f"{guess} known: {', '.join(known)}"
