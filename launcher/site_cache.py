"""The slow part of what is known about a site, kept between launches in the user's cache directory.

Owns: one JSON file per cluster below $XDG_CACHE_HOME/stoker, and one of what was seen on its nodes. A file that is
damaged, old, of another version or of another start of the controller is ignored; one that cannot be written is done
without. Nothing depends on it but time, and warnings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .run.files import create_json, temporary_name
from .site import Accounting, Association, Hardware, Inventory, Probe, Qos

FORMAT = 1
OLDEST = 12 * 3600.0  # seconds
OLDEST_PROBE = 30 * 24 * 3600.0  # seconds; what is installed on nodes changes seldom
OLDEST_INCOMPLETE = 600.0  # seconds; where the accounts did not answer


def directory(environ: Mapping[str, str]) -> Path:
    """Where the files lie; the environment decides, as the XDG base directory specification says."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path(environ.get("HOME") or "/") / ".cache") / "stoker"


def path_for(settings: Mapping[str, str], environ: Mapping[str, str]) -> Path:
    """The file of a cluster: a home directory may be shared by several, of which two may have one name."""
    words = [settings.get("ClusterName", ""), settings.get("SlurmctldHost[0]", ""), environ.get("SLURM_CONF", "")]
    digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]
    return directory(environ) / f"site-{digest}.json"


def load(settings: Mapping[str, str], environ: Mapping[str, str], now: float) -> tuple[Inventory, float] | None:
    """(what was kept, its age in seconds), or None if there is nothing that can be used."""
    try:
        plain = json.loads(path_for(settings, environ).read_bytes())
        age = now - float(plain["asked_at"])
        limit = OLDEST if plain["is_complete"] else OLDEST_INCOMPLETE
        if plain["format"] != FORMAT or plain["start"] != _start(settings) or not 0 <= age <= limit:
            return None
        return inventory_from(plain["inventory"]), age
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def save(inventory: Inventory, is_complete: bool, settings: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Replace the file in one step. Without fsync: a file that a crash damaged is ignored."""
    path = path_for(settings, environ)
    plain = {
        "format": FORMAT,
        "asked_at": time.time(),
        "start": _start(settings),
        "is_complete": is_complete,
        "inventory": asdict(inventory),
    }
    _replace(path, plain)


def _replace(path: Path, plain: Mapping[str, Any]) -> None:
    # A home without room or without the right to write costs half a second per launch, no more.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        try:
            create_json(temporary, dict(plain))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _probes_path(settings: Mapping[str, str], environ: Mapping[str, str]) -> Path:
    path = path_for(settings, environ)
    return path.with_name(path.name.replace("site-", "nodes-", 1))


def probes(settings: Mapping[str, str], environ: Mapping[str, str], now: float) -> dict[str, Probe]:
    """What was seen on a node of each partition; a restart of the controller does not change it."""
    try:
        plain = json.loads(_probes_path(settings, environ).read_bytes())
        return {
            str(partition): Probe(str(seen["host"]), _texts(seen["commands"]))
            for partition, seen in plain.items()
            if 0 <= now - float(seen["time"]) <= OLDEST_PROBE
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def save_probe(partition: str, probe: Probe, settings: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Add what was seen on a node of a partition, in place of what was seen there before."""
    path = _probes_path(settings, environ)
    try:
        kept = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        kept = {}
    _replace(path, kept | {partition: asdict(probe) | {"time": time.time()}})


def _start(settings: Mapping[str, str]) -> str:
    """Changes when the controller was started or configured anew, and with it perhaps the nodes."""
    return settings.get("BOOT_TIME", "")


def inventory_from(plain: Any) -> Inventory:
    """The inverse of dataclasses.asdict after a way through JSON.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    accounting, has_pyxis = plain["accounting"], plain["has_pyxis"]
    if not (has_pyxis is None or isinstance(has_pyxis, bool)):
        raise TypeError("has_pyxis")
    return Inventory(
        hardware=tuple(_hardware(h) for h in plain["hardware"]),
        accounting=None if accounting is None else _accounting(accounting),
        has_pyxis=has_pyxis,
    )


def _hardware(plain: Any) -> Hardware:
    return Hardware(
        names=_texts(plain["names"]),
        partitions=_texts(plain["partitions"]),
        cpus=int(plain["cpus"]),
        memory=int(plain["memory"]),
        tmp=int(plain["tmp"]),
        gpus=_counts(plain["gpus"]),
        features=_texts(plain["features"]),
    )


def _accounting(plain: Any) -> Accounting:
    qos = tuple(_qos(dict(fields)) for fields in plain["qos"])
    associations = tuple(Association(**{**fields, "qos": _texts(fields["qos"])}) for fields in plain["associations"])
    return Accounting(qos, associations)


def _qos(fields: dict[str, Any]) -> Qos:
    texts = {name: _texts(fields[name]) for name in ("preempts", "flags")}
    counts = {name: _counts(fields[name]) for name in ("max_tres", "max_tres_user", "group_tres")}
    return Qos(**{**fields, **texts, **counts})


def _texts(plain: Any) -> tuple[str, ...]:
    if not isinstance(plain, list):
        raise TypeError(f"expected a list, found {plain!r}")
    return tuple(map(str, plain))


def _counts(plain: Any) -> tuple[tuple[str, int], ...]:
    return tuple((str(name), int(count)) for name, count in plain)
