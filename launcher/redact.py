"""Taking secrets out of text: by the names they stand behind, by their known forms, and by their values.

Owns: what counts as a secret in a text that leaves the site. Masks rather too much than too little. A value that was
found once is masked wherever else it stands, always by the same number, so that equal ones can be told. Pure; standard
library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_ANYWHERE = {"secret", "secrets", "password", "passwd", "passphrase", "apikey", "apikeys", "credential", "credentials",
             "token", "tokens", "pwd"}  # fmt: skip
_AT_END = {"pass", "auth", "authorization", "cookie", "sig", "signature", "bearer"}
_KEY_AFTER = {"api", "access", "private", "secret", "ssh", "encryption", "signing", "auth", "wandb", "license", "my",
              "account", "service", "storage", "master", "hmac", "aws", "openai", "shared"}  # fmt: skip
_LIVING = 8  # characters from which on a value is masked wherever it stands

# Forms by which a secret is known without its name.
_FORMS = re.compile(
    r"""
    -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | \A[^-]*-----END[ ][A-Z ]*PRIVATE[ ]KEY-----                       # the rest of one whose begin was cut off
    | \bhf_[A-Za-z0-9]{16,}                                              # Hugging Face
    | \b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b                            # AWS access key id
    | \bgh[oprsu]_[A-Za-z0-9]{20,} | \bgithub_pat_[A-Za-z0-9_]{20,}      # GitHub
    | \bgl(?:pat|dt|rt|ptt|agent)-[A-Za-z0-9_-]{16,}                     # GitLab
    | \bxox[abeprs]-[A-Za-z0-9-]{8,}                                     # Slack
    | \bhooks\.slack\.com/services/[A-Za-z0-9/]+
    | \bsk-[A-Za-z0-9_-]{16,} | \bnvapi-[A-Za-z0-9_-]{16,} | \bAIza[0-9A-Za-z_-]{30,}
    | \bnpm_[A-Za-z0-9]{30,} | \bpypi-[A-Za-z0-9_-]{30,} | \bdop_v1_[a-f0-9]{30,}
    | \bwandb_v\d_[A-Za-z0-9_]{20,} | \blocal-[0-9a-f]{40}\b             # W&B
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*          # JSON web token
    """,
    re.VERBOSE | re.DOTALL,
)
_HEX40 = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])")  # W&B, and git's commits
_BASE64_40 = re.compile(r"(?<![A-Za-z0-9/+=_.-])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=_.-])")  # AWS secret key
_COMMIT = re.compile(
    r"(?i)(?:\bsha|commit|revision|git|\bHEAD)[\"']?(?:\s+is\s+now)?\s*(?:is|at|[:=])?\s*[\"']?([0-9a-f]{40})(?![0-9a-f])"
)
_USERINFO = re.compile(r"(?<=://)([^/\s\"'<>@]+)@")
_HEADER = re.compile(r"(?i)(authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token)\s+|\bbearer\s+)([^\s\"',;]{6,})")
_NETRC = re.compile(
    r"(?i)(\b(?:login\s+\S+|machine\s+\S+|default)\s+password\s+)(\S+)|(^\s*password\s+)(\S+)\s*$", re.M
)
# NAME = value, NAME: value, "NAME": "value", --name value, ?name=value&, ('NAME', 'value'); quotes may be escaped, as
# JSON does with what it holds. The value is a quoted text, a list, or what goes up to a blank or a closing sign.
_QUOTE = r"\\*[\"']"
_NAMED = re.compile(
    rf"""
    (?<![A-Za-z0-9_])(?P<name>[A-Za-z_][A-Za-z0-9_.-]{{0,60}})
    (?P<mark>{_QUOTE}?\s*(?:=>|[:=])[ \t]*|{_QUOTE}\s*,\s*(?=\\*[\"']))
    (?P<value>
        (?P<quote>{_QUOTE})(?P<text>.{{0,8000}}?)(?<!\\)(?P=quote)
        | \$\{{[^}}\n]*\}}
        | \$\([^)\n]*\)
        | \[[^\]]{{0,8000}}\]
        | \n(?:[ \t]+(?:-[ ])?[^\n:]*(?:\n|\Z))+
        | [|>][-+]?[ ]*\n(?:[ \t]+[^\n]*(?:\n|\Z))+
        | \\*[\"'][^\n]*
        | [^\s\"',;&)\]}}>|\\]+
    )
    """,
    re.VERBOSE | re.DOTALL,
)
_OPTION = re.compile(r"(?<![\w-])(--?(?P<name>[A-Za-z][A-Za-z0-9_-]*)[ \t]+)(?P<value>(?![-\"'])[^\s\"',;&)\]}]+)")
_REFERENCE = re.compile(
    r"\\*[\"']?(?:\$\w+|\$\{[^}]*\}|\$\(.*\)|None|null|true|false|True|False|~|\*+|<secret-\d+>)?\\*[\"']?"
)
_NUMBER = re.compile(r"[-+]?\d[\d.,_]*(?:e[-+]?\d+)?", re.IGNORECASE)


def words_of(name: str) -> list[str]:
    """`HF_TOKEN`, `hfToken`, `hf-token` -> [hf, token]."""
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return [w for w in re.split(r"[^A-Za-z0-9]+", parts.lower()) if w]


def is_secret_name(name: str) -> bool:
    """Whether what stands behind this name is taken for a key, token or password."""
    words = words_of(name)
    if not words or name == "PWD" or name == "OLDPWD":
        return False
    if set(words) & _ANYWHERE or words[-1] in _AT_END:
        return True
    if words[-1] in ("key", "keys"):
        return len(words) > 1 and (words[-2] in _KEY_AFTER or name.isupper())
    return name.isupper() and words[0] == "key"


class Redactor:
    """Masks secrets in texts, one after another; give `values` first (what the environment holds), then every text once
    to `learn`, and then to `clean`."""

    def __init__(self, environment: Mapping[str, str], commits: Iterable[str] = ()) -> None:
        """`commits`: what looks like a W&B key and is git's."""
        self._numbers: dict[str, int] = {}
        self._commits = set(commits)
        for name, value in environment.items():
            if is_secret_name(name) and not _is_harmless(name, value):
                self._mask(value)

    @property
    def count(self) -> int:
        """Different secrets found so far."""
        return len(self._numbers)

    def learn(self, text: str) -> None:
        """Look for secrets; what is found is masked in every text that is cleaned from now on."""
        self._pass(text)

    def clean(self, text: str) -> str:
        """The text without secrets."""
        text = self._pass(text)
        living = [v for v in self._numbers if len(v) >= _LIVING]
        for value in sorted(living, key=len, reverse=True):
            if value in text:
                text = text.replace(value, self._mask(value))
        return text

    def clean_json(self, value: Any) -> Any:
        """The same for a parsed JSON value, by its structure: all below a secret name is masked."""
        if isinstance(value, dict):
            return {k: self._mask_all(v, k) if is_secret_name(str(k)) else self.clean_json(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.clean_json(v) for v in value]
        return self.clean(value) if isinstance(value, str) else value

    def _mask_all(self, value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {k: self._mask_all(v, name) for k, v in value.items()}
        if isinstance(value, list):
            return [self._mask_all(v, name) for v in value]
        if value is None or isinstance(value, bool) or _is_harmless(name, str(value)):
            return value
        return self._mask(str(value))

    def _mask(self, value: str) -> str:
        number = self._numbers.setdefault(value, len(self._numbers) + 1)
        return f"<secret-{number}>"

    def _pass(self, text: str) -> str:
        text = _FORMS.sub(lambda m: self._mask(m[0]), text)
        text = _USERINFO.sub(lambda m: f"{self._once(m[1])}@", text)
        text = _HEADER.sub(lambda m: m[1] + self._once(m[2]), text)
        text = _NETRC.sub(lambda m: (m[1] or m[3]) + self._once(m[2] or m[4]), text)
        text = self._behind_names(text)
        text = _OPTION.sub(self._option, text)
        known = self._commits | set(_COMMIT.findall(text))
        text = _HEX40.sub(lambda m: m[0] if m[0] in known else self._mask(m[0]), text)
        return _BASE64_40.sub(lambda m: self._mask(m[0]) if _is_mixed(m[0]) else m[0], text)

    def _once(self, value: str) -> str:
        return value if _REFERENCE.fullmatch(value) else self._mask(value)

    def _behind_names(self, text: str) -> str:
        """What stands behind a harmless name is looked at too: it may be a name itself."""
        done, at, kept = [], 0, 0
        while (m := _NAMED.search(text, at)) is not None:
            at = m.end("mark")
            name, value = m["name"], m["value"]
            if not is_secret_name(name) or _is_harmless(name, value):
                continue
            if m["quote"]:
                masked = m["quote"] + self._mask(m["text"]) + m["quote"]
            else:
                masked = self._mask(value.strip()) + ("\n" if value.endswith("\n") else "")
            done += [text[kept:at], masked]
            at = kept = m.end()
        return "".join([*done, text[kept:]])

    def _option(self, m: re.Match[str]) -> str:
        if not is_secret_name(m["name"]) or _is_harmless(m["name"], m["value"]):
            return m[0]
        return m[1] + self._mask(m["value"])


def _is_harmless(name: str, value: str) -> bool:
    """Empty, a reference to where the secret is, or a count of tokens."""
    plain = value.strip().strip("\\\"'")
    if not plain or _REFERENCE.fullmatch(value.strip()) or _REFERENCE.fullmatch(plain):
        return True
    return bool({"token", "tokens"} & set(words_of(name))) and _NUMBER.fullmatch(plain) is not None


def _is_mixed(text: str) -> bool:
    kinds = (str.islower, str.isupper, str.isdigit)
    return all(any(kind(c) for c in text) for kind in kinds) and text.count("/") <= 3 and "//" not in text
