"""Exactly one job, whatever happens to sbatch's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import submit
from stoker.launcher.submit import Accepted, Request, SubmissionError

# squeue's own format, printed for the job ids in the file `queue`; all have the token.
SQUEUE = r"""
for id in $(cat "$(dirname "$0")/queue" 2>/dev/null); do
    printf '%s\x1fPENDING\x1f0:00\x1f\x1fNone\x1f/w\x1fstoker:tok\x1f/c\n' $id
done
"""
FIRST_TIME = 'if [ ! -e "$(dirname "$0")/once" ]; then touch "$(dirname "$0")/once"; echo "timed out" >&2; exit 1; fi'
ACCEPT = r"""echo -n "7 " >> "$(dirname "$0")/queue"; echo 7"""


def send(own_comment: str | None = None) -> Accepted:
    waits: list[float] = []
    request = Request(Path("/run/submit.sbatch"), "tok", own_comment)
    return submit.submit(request, sleep=waits.append)


def test_plain(fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", ACCEPT)
    assert send() == Accepted("7", None)
    assert fake_slurm.calls("sbatch") == ["--parsable --comment=stoker:tok /run/submit.sbatch"]


def test_own_comment_stays_in_front(fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", ACCEPT)
    send(own_comment="project x")
    assert fake_slurm.calls("sbatch") == ["--parsable --comment=project x stoker:tok /run/submit.sbatch"]


def test_cluster_is_kept(fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", "echo '** banner **'; echo '7;alpha'")
    assert send() == Accepted("7", "alpha")


def test_refusal_is_told_in_slurm_s_words_and_not_repeated(fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", "echo 'sbatch: error: Invalid qos' >&2; exit 1")
    with pytest.raises(SubmissionError, match="refused the job: sbatch: error: Invalid qos") as caught:
        send()
    assert caught.value.may_be_queued is False
    assert caught.value.exit_code == 1
    assert len(fake_slurm.calls("sbatch")) == 1


def test_lost_answer_is_looked_up_before_any_retry(fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", ACCEPT.replace("; echo 7", "; echo 'Socket timed out' >&2; exit 1"))
    fake_slurm.program("squeue", SQUEUE)
    assert send() == Accepted("7", None)
    assert len(fake_slurm.calls("sbatch")) == 1


def test_job_whose_comment_the_site_rewrote_is_known_by_its_script(fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", ACCEPT.replace("; echo 7", "; echo 'Socket timed out' >&2; exit 1"))
    fake_slurm.program("squeue", SQUEUE.replace("/c", "/run/submit.sbatch").replace("stoker:tok", "rewritten"))
    assert send() == Accepted("7", None)
    assert len(fake_slurm.calls("sbatch")) == 1


def test_hung_sbatch_is_stopped_and_looked_up(fake_slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "SBATCH_TIMEOUT", 1.0)
    fake_slurm.program("sbatch", ACCEPT.replace("; echo 7", "; exec sleep 30"))
    fake_slurm.program("squeue", SQUEUE)
    assert send() == Accepted("7", None)


def test_lost_request_is_sent_again(fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", f"{FIRST_TIME}\n{ACCEPT}")
    fake_slurm.program("squeue", SQUEUE)
    assert send() == Accepted("7", None)
    assert len(fake_slurm.calls("sbatch")) == 2


def test_a_first_try_that_arrives_late_is_cancelled(fake_slurm: Any) -> None:
    """Two jobs on one run would fence each other out."""
    fake_slurm.program(
        "sbatch",
        FIRST_TIME
        + r"""
        echo -n "6 7 " >> "$(dirname "$0")/queue"; echo 7""",
    )
    fake_slurm.program("squeue", SQUEUE)
    fake_slurm.program("scancel", "true")
    assert send() == Accepted("7", None)
    assert fake_slurm.calls("scancel") == ["6"]


def test_id_hidden_in_banners_is_looked_up_and_never_sent_again(fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", ACCEPT.replace("echo 7", "echo job seven is yours"))
    fake_slurm.program("squeue", SQUEUE)
    assert send() == Accepted("7", None)
    fake_slurm.program("squeue", "true")
    with pytest.raises(SubmissionError, match="did not say") as caught:
        send()
    assert caught.value.may_be_queued is True
    assert len(fake_slurm.calls("sbatch")) == 2


def test_dead_controller_leaves_it_open(fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", "echo 'Unable to contact slurm controller' >&2; exit 1")
    fake_slurm.program("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SubmissionError, match="did not say whether it took the job") as caught:
        send()
    assert caught.value.may_be_queued is True
    assert len(fake_slurm.calls("sbatch")) == 1


def test_a_controller_that_comes_back_gets_the_job(fake_slurm: Any, capfd: Any) -> None:
    """It is away for the first request and five looks; only then is the request sent again."""
    fake_slurm.program(
        "sbatch",
        f"""if [ ! -e "$(dirname "$0")/back" ]; then echo 'Unable to contact slurm controller' >&2; exit 1; fi
        {ACCEPT}""",
    )
    fake_slurm.program(
        "squeue",
        r"""echo x >> "$(dirname "$0")/looks"
        [ $(grep -c x "$(dirname "$0")/looks") -ge 6 ] || exit 1
        touch "$(dirname "$0")/back"
        """
        + SQUEUE,
    )
    assert send() == Accepted("7", None)
    assert len(fake_slurm.calls("sbatch")) == 2
    assert "Slurm does not answer" in capfd.readouterr().err


def test_another_submission_s_job_with_the_same_script_is_left_alone(fake_slurm: Any) -> None:
    """A successor is queued while its forerunner still runs there."""
    fake_slurm.program("sbatch", FIRST_TIME + "\n" + ACCEPT)
    fake_slurm.program(
        "squeue", SQUEUE.replace("/c", "/run/submit.sbatch").replace("$(cat", "5 $(cat").replace("stoker:tok", "")
    )
    fake_slurm.program("scancel", "true")
    request = Request(Path("/run/submit.sbatch"), "tok", others=frozenset({"5"}))
    assert submit.submit(request, sleep=lambda _: None) == Accepted("7", None)
    assert fake_slurm.calls("scancel") == []


def test_three_tries_that_surely_left_nothing(fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", "echo 'Socket timed out' >&2; exit 1")
    fake_slurm.program("squeue", "true")
    with pytest.raises(SubmissionError) as caught:
        send()
    assert caught.value.may_be_queued is False
    assert len(fake_slurm.calls("sbatch")) == 3
