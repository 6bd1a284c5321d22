"""Which job belongs to which submission, and who called it off."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.submissions import (
    TakenError,
    new_submission,
    next_number,
    own_submission,
    rival,
    submissions,
)


def test_submissions_are_numbered_and_keep_what_they_were_given(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert submissions(run) == []
    first = new_submission(run, "sbatch", command=["sbatch", "submit.sbatch"])
    second = new_submission(run, "local")
    assert [s.number for s in submissions(run)] == [1, 2]
    assert first.intention["command"] == ["sbatch", "submit.sbatch"]
    assert second.intention["mode"] == "local"
    assert first.job_id is None


def test_job_id_is_set_once(tmp_path: Path) -> None:
    s = new_submission(RunDir(tmp_path), "sbatch")
    assert s.set_job("17")
    assert not s.set_job("18")
    assert s.job_id == "17"


def test_cancel_marks_one_submission_only(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first, second = new_submission(run, "sbatch"), new_submission(run, "sbatch")
    assert first.cancel("somebody")
    assert not first.cancel("somebody else")
    assert (first.is_cancelled, second.is_cancelled) == (True, False)


def test_a_job_finds_its_submission_by_id(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for job in ("17", "18"):
        new_submission(run, "sbatch").set_job(job)
    assert own_submission(run, "17").number == 1
    assert own_submission(run, "18").number == 2
    assert len(submissions(run)) == 2


def test_a_job_that_starts_before_its_id_is_noted_takes_the_newest_open_submission(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    refused, accepted = new_submission(run, "sbatch"), new_submission(run, "sbatch")
    assert own_submission(run, "17") == accepted
    assert accepted.job_id == "17"
    assert not accepted.set_job("17")  # the launcher comes later
    assert refused.job_id is None


def test_sbatch_by_hand_is_adopted_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    new_submission(run, "sbatch").set_job("17")
    new_submission(run, "local")
    adopted = own_submission(run, "99")
    assert (adopted.number, adopted.intention["mode"], adopted.job_id) == (3, "adopted", "99")
    assert own_submission(run, "99") == adopted


def test_a_second_copy_of_a_request_finds_its_place_taken(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    new_submission(run, "sbatch", token="old").set_job("16")
    newest = new_submission(run, "sbatch", token="tok")
    assert rival(run, "17", "tok") is None
    assert newest.job_id == "17"
    assert rival(run, "17", "tok") is None  # requeued
    assert rival(run, "18", "tok") == "17"
    assert rival(run, "19", "of another run") is None


def test_of_two_who_submit_at_once_one_is_told(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    number = next_number(run)
    assert new_submission(run, "sbatch", number).number == 1
    with pytest.raises(TakenError, match="somebody else has just submitted it"):
        new_submission(run, "sbatch", number)
    assert [s.number for s in submissions(run)] == [1]
