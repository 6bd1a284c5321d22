"""`stoker launch --after`: which jobs are waited for, and that nothing of it gets into the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import cli
from stoker.launcher.after import After, dependencies
from stoker.launcher.errors import UserError
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.run.submissions import new_submission, submissions

JOBS = {"7": "RUNNING", "8": "PENDING", "9": "COMPLETED", "10": "FAILED", "12_3": "RUNNING"}
ROW = r"printf '%s\x1f%s\x1f0:00\x1f\x1fNone\x1f/w\x1fx\x1f/c\n'"
# squeue for one job, by its id.
SQUEUE = 'case "$*" in\n' + "".join(f"*--jobs={j}) {ROW} {j} {state};;\n" for j, state in JOBS.items())
SQUEUE += f"*--jobs=7,8) {ROW} 7 RUNNING; {ROW} 8 PENDING;;\n"
SQUEUE += '*--jobs=11) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;\nesac'
SCONTROL = (
    'if [ "$2" = partition ]; then echo "PartitionName=p Default=YES DefaultTime=NONE MaxNodes=UNLIMITED '
    'MaxTime=UNLIMITED State=UP TotalNodes=4"; fi'
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: Any) -> None:
    monkeypatch.chdir(tmp_path)
    fake_slurm.program("squeue", SQUEUE)
    fake_slurm.program("scontrol", SCONTROL)
    fake_slurm.program("sbatch", "echo 20")


def submitted(run: RunDir, *jobs: str) -> RunDir:
    run.config_json.write_text('{"cluster": {"kind": "slurm"}, "resilience": {"continuation": "requeue"}}')
    for job in jobs:
        new_submission(run, "sbatch", token=f"t{job}").set_job(job)
    return run


def ended(run: RunDir, outcome: Outcome) -> RunDir:
    attempt = claim(run)
    attempt.start.write_text('{"submission": 1}')
    outcome.write(attempt)
    return run


FINISHED = Outcome(Cause.FINISHED, Next.NOTHING, 0, "done")
CRASHED = Outcome(Cause.CRASH, Next.NOTHING, 1, "boom")


def test_jobs_are_waited_for_each_once_in_the_way_that_was_asked() -> None:
    assert dependencies(["7", "8", "7"], []) == After("afterany:7:8", ())
    assert dependencies(["7"], ["12_3", "8"]) == After("afterany:7,afterok:12_3:8", ())


def test_a_run_stands_for_its_newest_job(make_run: Callable[..., RunDir]) -> None:
    submitted(make_run("first"), "9", "8")
    assert dependencies(["first"], []) == After("afterany:8", ())
    assert dependencies([], ["runs/first"]) == After("afterok:8", ())


def chained(run: RunDir) -> RunDir:
    run.config_json.write_text('{"cluster": {"kind": "slurm"}, "resilience": {"continuation": "chain"}}')
    return run


NOT_THE_FOLLOWING = "the newest of them, is waited for; not those that may follow when it has started"


def test_of_a_chain_the_successor_is_waited_for_and_that_is_told(make_run: Callable[..., RunDir]) -> None:
    run = chained(submitted(make_run("links"), "7"))
    told = f"links continues by a chain of jobs: 7, {NOT_THE_FOLLOWING}"
    assert dependencies(["links"], []) == After("afterany:7", (told,))
    successor = new_submission(run, "chain", after="7", token="t8")
    assert dependencies(["links"], []).dependency == "afterany:7"  # Slurm has not accepted it yet
    successor.set_job("8")
    told = f"links continues by a chain of jobs: 8, {NOT_THE_FOLLOWING}"
    assert dependencies(["links"], []) == After("afterany:8", (told,))
    successor.cancel("supervisor: the run is over")
    assert dependencies(["links"], []).dependency == "afterany:7"


@pytest.mark.parametrize("has_successor", [False, True])
def test_the_success_of_a_chain_cannot_be_waited_for(has_successor: bool, make_run: Callable[..., RunDir]) -> None:
    run = chained(submitted(make_run("links"), "7"))
    if has_successor:  # it waits for the end of job 7, and is cancelled when that has finished the run
        new_submission(run, "chain", after="7", token="t8").set_job("8")
    with pytest.raises(UserError, match=r"--after-ok links: it continues by a chain of jobs, .*; use --after"):
        dependencies([], ["links"])


def test_a_chain_that_is_over_is_as_any_other_run(make_run: Callable[..., RunDir]) -> None:
    ended(chained(submitted(make_run("links"), "9")), FINISHED)
    assert dependencies([], ["links"]) == After(None, ("links is over (FINISHED); not waited for",))


def test_what_is_over_is_not_waited_for(make_run: Callable[..., RunDir]) -> None:
    ended(submitted(make_run("done"), "9"), FINISHED)
    ended(submitted(make_run("broken"), "10"), CRASHED)
    found = dependencies(["broken", "10"], ["done", "9"])
    assert found.dependency is None
    assert found.notes == (
        "broken is over (FAILED); not waited for",
        "job 10 is over (FAILED); not waited for",
        "done is over (FINISHED); not waited for",
        "job 9 is over (COMPLETED); not waited for",
    )


@pytest.mark.parametrize(
    ("after", "after_ok", "words"),
    [
        (["11"], [], "--after 11: Slurm knows no such job; if it ended long ago, leave this out"),
        ([], ["10"], r"--after-ok 10: it is over and did not succeed \(FAILED\); nothing to wait for"),
        ([], ["broken"], r"--after-ok broken: it is over and did not succeed \(FAILED\); nothing to wait for"),
        (["frozen"], [], "--after frozen: this run was never submitted"),
        ([], ["frozen"], "--after-ok frozen: this run was never submitted"),
        (["lost"], [], r"--after lost: its job is not known \(UNKNOWN\); Slurm can wait for jobs only"),
        (["7.0"], [], r"--after 7.0: expected a job, a task of an array \(12_3\), or a run"),
        (["nope"], [], "nope: no run directory"),
    ],
)
def test_what_cannot_be_waited_for_is_told(
    after: list[str], after_ok: list[str], words: str, make_run: Callable[..., RunDir]
) -> None:
    make_run("frozen")
    ended(submitted(make_run("broken"), "10"), CRASHED)
    new_submission(submitted(make_run("lost")), "sbatch", token="t")
    with pytest.raises(UserError, match=words):
        dependencies(after, after_ok)


def test_slurm_that_does_not_answer_is_told(fake_slurm: Any) -> None:
    fake_slurm.program("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(UserError, match="--after 7: Slurm does not answer") as caught:
        dependencies(["7"], [])
    assert caught.value.exit_code == 1


@pytest.fixture
def overrides(tokens: str) -> list[str]:
    return ["data=custom", f"data.sources.0.prefix={tokens}", "data.seq_len=64", "name=t"]


def test_the_first_submission_waits_and_the_next_does_not(
    overrides: list[str], tmp_path: Path, fake_slurm: Any
) -> None:
    directory = tmp_path / "r"
    begin = "cluster.begin=16:00"
    assert cli.main(["launch", *overrides, begin, "--after", "7", "--after-ok=8", f"--run-dir={directory}"]) == 0
    run = RunDir(directory)
    assert fake_slurm.calls("sbatch")[-1].startswith("--parsable --dependency=afterany:7,afterok:8 --comment=stoker:")
    assert submissions(run)[0].intention["options"] == ["--dependency=afterany:7,afterok:8"]
    assert "dependency" not in run.script.read_text()
    assert "#SBATCH --begin=16:00\n" in run.script.read_text()
    ended(run, CRASHED)
    assert cli.main(["resume", str(directory)]) == 0
    assert fake_slurm.calls("sbatch")[-1].startswith("--parsable --begin=now --comment=stoker:")


def test_a_new_begin_holds_for_the_resume_it_is_given_to(overrides: list[str], tmp_path: Path, fake_slurm: Any) -> None:
    directory = tmp_path / "r"
    assert cli.main(["launch", *overrides, "cluster.begin=16:00", f"--run-dir={directory}"]) == 0
    ended(RunDir(directory), CRASHED)
    assert cli.main(["resume", str(directory), "cluster.begin=tomorrow"]) == 0
    assert fake_slurm.calls("sbatch")[-1].startswith("--parsable --comment=stoker:")


def test_it_is_shown_before_anything_is_made(overrides: list[str], tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["launch", "--dry-run", *overrides, "--after=7"]) == 0
    assert "# to sbatch, for this submission alone: --dependency=afterany:7\n" in capsys.readouterr().out
    assert cli.main(["launch", "--no-submit", *overrides, "--after=7", f"--run-dir={tmp_path}/r"]) == 0
    assert f"to start it:   sbatch --dependency=afterany:7 {tmp_path}/r/submit.sbatch\n" in capsys.readouterr().out


def test_without_slurm_there_is_nobody_to_wait(overrides: list[str], tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["launch", *overrides, "cluster=local", "--after=7"]) == 2
    assert "--after: Slurm does the waiting, and cluster=local has none" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
