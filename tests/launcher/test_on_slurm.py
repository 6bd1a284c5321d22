"""The launching side against a real Slurm: what it accepts, refuses, passes on, and how a run is stopped.

A stand-in for the interpreter (`cluster.python`) records how the batch script called it, so that no test trains.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher.rehearsal.cluster import Cluster
from stoker.launcher.rehearsal.spec import ClusterSpec
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.submissions import submissions

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("launch_on_slurm")]

# Plays supervisor: records its surroundings, then ends as the file `plan` in the run directory says, or waits.
PYTHON = f"""#!{sys.executable}
import json, os, signal, sys, time
from pathlib import Path
if sys.argv[1] == "-c":
    sys.exit()  # whether it works at all
if sys.argv[3] == "stoker.launcher.aftermath":
    sys.exit(int(sys.argv[5]))
run = Path(sys.argv[4])
is_told = []
signal.signal(signal.SIGTERM, lambda *_: is_told.append(True))  # before anybody can see that we are here
numbers = sorted(int(p.name) for p in (run / "attempts").iterdir())
attempt = run / "attempts" / f"{{len(numbers) + 1:04d}}"
(attempt / "logs").mkdir(parents=True)
seen = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
seen["ignored"] = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
(attempt / "seen.json").write_text(json.dumps(seen))
submission = max(int(p.name[:4]) for p in (run / "submissions").glob("????.json"))
(attempt / "start.json").write_text(json.dumps({{"submission": submission, "job_id": os.environ["SLURM_JOB_ID"]}}))
print("hello from", os.environ["SLURM_JOB_ID"], flush=True)
plan = (run / "plan").read_text() if (run / "plan").exists() else "wait"
def say(cause, code):
    outcome = {{"cause": cause, "next": "nothing", "exit_code": code, "reason": cause}}
    (attempt / "tmp").write_text(json.dumps(outcome))
    try:
        os.link(attempt / "tmp", attempt / "outcome.json")
    except FileExistsError:
        sys.exit(75)  # the test has said how this attempt ends
    sys.exit(code)
while plan == "wait":
    if is_told:
        say("cancelled", 143)
    time.sleep(0.05)
cause, code = plan.split()
say(cause, int(code))
"""
# Nothing in it may disturb Slurm, the shell, or us. (No backslash: Slurm cannot have one in a log's path.)
AWKWARD = 'it\'s a "run" $HOME (1) \u00e9\u4e2d 50%j # ; & *'


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="stoker-l-") as directory:
        spec = ClusterSpec(nodes=2, gpus=0, kill_wait=2)
        with Cluster.start(spec, Path(directory) / "c") as found:
            yield found


@pytest.fixture(autouse=True)
def _nothing_left(cluster: Cluster) -> Iterator[None]:
    yield
    subprocess.run(["scancel", f"--user={os.getuid()}"], env=cluster.env, check=True)


@pytest.fixture
def stoker(cluster: Cluster, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def call(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stoker.launcher.cli", *arguments]
        environment = cluster.env | (env or {})
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )

    return call


@pytest.fixture
def overrides(tokens: str, tmp_path: Path) -> list[str]:
    # (A space in the program's own name would hide it from Slurm's proctrack/linuxproc, which then cannot kill it.)
    python = tmp_path / "my tools" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    root = f"{tmp_path}/{AWKWARD}".replace("\\", "\\\\")
    quoted = root.replace("'", "\\'")
    return [
        "data=custom", f"data.sources.0.prefix={tokens}", "data.seq_len=64", "name=t", "cluster.time=10",
        f"run_root='{quoted}'", f"cluster.python='{python}'",
    ]  # fmt: skip


def the_run(tmp_path: Path) -> RunDir:
    (found,) = (tmp_path / AWKWARD).iterdir()
    return RunDir(found)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def seen(run: RunDir, attempt: int = 1) -> dict[str, Any]:
    path = run.attempt(attempt).path / "seen.json"
    wait_until(lambda: path.exists() and path.read_text().endswith("}"))
    return dict(json.loads(path.read_text()))


def test_awkward_names_survive_submission(stoker: Any, overrides: list[str], tmp_path: Path) -> None:
    value = 'it\'s "q" $HOME `id` \u00e9 # x'
    env = f"cluster.env={{NOTE: '{value}', lower: '1 2'}}".replace("it's", "it\\'s")
    done = stoker("launch", *overrides, env, "cluster.comment='a | b # c'", env={"HF_TOKEN": "s3cret-v"})
    assert done.returncode == 0, done.stderr
    run = the_run(tmp_path)
    found = seen(run)
    assert found["cwd"] == str(run.path)
    assert found["argv"] == ["-u", "./bootstrap.py", "stoker.launcher.supervise", str(run.path)]
    assert (found["env"]["NOTE"], found["env"]["lower"]) == (value, "1 2")
    assert found["ignored"] is True
    job = submissions(run)[0].job_id
    assert f"job:           {job}\n" in done.stdout
    log = run.job_logs / f"{job}.log"
    wait_until(lambda: log.exists() and "hello" in log.read_text())
    assert f"[job {job}] hello from {job}" in stoker("logs", str(run.path)).stdout
    # The key reached the job through its environment, and nothing else.
    assert found["env"]["HF_TOKEN"] == "s3cret-v"
    (run.attempt(1).path / "seen.json").unlink()
    assert not [p for p in run.path.rglob("*") if p.is_file() and b"s3cret-v" in p.read_bytes()]
    status = stoker("status", str(job)).stdout
    assert "state       RUNNING" in status
    assert stoker("cancel", str(run.path)).stdout == f"{run.path}: cancelled; job {job} ended\n"
    assert "state       CANCELLED" in stoker("status", str(run.path)).stdout


@pytest.mark.parametrize(("plan", "code", "word"), [("finished 0", 0, "FINISHED"), ("crash 3", 3, "FAILED crash")])
def test_wait_exits_as_the_run_does(
    plan: str, code: int, word: str, stoker: Any, overrides: list[str], tmp_path: Path
) -> None:
    assert stoker("launch", "--no-submit", *overrides).returncode == 0
    run = the_run(tmp_path)
    (run.path / "plan").write_text(plan)
    done = stoker("resume", "--follow", str(run.path))
    assert done.returncode == code
    assert "] hello from " in done.stdout
    assert done.stdout.splitlines()[-1].startswith(word)


def test_sbatch_by_hand_works_as_it_is(stoker: Any, cluster: Cluster, overrides: list[str], tmp_path: Path) -> None:
    done = stoker("launch", "--no-submit", *overrides)
    line = done.stdout.splitlines()[-1].removeprefix("to start it:").strip()
    by_hand = subprocess.run(["bash", "-c", line], env=cluster.env, cwd="/", capture_output=True, text=True, check=True)
    run = the_run(tmp_path)
    assert seen(run)["cwd"] == str(run.path)
    subprocess.run(["scancel", by_hand.stdout.split()[-1]], env=cluster.env, check=True)


def test_launch_from_inside_another_allocation(
    stoker: Any, cluster: Cluster, overrides: list[str], tmp_path: Path
) -> None:
    """The outer job's settings must not bend the inner one: it has other nodes, tasks, memory and a partition."""
    call = [sys.executable, "-m", "stoker.launcher.cli", "launch", *overrides]
    bent = ["env", "SLURM_EXPORT_ENV=NONE", "SBATCH_NODELIST=nowhere", "SBATCH_TIMELIMIT=1", "SBATCH_EXPORT=NONE"]
    outer = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=3", "--mem=50", "--job-name=outer", *bent]
    env = cluster.env | {"KEEP": "1"}
    done = subprocess.run(
        [*outer, *call], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    run = the_run(tmp_path)
    found = seen(run)["env"]
    job = submissions(run)[0].job_id
    assert (found["SLURM_JOB_ID"], found["SLURM_JOB_NAME"], found["SLURM_CPUS_PER_TASK"]) == (job, "t", "1")
    assert "SLURM_STEP_ID" not in found
    assert "SLURM_MEM_PER_NODE" not in found
    assert found["KEEP"] == "1"
    stoker("cancel", str(run.path))


def test_refusals_leave_nothing(stoker: Any, overrides: list[str], tmp_path: Path) -> None:
    unknown = stoker("launch", *overrides, "cluster.partition=nope", "cluster.nodes=3")
    assert unknown.returncode == 2
    assert "there is no partition nope here; known: main" in unknown.stderr
    # Nothing of ours finds this one: sbatch itself refuses.
    refused = stoker("launch", *overrides, "cluster.constraint='[none-such*1]'")
    assert refused.returncode == 1
    assert "sbatch refused the job: sbatch: error:" in refused.stderr
    assert not (tmp_path / AWKWARD).exists()


def test_pending_job_is_cancelled_for_good(stoker: Any, cluster: Cluster, overrides: list[str], tmp_path: Path) -> None:
    done = stoker("launch", *overrides, "cluster.sbatch.hold=''")
    assert done.returncode == 0, done.stderr
    run = the_run(tmp_path)
    assert "HELD JobHeldUser: `scontrol release" in stoker("status", str(run.path)).stdout
    assert stoker("resume", str(run.path)).returncode == 1
    assert stoker("cancel", str(run.path)).returncode == 0
    assert run.all_attempts() == []
    assert "state       CANCELLED" in stoker("status", str(run.path)).stdout
    assert os.listdir(run.job_logs) == []


def test_a_job_submitted_by_hand_is_the_run_s_and_another_script_in_its_directory_is_not(
    stoker: Any, cluster: Cluster, overrides: list[str], tmp_path: Path
) -> None:
    assert stoker("launch", "--no-submit", *overrides).returncode == 0
    run = the_run(tmp_path)
    (run.path / "eval.sh").write_text("#!/bin/bash\nexec sleep 100\n")

    def sbatch(*argv: str) -> str:
        command = ["sbatch", "--parsable", *argv]
        done = subprocess.run(command, env=cluster.env, cwd=run.path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    theirs, ours = sbatch("--output=/dev/null", "eval.sh"), sbatch("--hold", "submit.sbatch")
    refused = stoker("resume", str(run.path))
    assert f"job {ours} still works on it (HELD)" in refused.stderr
    assert stoker("cancel", str(run.path)).stdout.endswith(f": cancelled; job {ours} ended\n")
    assert cluster.job(theirs).state in ("PENDING", "CONFIGURING", "RUNNING")


def test_a_run_waits_for_another_and_its_script_knows_nothing_of_it(
    stoker: Any, cluster: Cluster, overrides: list[str], tmp_path: Path
) -> None:
    first = subprocess.run(
        ["sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 100"],
        env=cluster.env, cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    assert stoker("launch", *overrides, "--after", first).returncode == 0
    run = the_run(tmp_path)
    job = str(submissions(run)[0].job_id)
    assert cluster.job(job).reason == "Dependency"
    assert "dependency" not in run.script.read_text()
    subprocess.run(["scancel", first], env=cluster.env, check=True)
    assert seen(run)["cwd"] == str(run.path)
    stoker("cancel", str(run.path))


def test_requeued_run_is_shown_and_appends_to_its_log(
    stoker: Any, cluster: Cluster, overrides: list[str], tmp_path: Path
) -> None:
    assert stoker("launch", *overrides).returncode == 0
    run = the_run(tmp_path)
    seen(run)
    job = str(submissions(run)[0].job_id)
    run.attempt(1).path.joinpath("outcome.json").write_text(
        json.dumps({"cause": "preempted", "next": "requeue", "exit_code": 75, "reason": "x"})
    )
    subprocess.run(["scontrol", "requeue", job], env=cluster.env, check=True)
    wait_until(lambda: "state       REQUEUED" in stoker("status", str(run.path)).stdout)
    assert seen(run, 2)["env"]["SLURM_RESTART_COUNT"] == "1"
    assert (run.job_logs / f"{job}.log").read_text().count("hello from") == 2
    stoker("cancel", str(run.path))


def test_run_inside_an_allocation(stoker: Any, cluster: Cluster, overrides: list[str], tmp_path: Path) -> None:
    call = [sys.executable, "-m", "stoker.launcher.cli", "run", *overrides]
    process = subprocess.Popen(["salloc", "--nodes=2", "--quiet", *call], env=cluster.env, cwd=tmp_path)
    wait_until(
        lambda: (tmp_path / AWKWARD).exists() and len(list((tmp_path / AWKWARD).glob("t-*/attempts/*/seen*"))) == 1
    )
    run = the_run(tmp_path)
    found = seen(run)
    assert found["argv"][-1] == str(run.path), "no --local inside an allocation"
    assert found["env"]["SLURM_JOB_ID"] == submissions(run)[0].job_id
    assert found["env"]["SLURM_NNODES"] == "2"
    assert stoker("cancel", str(run.path)).returncode == 0
    assert process.wait(timeout=30) == 143
