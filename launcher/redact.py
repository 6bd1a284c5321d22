"""Taking secrets out of text: by the names they stand behind, by their known forms, and by their values.

Owns: what counts as a secret in a text that leaves the site. Masks rather too much than too little. A value that was
found once is masked wherever else it stands, always by the same number, so that equal ones can be told. Pure; standard
library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..conf.secret_names import is_secret, words_of

_LIVING = 8  # characters from which on a value is masked wherever it stands

# Forms by which a secret is known without its name.
_FORMS = re.compile(
    r"""
    -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY(?:[ ]BLOCK)?-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY(?:[ ]BLOCK)?-----|\Z)
    | \A[^-]*-----END[ ][A-Z ]*PRIVATE[ ]KEY(?:[ ]BLOCK)?-----           # the rest of one whose begin was cut off
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
# Up to the last @: passwords have some, and slashes. Not host:port/path@version.
_USERINFO = re.compile(r"(?<=://)([^/\s\"'<>:@]{0,99}:(?!\d{1,5}/)[^\s\"'<>]{1,300}|[^/\s\"'<>]{1,300})@")
_COOKIE = re.compile(r"(?i)(\b(?:set-)?cookie:[ \t]*)([^\s\"'][^\r\n\"']*)")
# What programs take after one letter: curl -u name:password, mysql -ppassword, sshpass -p password.
_WORD = r"\"[^\"\n]{1,300}\"|'[^'\n]{1,300}'|[^\s\"']{1,300}"
_LETTER = re.compile(
    rf"""
    (?<![\w-])((?:-u|--user|--proxy-user)(?:=|[ \t]*)[\"']?(?!\d+:\d+\b)[^\s:\"'/]{{1,99}}:)([^\s\"':]{{1,300}})
    | (\b(?:mysql|mysqldump|mysqladmin|mariadb)\b[^\n|;&]{{0,300}}?[ \t]-p)({_WORD})
    | (\bsshpass[ \t]+-p[ \t]*)({_WORD})
    """,
    re.VERBOSE,
)
# What a terminal shows as nothing, and what it becomes in JSON.
_UNSEEN = re.compile(
    r"(?:\x1b|\\u001[bB]|\\x1b|\\033)\[[0-9;?]*[ -/]?[@-~]"
    r"|[\u00ad\u200b-\u200f\u2060\ufeff]|\\u00ad|\\u200[b-f]|\\ufeff"
)
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
    (?P<mark>{_QUOTE}?\s*(?:=>|[:=])(?:[ \t\r]|\\r)*|{_QUOTE}\s*,\s*(?=\\*[\"']))
    (?P<value>
        (?P<quote>{_QUOTE})(?P<text>.{{0,8000}}?)(?<!\\)(?P=quote)
        | <secret-\d+>
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
_OPTION = re.compile(
    rf"""
    (?<![\w-])(?P<start>--?(?P<name>[A-Za-z][A-Za-z0-9_-]*)[ \t]+)
    (?P<value>(?P<quote>{_QUOTE})(?P<text>[^\n]{{0,8000}}?)(?<!\\)(?P=quote) | (?![-\"'])[^\s\"',;&)\]}}]+)
    """,
    re.VERBOSE,
)
_REFERENCE = re.compile(
    r"\\*[\"']?(?:\$\w+|\$\{[^}]*\}|\$\(.*\)|None|null|true|false|True|False|~|\*+|<secret-\d+>)?\\*[\"']?"
)
_NUMBER = re.compile(r"[-+]?\d[\d.,_]*(?:e[-+]?\d+)?", re.IGNORECASE)


class Redactor:
    """Masks secrets in texts, one after another; give `values` first (what the environment holds), then every text once
    to `learn`, and then to `clean`."""

    def __init__(self, environment: Mapping[str, str], commits: Iterable[str] = ()) -> None:
        """`commits`: what looks like a W&B key and is git's."""
        self._numbers: dict[str, int] = {}
        self._commits = set(commits)
        for name, value in environment.items():
            if is_secret(name) and not _is_harmless(name, value):
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
            return {k: self._mask_all(v, k) if is_secret(str(k)) else self.clean_json(v) for k, v in value.items()}
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
        text = _UNSEEN.sub("", text)
        text = _FORMS.sub(lambda m: self._mask(m[0]), text)
        text = _USERINFO.sub(lambda m: f"{self._once(m[1])}@", text)
        text = _HEADER.sub(lambda m: m[1] + self._once(m[2]), text)
        text = _NETRC.sub(lambda m: (m[1] or m[3]) + self._once(m[2] or m[4]), text)
        text = _COOKIE.sub(lambda m: m[1] + self._once(m[2]), text)
        text = _LETTER.sub(self._letter, text)
        text = self._behind_names(text)
        text = _OPTION.sub(self._option, text)
        known = self._commits | set(_COMMIT.findall(text))
        text = _HEX40.sub(lambda m: m[0] if m[0] in known else self._mask(m[0]), text)
        return _BASE64_40.sub(lambda m: self._mask(m[0]) if _is_mixed(m[0]) else m[0], text)

    def _once(self, value: str) -> str:
        return value if _REFERENCE.fullmatch(value) else self._mask(value)

    def _letter(self, m: re.Match[str]) -> str:
        start, value = m[1] or m[3] or m[5], m[2] or m[4] or m[6]
        quote = value[0] if value[0] in "\"'" else ""
        return start + quote + self._once(value[1:-1] if quote else value) + quote

    def _behind_names(self, text: str) -> str:
        """What stands behind a harmless name is looked at too: it may be a name itself."""
        done, at, kept = [], 0, 0
        while (m := _NAMED.search(text, at)) is not None:
            at = m.end("mark")
            name, value = m["name"], m["value"]
            if not is_secret(name) or _is_harmless(name, value):
                continue
            if m["quote"]:
                masked = m["quote"] + self._mask(m["text"]) + m["quote"]
            else:
                masked = self._mask(value.strip()) + ("\n" if value.endswith("\n") else "")
            done += [text[kept:at], masked]
            at = kept = m.end()
        return "".join([*done, text[kept:]])

    def _option(self, m: re.Match[str]) -> str:
        if not is_secret(m["name"]) or _is_harmless(m["name"], m["value"]):
            return m[0]
        quote = m["quote"] or ""
        return m["start"] + quote + self._mask(m["text"] if quote else m["value"]) + quote


def _is_harmless(name: str, value: str) -> bool:
    """Empty, a reference to where the secret is, or a count of tokens."""
    plain = value.strip().strip("\\\"'")
    if not plain or _REFERENCE.fullmatch(value.strip()) or _REFERENCE.fullmatch(plain):
        return True
    return bool({"token", "tokens"} & set(words_of(name))) and _NUMBER.fullmatch(plain) is not None


def _is_mixed(text: str) -> bool:
    kinds = (str.islower, str.isupper, str.isdigit)
    return all(any(kind(c) for c in text) for kind in kinds) and text.count("/") <= 3 and "//" not in text
