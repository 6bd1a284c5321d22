"""The schema as something to ask: which fields there are, what a value of one must be, and building typed values.

Owns: the walk over schema.py's dataclasses and the strict checks of types. Standard library only; knows neither Hydra
nor YAML, nor rules between fields (checks.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from .problems import Problem, nearest
from .schema import Config


@functools.cache
def members(section: type) -> dict[str, Any]:
    """Name -> type of a section's fields, in the order of the schema."""
    return {name: hint for name, hint in typing.get_type_hints(section).items() if not name.startswith("_")}


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def without_none(hint: Any) -> tuple[Any, bool]:
    """(T, True) for `T | None`, (T, False) for T."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    (inner,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return inner, True


def container(hint: Any) -> tuple[Any, Any]:
    """(list, T) for `list[T]`, (dict, T) for `dict[str, T]`, (None, hint) for anything else."""
    origin = typing.get_origin(hint)
    return (origin, typing.get_args(hint)[-1]) if origin in (list, dict) else (None, hint)


@functools.cache
def paths() -> tuple[str, ...]:
    """Every dotted path of the schema down to its fields; sections are among them."""
    return tuple(_paths(Config, ""))


def _paths(section: type, prefix: str) -> Iterator[str]:
    for name, hint in members(section).items():
        yield prefix + name
        if is_section(hint):
            yield from _paths(hint, f"{prefix}{name}.")


def lookup(path: Sequence[str]) -> Any | Problem:
    """The type of the field at a path, through sections, list positions and dictionary keys; a Problem if unknown."""
    hint: Any = Config
    for depth, part in enumerate(path):
        kind, inner = container(hint)
        if is_section(hint):
            if part not in members(hint):
                return unknown_key(path[:depth], part, hint)
            hint = members(hint)[part]
        elif kind is dict or (kind is list and part.isdigit()):
            hint = inner
        else:
            here = ".".join(path[:depth])
            return Problem(".".join(path), None, f"unknown key; {here} is {describe(hint)} and has no `{part}`")
    return hint


def unknown_key(path: Sequence[str], key: str, section: Any) -> Problem:
    """The problem with a key that its section does not have; names the nearest key here, then anywhere."""
    prefix = ".".join(path) + "." if path else ""
    here = nearest(key, members(section))
    meant = prefix + here if here else _by_last_part(key)
    if meant:
        return Problem(prefix + key, None, f"unknown key; did you mean {meant}?")
    name = prefix.rstrip(".") or "the top level"
    return Problem(prefix + key, None, f"unknown key; {name} has: {', '.join(members(section))}")


def _by_last_part(key: str) -> str | None:
    ends: dict[str, str] = {}
    for path in paths():
        ends.setdefault(path.rpartition(".")[2], path)
    found = nearest(key, ends)
    return ends[found] if found else None


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
_PLURALS = {int: "integers", float: "numbers", bool: "true or false", str: "strings"}


def describe(hint: Any) -> str:
    """What a value of this type is, for people."""
    hint, nullable = without_none(hint)
    return _describe(hint) + (" or null" if nullable else "")


def _describe(hint: Any) -> str:
    kind, inner = container(hint)
    if kind is not None:
        inner, _ = without_none(inner)
        of = _PLURALS.get(inner, inner.__name__)
        return f"a list of {of}" if kind is list else f"a mapping of names to {of}"
    if is_section(hint):
        return f"a mapping with the keys {', '.join(members(hint))}"
    if issubclass(hint, Enum):
        return f"one of {', '.join(member.value for member in hint)}"
    return _NAMES[hint]


def build(hint: Any, value: Any, path: Sequence[str], problems: list[Problem], complete: bool = True) -> Any:
    """The typed value for a plain one (as JSON or YAML has it); what is wrong is appended to `problems`.

    Integers are taken for float fields; nothing else is converted. With `complete` a section must have every key;
    without, a missing key gets its default.
    """
    hint, nullable = without_none(hint)
    if value is None and nullable:
        return None
    kind, inner = container(hint)
    if is_section(hint) and isinstance(value, dict):
        return _build_section(hint, value, path, problems, complete)
    if kind is list and isinstance(value, list):
        return [build(inner, item, (*path, str(j)), problems, complete) for j, item in enumerate(value)]
    if kind is dict and isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        problems += [Problem(".".join(path), show(key), "expected a string as key; quote it") for key in wrong]
        return {key: build(inner, item, (*path, str(key)), problems, complete) for key, item in value.items()}
    if kind is None and not is_section(hint):
        typed, advice = _scalar(hint, value)
        if advice is None:
            return typed
    else:
        advice = ""
    problems.append(Problem(".".join(path), show(value), f"expected {_describe(hint)}{' or null' * nullable}{advice}"))
    return None


def _build_section(hint: Any, value: dict[Any, Any], path: Sequence[str], problems: list[Problem], full: bool) -> Any:
    fields, built = members(hint), {}
    for key, item in value.items():
        if key in fields:
            built[key] = build(fields[key], item, (*path, key), problems, full)
        else:
            problems.append(unknown_key(path, str(key), hint))
    if full:
        missing = [name for name in fields if name not in value]
        problems += [Problem(".".join((*path, name)), None, "missing; every field must be there") for name in missing]
    return hint(**built)


def _scalar(hint: Any, value: Any) -> tuple[Any, str | None]:
    """(typed value, None), or (None, what to add to "expected ...")."""
    if issubclass(hint, Enum):
        names = {member.value: member for member in hint}
        if isinstance(value, str) and value in names:
            return names[value], None
        near = nearest(value, names) if isinstance(value, str) else None
        return None, f"; nearest: {near}" if near else ""
    if hint is float and type(value) in (int, float):
        return (float(value), None) if math.isfinite(value) else (None, " that is finite")
    if type(value) is hint:
        return value, None
    if hint is int and isinstance(value, float) and value.is_integer():
        return None, f"; write {int(value)}"
    if hint is str and isinstance(value, (int, float)):
        return None, "; put it in quotes"
    return None, ""


def check_part(hint: Any, value: Any, path: Sequence[str]) -> list[Problem]:
    """Problems with one value that is to be merged into a configuration: keys may be missing, integers are taken for
    strings, and what holds an interpolation (`${...}`) or is yet to be given (`???`) is judged later, when resolved.
    Booleans are taken for strings where these are options that may have no value: in a mapping to strings or null.
    """
    problems: list[Problem] = []
    is_option = container(lookup(path[:-1])) == (dict, str | None)
    build(hint, _option(value) if is_option else _as_text(hint, value), path, problems, complete=False)
    return [p for p in problems if p.value is None or not ("${" in p.value or "???" in p.value)]


def _as_text(hint: Any, value: Any) -> Any:
    hint, _ = without_none(hint)
    kind, inner = container(hint)
    if isinstance(value, list) and kind is list:
        return [_as_text(inner, item) for item in value]
    if isinstance(value, dict) and kind is dict:
        return {key: _option(item) if inner == str | None else _as_text(inner, item) for key, item in value.items()}
    if isinstance(value, dict) and is_section(hint):
        known = members(hint)
        return {key: _as_text(known[key], item) if key in known else item for key, item in value.items()}
    return str(value) if hint is str and type(value) is int else value


def _option(value: Any) -> Any:
    return show(value) if type(value) in (bool, int) else value


def show(value: Any) -> str:
    """A plain value as it is written in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return str(value)
