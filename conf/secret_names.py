"""Which variables hold a key, token or password, by their names.

Owns: that judgement, for everything that is written to files or shown. Standard library only; the patterns are compiled
where they are used, since `stoker status` imports this and must answer at once.
"""

from __future__ import annotations

import re

_SECRET = r"(?:^|_)(?:KEY|SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)S?$|(?:APIKEY|PASSWORD|ACCESS_KEY_ID)$"
# `export NAME=value` in a set-up line, with the value written out (not taken from a variable or a command).
_ASSIGNMENT = r"(?:^|[\s;&])([A-Za-z_][A-Za-z0-9_]*)=(\"[^\"$`]+|'[^']+|[^\s\"'$`;&]+)"


def is_secret(name: str) -> bool:
    """Whether a variable of this name is taken to hold a key, token or password."""
    return re.search(_SECRET, name, re.IGNORECASE) is not None


def secrets_in(line: str) -> list[str]:
    """Names of secrets whose value is written out in a shell line: `export HF_TOKEN=abc`, not `HF_TOKEN=$(cat f)`."""
    return [m[1] for m in re.finditer(_ASSIGNMENT, line) if is_secret(m[1])]
