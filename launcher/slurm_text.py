"""scontrol's text as values: `Key=Value` records, and the listing of the configuration.

Owns: where a value ends and the next key begins, also when a value has spaces or looks like another key. What the
fields mean is jobinfo.py's and site.py's. Pure, standard library only: the supervisor reads its job with it.

Text and not JSON, everywhere: scontrol of 22.05 has no JSON, and the shapes of 22.05 and of later ones differ
(states as word or list, numbers plain or wrapped), while the text has kept its form from 22.05 to 25.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_/:]*)=")
# What people and programs write freely, and Slurm prints as it is, has the rest of its line to itself.
_FREE_LINES = {"OS", "Reason", "Comment", "AdminComment", "SystemComment", "Extra", "Command", "WorkDir", "SubmitLine"}
_FREE_LINES |= {"StdErr", "StdIn", "StdOut", "InstanceId", "InstanceType", "Power"}
_FREE = {"JobName"}  # the last of its line


def records(text: str, first: str) -> list[dict[str, str]]:
    """The records of `scontrol show ...`, each beginning with `first=` at the start of a line; in its form of several
    lines per record, because with --oneliner nothing tells a job's name from the fields behind it."""
    found: list[dict[str, str]] = []
    for line in text.splitlines():
        if line.startswith(f"{first}="):
            found.append({})
        if found:
            for key, value in _pairs(line.strip()):
                # What was said first counts: a comment with a line break must not pass for a field.
                found[-1].setdefault(key, value)
    return found


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    keys = list(_KEY.finditer(line))
    ends = [*(key.start() for key in keys[1:]), len(line)]
    for position, (key, end) in enumerate(zip(keys, ends, strict=False)):
        if key[1] in _FREE or (position == 0 and key[1] in _FREE_LINES):
            yield key[1], line[key.end() :]
            return
        yield key[1], line[key.end() : end].strip()


def settings(text: str) -> dict[str, str]:
    """From `scontrol show config`: `Key   = value` lines."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = f"{line} ".partition(" = ")
        if separator:
            found.setdefault(key.strip(), value.strip())  # cgroup.conf and others follow, with keys of their own
    return found
