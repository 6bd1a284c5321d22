"""Which names stand before a key, token or password.

Owns: that judgement, for what is refused at a launch, written to files, shown, or masked (launcher/redact.py).
Standard library only; patterns are compiled where they are used: `stoker status` imports this and must answer at once.
"""

from __future__ import annotations

import re

# Words that tell wherever they stand in a name, at its end, and at the end of a word: `PGPASSWORD`, `hftoken`.
_ANYWHERE = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "apikey", "apikeys", "credential",
             "credentials", "token", "tokens", "pwd", "jwt"}  # fmt: skip
_AT_END = {"pass", "pw", "auth", "authorization", "cookie", "sig", "signature", "bearer", "dsn", "connstr",
           "connectionstring"}  # fmt: skip
_GLUED = ("password", "passwd", "passphrase", "secret", "token", "apikey", "secretkey", "accesskey", "privatekey")
_OTHER_PASSES = ("bypass", "compass", "trespass", "surpass", "subpass", "multipass", "onepass", "twopass")
_KEY_AFTER = {"api", "access", "private", "secret", "ssh", "encryption", "signing", "auth", "wandb", "license", "my",
              "account", "service", "storage", "master", "hmac", "aws", "openai", "shared"}  # fmt: skip
_PAT_AFTER = {"github", "gh", "gitlab", "azure", "devops"}
# What is said of a secret, or where it is: HF_TOKEN_PATH, TOKEN_LIMIT.
_ABOUT = {"path", "file", "dir", "limit", "count", "length", "size", "type", "name"}
# `export NAME=value` in a set-up line, with the value written out (not taken from a variable or a command).
_ASSIGNMENT = r"(?:^|[\s;&])([A-Za-z_][A-Za-z0-9_]*)=(\"[^\"$`]+|'[^']+|[^\s\"'$`;&]+)"


def is_secret(name: str) -> bool:
    """Whether what stands behind this name (a variable, an option, a key of a file) is taken for a key, token or
    password."""
    words = words_of(name)
    if not words or name in ("PWD", "OLDPWD") or (words[-1] in _ABOUT and len(words) > 1):
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in ("key", "keys"):
        return before in _KEY_AFTER or name.isupper()
    return (
        not _ANYWHERE.isdisjoint(words)
        or last in _AT_END
        or any(word.endswith(_GLUED) for word in words)
        or (last.endswith("pass") and not last.endswith(_OTHER_PASSES))
        or (last == "pat" and before in _PAT_AFTER)
        or words[-2:] == ["connection", "string"]
        or words[-3:] == ["access", "key", "id"]
        or (words[0] == "key" and name.isupper())
    )


def words_of(name: str) -> list[str]:
    """`HF_TOKEN`, `hfToken`, `hf-token` -> [hf, token]."""
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return [w for w in re.split(r"[^A-Za-z0-9]+", parts.lower()) if w]


def secrets_in(line: str) -> list[str]:
    """Names of secrets whose value is written out in a shell line: `export HF_TOKEN=abc`, not `HF_TOKEN=$(cat f)`."""
    return [m[1] for m in re.finditer(_ASSIGNMENT, line) if is_secret(m[1])]
