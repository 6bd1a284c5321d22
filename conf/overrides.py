"""Command-line overrides, each judged on its own before anything is composed: three mistakes give three lines.

Owns: what `key=value` may be, and the form in which Hydra gets it. Which choices there are is yaml_files.py's business,
the types of fields fields.py's.

Two freedoms over Hydra's grammar, both for what people type into a shell: a value for a string field is taken as it
stands (`cluster.exclude=n1,n2`, `cluster.constraint=[a|b]`), and `+`, `++` or nothing before a key mean the same,
because the schema is closed. `data.sources[0].prefix` is read as `data.sources.0.prefix`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from .fields import check_part, container, lookup, without_none
from .problems import Problem, nearest, no_such_choice
from .schema import Config
from .yaml_files import Choices

# Groups of which a run may have none.
OPTIONAL_GROUPS = ("experiment",)

_FORM = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]*?)(?P<given>=(?P<value>.*))?", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][\w$-]*(?:[./][\w$-]+)*")
_POSITION = re.compile(r"\[(\d+)\]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def prepare(overrides: Sequence[str], choices: Choices, defaults: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Overrides as Hydra takes them, and the problems with the others.

    choices: every group that is found, users' own among them. defaults: the groups of our defaults list; a choice of
    another group is appended to it.
    """
    parser = OverridesParser.create()
    chosen: dict[str, str] = {}  # the last choice of a group wins, as the last value of a field does
    values: list[str] = []
    problems: list[Problem] = []
    for text in overrides:
        done = _one(text, choices, defaults, parser)
        if isinstance(done, str):
            values.append(done)
        elif isinstance(done, _Choice):
            chosen[done.group] = done.text
        else:
            problems += done
    return [*filter(None, chosen.values()), *values], problems


@dataclass(frozen=True)
class _Choice:
    group: str
    text: str  # as Hydra takes it; empty: none of this group


def _one(
    text: str, choices: Choices, defaults: Sequence[str], parser: OverridesParser
) -> str | _Choice | list[Problem]:
    form = _FORM.fullmatch(text)
    assert form is not None  # every string matches
    removes, key, value = form["sign"] == "~", _POSITION.sub(r".\1", form["key"].strip()), form["value"]
    problem = _problem_of_form(text, key, value, removes)
    if problem:
        return [problem]
    if key in choices and not (value or "").lstrip().startswith("{"):
        return _choice(key, None if removes else _parse(parser, key, value or ""), choices, defaults)
    if removes:
        return _removal(key)
    return _value(key, (value or "").strip(), parser, choices)


def _problem_of_form(text: str, key: str, value: str | None, removes: bool) -> Problem | None:
    if _CONTROL.search(text):
        return Problem(key or repr(text), None, "holds a line break or another control character; expected one line")
    if value is None and not removes:
        return Problem(text, None, f"expected key=value; for example {text if _KEY.fullmatch(text) else 'key'}=...")
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return Problem(key, None, "Hydra's own settings have no effect here; leave it out")
    if "@" in key:
        return Problem(key, None, f"packages are not used here; write {key.partition('@')[0]}=...")
    if not _KEY.fullmatch(key):
        return Problem(key or text, None, "is no key; expected group=choice or section.field=value")
    return None


def _parse(parser: OverridesParser, key: str, value: str) -> Override | Problem:
    try:
        parsed = parser.parse_override(f"{key}={value}")
    except HydraException:
        return Problem(key, value, "cannot be read; put quotes within the quotes: " + f"\"{key}='...'\"")
    if parsed.is_sweep_override():
        return Problem(key, value, "several values; give one")
    return parsed


def _choice(
    group: str, parsed: Override | Problem | None, choices: Choices, defaults: Sequence[str]
) -> _Choice | list[Problem]:
    if isinstance(parsed, Problem):
        return [parsed]
    chosen: Any = parsed.value() if parsed else None
    if chosen is None:
        if group in OPTIONAL_GROUPS:
            return _Choice(group, "")
        message = f"one must be chosen; {group} has: {', '.join(choices[group])}"
        return [Problem(group, "null" if parsed else None, message)]
    if str(chosen) not in choices[group]:
        return [no_such_choice(group, str(chosen), choices[group])]
    return _Choice(group, f"{'' if group in defaults else '+'}{group}={chosen}")


def _removal(key: str) -> str | list[Problem]:
    path = key.split(".")
    hint = lookup(path)
    if isinstance(hint, Problem):
        return [hint]
    parent = lookup(path[:-1]) if len(path) > 1 else Config
    if container(parent)[0] is not dict:
        return [Problem(key, None, "a field cannot be removed; set it to the value it should have")]
    return f"~{key}"


def _value(key: str, text: str, parser: OverridesParser, choices: Choices) -> str | list[Problem]:
    path = key.split(".")
    hint = lookup(path)
    if isinstance(hint, Problem):
        group = nearest(key, choices) if "." not in key else None
        return [Problem(key, None, f"unknown key; did you mean {group}?")] if group else [hint]
    if container(hint) == (list, str) and text[:1] == "[" and text[-1:] == "]":
        return _texts(key, path, text, hint, parser)
    parsed = _parse(parser, key, text)
    if without_none(hint)[0] is str:
        return _text(key, path, text, hint, parsed)
    if isinstance(parsed, Problem):
        return [parsed]
    # The value itself is shown as it was typed: 1e3, not 1000.0.
    found = check_part(hint, parsed.value(), path)
    return [replace(p, value=text) if p.field == key else p for p in found] or f"++{key}={text}"


def _text(key: str, path: list[str], text: str, hint: Any, parsed: Override | Problem) -> str | list[Problem]:
    """A string field: what Hydra does not read as a string or as null is taken as it stands."""
    value: Any = parsed.value() if isinstance(parsed, Override) else 0
    if value is None or isinstance(value, str):
        return check_part(hint, value, path) or f"++{key}={text}"
    return f"++{key}={QuotedString(text, Quote.single).with_quotes()}"


def _texts(key: str, path: list[str], text: str, hint: Any, parser: OverridesParser) -> str | list[Problem]:
    """A list of strings: each element as if it stood alone, so that `[--lr,1e-3]` keeps its words as they are."""
    values: list[str] = []
    for item in _elements(text[1:-1]):
        parsed = _parse(parser, key, item)
        value: Any = parsed.value() if isinstance(parsed, Override) else item
        values.append(value if isinstance(value, str) else item)
    quoted = ",".join(QuotedString(value, Quote.single).with_quotes() for value in values)
    return check_part(hint, values, path) or f"++{key}=[{quoted}]"


def _elements(text: str) -> list[str]:
    """The parts between the commas of a list's text, but for commas in quotes, in brackets or behind a backslash."""
    parts, start, depth, quote, position = [], 0, 0, "", 0
    while position < len(text):
        c = text[position]
        if c == "\\":
            position += 1
        elif quote:
            quote = "" if c == quote else quote
        elif c in "'\"" and not text[start:position].strip():
            quote = c
        elif c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth <= 0:
            parts.append(text[start:position].strip())
            start = position + 1
        position += 1
    rest = text[start:].strip()
    return [*parts, rest] if parts or rest else []
