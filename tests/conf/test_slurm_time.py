"""Slurm's times, held against what sbatch and scontrol of 22.05 made of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stoker.conf.slurm_time import check_begin, format_time, parse_elapsed, parse_time

# text -> minutes; `scontrol show job` of a job that was submitted with it
TAKEN = {
    "10": 10,
    "00010": 10,
    "10:30": 11,
    "0:30": 1,
    "1:99": 3,
    "90:00": 90,
    "0:00:30": 1,
    "1:10:30": 71,
    "99:99:99": 4 * 1440 + 4 * 60 + 41,
    "1-2": 1440 + 120,
    "1-25": 2 * 1440 + 60,
    "1-2:3": 1440 + 123,
    "1-2:3:4": 1440 + 124,
    "1-0:0:1": 1441,
    "0-00:01:01": 2,
    "365-0": 365 * 1440,
}
UNLIMITED = ["0", "0:0", "0-0", "UNLIMITED", "Unlimited", "infinite", "-1"]
REFUSED = [
    "", "1:", "1:2:3:4", "1-2:3:4:5", "1-2-3", "abc", "10m", " 10", "10 ", "+5", "1:-2", "1--2", "::", ":5", "-", "1.5",
    "1:2-3", "5-:3", "1::2", "1-2::3", "\u0661\u0660",
    "\u0661-\u0660",
]  # fmt: skip
# What sbatch lets through and takes for something else.
ALSO_REFUSED = ["1-", "-5", "35791395", "2147483647", "99999999999", "24855-4"]
BEGIN = ["now", "now+60", "now+2hours", "now+1week", "today", "tomorrow", "midnight", "noon", "fika", "teatime"]
BEGIN += ["16:00", "16:00:30", "4:30pm", "2027-01-20", "2027-01-20T12:34", "2027-01-20T12:34:56", "01/20/27"]
BEGIN += ["1224", "122427", "12/24", "12/24/27", "1/2", "12.24", "12.24.27", "02/29", "2027-01-20-16:00", "12/24-16:00"]
BEGIN += [
    "1224-16:00",
    "12.24.27T4:30PM",
    "4:30 pm",
    "12:30am",
    "now-5",
    "now-1day",
    "NOW",
    "Now",
    "now + 1hour",
    "Noon",
]
BEGIN += ["now+1HOUR", "now+1 hour", "MIDNIGHT"]
NO_BEGIN = ["now+", "now+10min", "now+1month", "now+1h", "Tomorrow", "x", "4pm", "2027-13-20", "20270120", "25:00"]
NO_BEGIN += ["TOMORROW", "Today", "12/24/2027", "12.24.2027", "12/32", "13/1", "1324", "31/12", "12/24-16", "00:60"]
NO_BEGIN += ["13:00pm", "6:5", "now-", "+1", ""]


@pytest.mark.parametrize("text", TAKEN)
def test_a_time_is_what_slurm_makes_of_it(text: str) -> None:
    assert parse_time(text) == TAKEN[text] * 60


@pytest.mark.parametrize("text", UNLIMITED)
def test_no_limit(text: str) -> None:
    assert parse_time(text) is None


@pytest.mark.parametrize("text", [*REFUSED, *ALSO_REFUSED])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected one of sbatch's forms: minutes, minutes:seconds, hours:minutes"):
        parse_time(text)


# Each form of --time with what its numbers count, seconds.
FORMS = {
    "{}": (60,),
    "{}:{}": (60, 1),
    "{}:{}:{}": (3600, 60, 1),
    "{}-{}": (86_400, 3600),
    "{}-{}:{}": (86_400, 3600, 60),
    "{}-{}:{}:{}": (86_400, 3600, 60, 1),
}
counts = st.tuples(*[st.tuples(st.integers(0, 120), st.sampled_from(["", "0"])) for _ in range(4)])


@given(st.sampled_from(list(FORMS)), counts)
def test_each_form_counts_what_sbatch_says(form: str, parts: tuple[tuple[int, str], ...]) -> None:
    used = parts[: len(FORMS[form])]
    seconds = sum(number * unit for (number, _), unit in zip(used, FORMS[form], strict=True))
    text = form.format(*(f"{zeros}{number}" for number, zeros in used))
    assert parse_time(text) == (-(-seconds // 60) * 60 or None)
    if ":" in text:
        assert parse_elapsed(text) == seconds


@given(st.sampled_from(list(FORMS)), counts, st.sampled_from(["x", ":", " ", "h", "-1-", ".5", ":0:0:0:0"]))
def test_one_slip_spoils_a_time(form: str, parts: tuple[tuple[int, str], ...], slip: str) -> None:
    text = form.format(*(number for number, _ in parts[: len(FORMS[form])]))
    with pytest.raises(ValueError, match="expected one of sbatch's forms"):
        parse_time(text + slip)


@given(st.integers(1, 20_000 * 86_400))
def test_a_written_time_is_read_back_rounded_up_to_minutes(seconds: int) -> None:
    assert parse_time(format_time(seconds)) == -(-seconds // 60) * 60


@given(st.integers(60, 20_000 * 86_400))
def test_a_duration_is_read_to_the_second(seconds: int) -> None:
    assert parse_elapsed(format_time(seconds)) == seconds
    assert parse_elapsed("0:05") == 5


@pytest.mark.parametrize("text", ["", "INVALID", "5", "1-2", "1:2:3:4", "UNLIMITED"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no duration"):
        parse_elapsed(text)


def test_a_time_is_written_with_its_days() -> None:
    assert format_time(59) == "00:00:59"
    assert format_time(86_400 + 3 * 3600 + 4 * 60 + 5) == "1-03:04:05"


@given(st.text(st.sampled_from("0123456789:-"), max_size=9))
def test_no_text_is_taken_for_less_than_a_minute(text: str) -> None:
    try:
        seconds = parse_time(text)
    except ValueError:
        return
    assert seconds is None or seconds >= 60


@pytest.mark.parametrize("text", BEGIN)
def test_a_begin_is_taken(text: str) -> None:
    check_begin(text)


@pytest.mark.parametrize("text", NO_BEGIN)
def test_what_is_no_begin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a time like now\+2hours, 16:00"):
        check_begin(text)


@given(st.text(st.sampled_from("nowtdaymrhus+0123456789:-/TAPM ")))
def test_no_text_for_begin_does_worse_than_be_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        check_begin(text)


@pytest.mark.slurm
def test_the_installed_sbatch_takes_and_refuses_the_same(tmp_path: Path) -> None:
    """Options are read before any controller is asked; an unknown option ends it there."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n")

    def is_taken(text: str, option: str = "time") -> bool:
        command = ["sbatch", f"--{option}={text}", "--no-such-option"]
        environment = os.environ | {"SLURM_CONF": str(conf)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert f"Invalid --{option}" in done.stderr or "--no-such-option" in done.stderr, done.stderr
        return f"Invalid --{option}" not in done.stderr

    assert [text for text in [*TAKEN, *UNLIMITED] if not is_taken(text)] == []
    assert [text for text in REFUSED if is_taken(text)] == []
    assert [text for text in BEGIN if not is_taken(text, "begin")] == []
    assert [text for text in NO_BEGIN if is_taken(text, "begin")] == []
