"""Asking the live Slurm what it is: few calls, at the same time.

Owns: every scontrol, sinfo, sacctmgr and srun call about a site, and what of it is asked each time. Asked live for each
launch: configuration, partitions, nodes out of service (three calls); kept for hours: nodes, accounts, srun's options.
Standard library only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from . import site_cache
from .environment import without_outer_job
from .errors import UserError
from .site import (
    SEPARATOR,
    Accounting,
    Inventory,
    Site,
    parse_associations,
    parse_hardware,
    parse_out_of_service,
    parse_partitions,
    parse_qos,
)
from .slurm import TIMEOUT, Reply
from .slurm import call as call_or_raise
from .slurm_text import settings as parse_settings

ACCOUNTS_TIMEOUT = 5.0  # seconds; slurmdbd answers in half a second or is in trouble, and a launch can do without
# --all: a hidden partition takes jobs like any other. Not --oneliner: see slurm_text.py.
_CONFIG = ("scontrol", "show", "config")
_PARTITIONS = ("scontrol", "--all", "show", "partition")
_NODES = ("scontrol", "--all", "show", "node")
_AWAY_CELLS = SEPARATOR.join(("%N", "%T", "%E"))
_AWAY = ("sinfo", "--all", "--noheader", "--Node", "--states=down,drain,fail", f"--format={_AWAY_CELLS}")


def ask(refresh: bool = False) -> Site | None:
    """What this machine's Slurm is; None if it does not say which partitions it has.

    Args:
        refresh: ask for what may be kept, too.
    """
    config, partitions, away = together([partial(call, words) for words in (_CONFIG, _PARTITIONS, _AWAY)])
    found = parse_partitions(partitions.out) if partitions.code == 0 else ()
    if not found:
        return None
    settings = parse_settings(config.out) if config.code == 0 else {}
    out_of_service = parse_out_of_service(away.out) if away.code == 0 else {}
    environ = without_outer_job(os.environ)
    kept = None if refresh or not settings else site_cache.load(settings, environ, time.time())
    probes = site_cache.probes(settings, environ, time.time())
    if kept is not None:
        return Site(settings, found, out_of_service, *kept, probes)
    inventory = _inventory(settings)
    if settings:
        is_complete = inventory.accounting is not None or "slurmdbd" not in settings.get("AccountingStorageType", "")
        site_cache.save(inventory, is_complete, settings, environ)
    return Site(settings, found, out_of_service, inventory, probes=probes)


def call(argv: Sequence[str], timeout: float = TIMEOUT) -> Reply:
    """A command that is not there says nothing, like one that fails."""
    try:
        return call_or_raise(argv, timeout)
    except UserError as e:
        return Reply(127, "", str(e))


def _inventory(settings: Mapping[str, str]) -> Inventory:
    has_accounts = "slurmdbd" in settings.get("AccountingStorageType", "")
    nodes, pyxis, accounting = together(
        [lambda: call(_NODES), has_pyxis, lambda: _accounting(settings) if has_accounts else None]
    )
    hardware = parse_hardware(nodes.out) if nodes.code == 0 else ()
    return Inventory(hardware, accounting, pyxis)


def has_pyxis() -> bool | None:
    """Whether srun, as it is set up here, starts containers; None if it does not say."""
    reply = call(["srun", "--help"])
    return "--container-image" in reply.out if reply.code == 0 else None


def _accounting(settings: Mapping[str, str]) -> Accounting | None:
    where = [f"user={_user()}", f"cluster={settings.get('ClusterName', '')}"]
    commands: list[Sequence[str]] = [
        ["sacctmgr", "--parsable2", "show", "qos"],
        ["sacctmgr", "--parsable2", "show", "association", "where", *where],
    ]
    qos, associations = together([partial(call, words, ACCOUNTS_TIMEOUT) for words in commands])
    if qos.code != 0 or associations.code != 0:
        return None
    return Accounting(parse_qos(qos.out), parse_associations(associations.out))


def _user() -> str:
    import pwd  # the name that Slurm knows; $USER may be anything

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def reservation(name: str) -> Reply:
    return call(["scontrol", "show", "reservation", name])


def licenses() -> Reply:
    return call(["scontrol", "show", "licenses"])


def together(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all, each computed in a thread of its own: they wait for Slurm. The first exception is raised."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(position: int) -> None:
        try:
            results[position] = functions[position]()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(position,)) for position in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
