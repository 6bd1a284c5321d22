"""What W&B gets: the numbers of a step, and a configuration without secrets.

Owns: names and what is left out. Pure. Standard library only.
"""

from __future__ import annotations

import math
from typing import Any

from ..conf.secret_names import is_secret, secrets_in
from .run.layout import RunDir
from .track_feed import Record, Row

# Null in the metrics means: not finite.
_CAN_BE_NAN = {"loss", "grad_norm", "eval_loss", "auxiliary_loss", "highest_load", "lowest_load"}
_NOT_VALUES = {"step", "time", "attempt", "generation"}
_HIDDEN = "(not sent)"


def values_of(row: Row) -> dict[str, float]:
    """Every number of a step's line, with `parts` flattened (`parts/data`, ...), and who did it.

    `rewind/*` stand in the first new step after steps were done again: how many rewinds the run has had, how many
    steps were done again since the last new one, and which step the run went back to. `_timestamp` is W&B's own name
    for when it happened.
    """
    values: dict[str, float] = {"attempt": row.attempt, "generation": row.generation}
    values |= _numbers({k: v for k, v in row.record.items() if k not in _NOT_VALUES}, "")
    when = row.record.get("time")
    if isinstance(when, (int, float)):
        values["_timestamp"] = when
    if row.rewinds:
        last = row.rewinds[-1]
        values["rewind/count"] = last.number
        values["rewind/steps"] = sum(r.steps for r in row.rewinds)
        values["rewind/to_step"] = min(r.to_step for r in row.rewinds)
    return values


def _numbers(record: Record, prefix: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= _numbers(value, f"{prefix}{name}/")
        elif value is None and name in _CAN_BE_NAN:
            found[prefix + name] = math.nan
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[prefix + name] = value
    return found


def public_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without what could hold a key: variables named like one, set-up lines that set one."""
    cluster = dict(config["cluster"])
    cluster["env"] = {n: _HIDDEN if is_secret(n) else value for n, value in (cluster.get("env") or {}).items()}
    cluster["setup"] = [_HIDDEN if secrets_in(line) else line for line in cluster.get("setup") or []]
    return config | {"cluster": cluster}


def public_identity(identity: dict[str, Any], run: RunDir) -> dict[str, Any]:
    """Of run.json what tells runs apart; not the command line, in which anything may stand."""
    names = ("id", "created", "stoker_version", "package_fingerprint", "git")
    return {"directory": str(run.path)} | {name: identity[name] for name in names if name in identity}
