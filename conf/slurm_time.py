"""Slurm's times: every form that sbatch documents for --time, and the usual ones of --begin.

Owns: reading them (and writing a time limit). Held against sbatch 22.05, whose parser also lets through "1-" and "-5";
these are refused here.
"""

from __future__ import annotations

import re

FORMS = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds"

_UNLIMITED = ("unlimited", "infinite", "-1")
_WITH_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?", re.ASCII)
_WITHOUT = re.compile(r"(\d+)(?::(\d+)(?::(\d+))?)?", re.ASCII)
_LONGEST = 2**31 - 1  # seconds; Slurm counts them in a C int, beyond which a limit turns into something else


def parse_time(text: str) -> int | None:
    """The time limit in seconds, rounded up to whole minutes as Slurm does; None for no limit (UNLIMITED, 0).

    Raises:
        ValueError: `text` has none of the FORMS.
    """
    if text.lower() in _UNLIMITED:
        return None
    seconds = _seconds(text)
    if seconds is None or seconds > _LONGEST:
        raise ValueError(f"expected one of sbatch's forms: {FORMS}, or UNLIMITED")
    return (seconds + 59) // 60 * 60 or None


def parse_elapsed(text: str) -> int:
    """Seconds of a duration as Slurm shows it: `0:05`, `2:03:04`, `1-02:03:04`.

    Raises:
        ValueError: it is none, like INVALID.
    """
    seconds = _seconds(text) if ":" in text else None
    if seconds is None:
        raise ValueError(f"{text!r}: no duration; expected minutes:seconds, with hours and days before them")
    return seconds


def _seconds(text: str) -> int | None:
    with_days = _WITH_DAYS.fullmatch(text)
    if with_days:
        days, hours, minutes, seconds = (int(part or 0) for part in with_days.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    without = _WITHOUT.fullmatch(text)
    if not without:
        return None
    first, second, third = without.groups()
    if third is None:  # minutes[:seconds]
        return int(first) * 60 + int(second or 0)
    return (int(first) * 60 + int(second)) * 60 + int(third)


def format_time(seconds: int) -> str:
    """A number of seconds as days-hours:minutes:seconds, the days left out if there are none."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}" if days else f"{hour:02}:{minute:02}:{second:02}"


BEGIN_FORMS = "now+2hours, 16:00, midnight, tomorrow, 2026-12-24 or 2026-12-24T18:00"

_DAYS = ("today", "tomorrow")  # in no other case, unlike all other words
_WORDS = ("now", "midnight", "noon", "fika", "teatime")
_FROM_NOW = re.compile(r"now *[+-] *\d{1,8} *(?:(?:second|minute|hour|day|week)s?)?", re.ASCII | re.IGNORECASE)
_CLOCK = r"(?P<hour>\d\d?):(?P<minute>[0-5]\d)(?::[0-5]\d)?(?: ?(?P<half>[ap]m))?"
_DATES = (
    r"\d{4}-(?P<month>\d\d)-(?P<day>\d\d)",
    r"(?P<month>\d\d?)/(?P<day>\d\d?)(?:/\d\d)?",
    r"(?P<month>\d\d?)\.(?P<day>\d\d?)(?:\.\d\d)?",
    r"(?P<month>\d\d)(?P<day>\d\d)(?:\d\d)?",
)
_MOMENTS = [re.compile(text, re.ASCII | re.IGNORECASE) for text in (_CLOCK, *(f"{d}(?:[T-]{_CLOCK})?" for d in _DATES))]
_LONGEST_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def check_begin(text: str) -> None:
    """Whether sbatch takes it for --begin; what it means is left to Slurm's own clock.

    Raises:
        ValueError: `text` has none of the BEGIN_FORMS.
    """
    if text in _DAYS or text.lower() in _WORDS or _FROM_NOW.fullmatch(text):
        return
    if not any(_is_moment(match.groupdict()) for form in _MOMENTS if (match := form.fullmatch(text))):
        raise ValueError(f"expected a time like {BEGIN_FORMS}")


def _is_moment(parts: dict[str, str | None]) -> bool:
    month, day = int(parts.get("month") or 1), int(parts.get("day") or 1)
    hour, least, most = int(parts["hour"] or 1), *((1, 12) if parts["half"] else (0, 23))
    return 1 <= month <= 12 and 1 <= day <= _LONGEST_MONTHS[month - 1] and least <= hour <= most
