"""sbatch accepts the job and its answer is lost, comes late, or is hidden in banners: there is one job all the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher.rehearsal.trial import Trial, wait_for
from stoker.launcher.run.outcome import Cause
from stoker.launcher.run.submissions import submissions

pytestmark = pytest.mark.slurm

# Each stands first in the PATH of a submission and runs the real sbatch ($REAL). `$here/calls` counts.
SBATCH = {
    # The job is accepted, the answer is lost.
    "dropped": 'out=$($REAL "$@"); echo "sbatch: error: Batch job submission failed: Socket timed out" >&2; exit 1',
    # The first request arrives after it was given up (the looks take 10 s) and sent again: both become jobs.
    "late": """if [ "$(wc -l < "$here/calls")" = 1 ]; then
        (sleep 14; $REAL "$@" > "$here/late" 2>&1) > /dev/null 2>&1 &
        echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1
    fi
    exec $REAL "$@" """,
    "banner": 'echo "Welcome to the cluster"; $REAL "$@"; echo "Your project has 12345 hours left"',
}


def wrapper(lab: Any, directory: Path, body: str) -> dict[str, str]:
    """An environment in which sbatch is this."""
    directory.mkdir()
    path = lab.cluster.env["PATH"]
    real = next(p for p in shutil.which("sbatch", path=path.split(":", 1)[1]).splitlines() if p)
    program = directory / "sbatch"
    program.write_text(f'#!/bin/bash\nREAL={real}\nhere={directory}\necho x >> "$here/calls"\n{body}\n')
    program.chmod(0o755)
    return {"PATH": f"{directory}:{path}"}


def jobs_in(lab: Any, run: Trial) -> dict[str, str]:
    """Job to state, of all jobs that Slurm remembers and that work in the run's directory."""
    out = lab.cluster.run(["squeue", "-h", "--states=all", "-o", "%A|%T|%Z"]).stdout
    rows = (line.split("|") for line in out.splitlines())
    return {job: state for job, state, directory in rows if directory == str(run.dir.path)}


def test_an_answer_that_is_lost_or_late_makes_no_second_run(
    lab: Any, same: Callable[..., None], tmp_path: Path
) -> None:
    def launch(how: str) -> Trial:
        return lab.launch(how, env=wrapper(lab, tmp_path / f"bin-{how}", SBATCH[how]))

    with ThreadPoolExecutor(3) as pool:
        runs = dict(zip(SBATCH, pool.map(launch, SBATCH), strict=True))
    for how, run in runs.items():
        assert run.wait_end().cause is Cause.FINISHED, f"{how}: {run.story()}"
        assert len(run.dir.all_attempts()) == 1, f"{how}: {run.story()}"
        assert [s.number for s in submissions(run.dir)] == [1]
        same(run)
    calls = {how: (tmp_path / f"bin-{how}" / "calls").read_text().count("x") for how in SBATCH}
    assert calls == {"dropped": 1, "late": 2, "banner": 1}  # looked up before any retry
    assert len(jobs_in(lab, runs["dropped"])) == len(jobs_in(lab, runs["banner"])) == 1
    # The job of the late request finds that the run has one already, and ends without a trace in the run.
    late = runs["late"]
    wait_for(
        lambda: set(jobs_in(lab, late).values()) == {"COMPLETED"} and len(jobs_in(lab, late)) == 2,
        lambda: f"both jobs to be over: {jobs_in(lab, late)} {late.story()}",
        60.0,
    )
    logs = [log.read_text() for log in late.dir.job_logs.glob("*.log")]
    assert sum("this is a second copy of it; nothing to do" in text for text in logs) == 1
    assert len(late.dir.all_attempts()) == 1
