"""A run's config.json back into the typed configuration, and the other way round.

Owns: the plain form (exactly the schema as JSON: every key, enums by name). Standard library only, so that it works
where Hydra is not installed; composing a configuration is compose.py's.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from .fields import build, is_section, members
from .problems import ConfigError, Problem
from .schema import Config


def load(path: Path) -> Config:
    """Read a config.json.

    Raises:
        ConfigError: not JSON, an unknown or missing key, a value of the wrong type; all of them, naming the file.
        OSError: the file cannot be read.
    """
    try:
        plain = json.loads(path.read_bytes(), parse_constant=_refuse_constant, object_pairs_hook=_refuse_twice)
    except ValueError as e:
        raise ConfigError([Problem("config", None, f"not a configuration in JSON ({e})", where=str(path))]) from None
    return from_plain(plain, where=str(path))


def from_plain(plain: Any, where: str | None = None) -> Config:
    """The typed configuration for its plain form; `where` (a file's name) goes into the messages.

    Raises:
        ConfigError: an unknown or missing key, or a value of the wrong type; all of them.
    """
    problems: list[Problem] = []
    config = build(Config, plain, (), problems)
    if problems:
        raise ConfigError([Problem(p.field or "config", p.value, p.message, where=where) for p in problems])
    assert isinstance(config, Config)
    return config


def to_plain(config: Config) -> dict[str, Any]:
    """The configuration as dictionaries, lists, strings, numbers, booleans and None; JSON keeps it as it is."""
    plain = _plain(config)
    assert isinstance(plain, dict)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    kind: type = type(value)
    if is_section(kind):
        return {name: _plain(getattr(value, name)) for name in members(kind)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return found
