"""Runs through submitit's interfaces: submitted, watched and ended without a pickle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from stoker.launcher.executor import FrozenRun, StokerExecutor, StokerJob
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.run.submissions import submissions
from stoker.launcher.submit import SubmissionError
from stoker.launcher.watch import wait_for_end
from submitit.core.core import Executor, Job
from submitit.core.utils import FailedJobError, UncompletedJobError


def squeue(state: str) -> str:
    return f"printf '7\\x1f{state}\\x1f1:00\\x1fn1\\x1fNone\\x1f/w\\x1fx\\x1f/c\\n'"


@pytest.fixture
def run(make_run: Callable[..., RunDir], fake_slurm: Any) -> RunDir:
    fake_slurm.program("sbatch", "echo 7")
    fake_slurm.program("squeue", squeue("RUNNING"))
    return make_run()


def submitted(run: RunDir) -> StokerJob:
    job = StokerExecutor(run.path.parent).submit(FrozenRun(run.path))
    assert isinstance(job, StokerJob)
    return job


def end(run: RunDir, cause: Cause, code: int, next_: Next = Next.NOTHING) -> None:
    attempt = claim(run)
    attempt.start.write_text('{"submission": 1}')
    Outcome(cause, next_, code, "why").write(attempt)


def test_executor_and_job_are_submitit_s(run: RunDir) -> None:
    job = submitted(run)
    assert isinstance(job, Job)
    assert issubclass(StokerExecutor, Executor)
    assert (job.job_id, job.state, job.done()) == ("7", "RUNNING", False)
    assert submissions(run)[0].job_id == "7"
    assert not list(run.path.rglob("*.pkl"))


def test_result_is_the_last_outcome(run: RunDir, fake_slurm: Any) -> None:
    job = submitted(run)
    end(run, Cause.PREEMPTED, 75, Next.REQUEUE)
    assert job.done() is False, "a requeued run goes on"
    end(run, Cause.FINISHED, 0)
    assert job.done() is True
    assert job.state == "FINISHED"
    assert job.result().cause is Cause.FINISHED
    assert job.exception() is None


def test_failed_run_is_an_exception_with_the_reason(run: RunDir) -> None:
    job = submitted(run)
    end(run, Cause.OUT_OF_MEMORY, 1)
    error = job.exception()
    assert isinstance(error, FailedJobError)
    assert str(error) == "out_of_memory: why"


def test_job_that_vanished_is_noticed(run: RunDir, fake_slurm: Any) -> None:
    """submitit itself never notices a job that was killed before it could write its result."""
    job = submitted(run)
    (run.job_logs / "7.log").write_text("x")
    fake_slurm.program("squeue", squeue("NODE_FAIL"))
    assert job.done() is True
    with pytest.raises(UncompletedJobError, match="FAILED Slurm ended job 7 as NODE_FAIL before the supervisor"):
        job.result()


def test_cancel_marks_the_run(run: RunDir, fake_slurm: Any) -> None:
    fake_slurm.program("scancel", "true")
    submitted(run).cancel()
    assert submissions(run)[0].is_cancelled
    assert fake_slurm.calls("scancel") == ["7"]


def test_batch_submits_one_after_the_other(make_run: Callable[..., RunDir], run: RunDir, fake_slurm: Any) -> None:
    other = make_run("other")
    executor = StokerExecutor(run.path.parent)
    with executor.batch():
        jobs = [executor.submit(FrozenRun(r.path)) for r in (run, other)]
    assert [job.paths.folder for job in jobs] == [run.path, other.path]
    assert len(fake_slurm.calls("sbatch")) == 2


def test_only_frozen_runs_can_be_submitted(run: RunDir) -> None:
    with pytest.raises(TypeError, match="only frozen runs can be submitted"):
        StokerExecutor(run.path).submit(print, "x")


def test_refusal_is_passed_on(run: RunDir, fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", "echo 'Invalid qos' >&2; exit 1")
    with pytest.raises(SubmissionError, match="Invalid qos"):
        submitted(run)


def test_without_slurm_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert StokerExecutor.affinity() == -1


def test_waiting_asks_slurm_seldom_and_the_files_often(
    run: RunDir, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(run)
    clock = [0.0]
    looks = []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        clock[0] += seconds
        if clock[0] > 3600:
            end(run, Cause.FINISHED, 0)

    assert wait_for_end(run, sleep=sleep).exit_code == 0
    assert 700 < len(looks) < 1500
    assert len(fake_slurm.calls("squeue")) < 70, "about one a minute"


def test_waiting_ends_soon_after_the_run(run: RunDir, fake_slurm: Any) -> None:
    submitted(run)
    thread = threading.Timer(0.5, end, (run, Cause.CRASH, 3))
    thread.start()
    start = time.monotonic()
    assert wait_for_end(run).exit_code == 3
    assert time.monotonic() - start < 30
