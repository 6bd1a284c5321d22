"""A plain cluster: jobs run, nodes break and come back, an urgent job takes nodes. Real daemons."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from stoker.launcher.rehearsal import processes
from stoker.launcher.rehearsal.cluster import Cluster, ClusterError, wait_until
from stoker.launcher.rehearsal.spec import ClusterSpec

pytestmark = pytest.mark.slurm


def sleeper(cluster: Cluster, *arguments: str) -> str:
    job = cluster.submit([*arguments, "--output=/dev/null", "--wrap=srun sleep 600"])
    cluster.wait_for_job(job, "RUNNING")
    node = cluster.job(job).nodes
    wait_until(lambda: "sleep" in tasks(cluster, node), 20, lambda: f"a task on {node}")
    return job


def tasks(cluster: Cluster, node: str) -> list[str]:
    return [process.name for process in cluster.processes_on(node)]


def cancel(cluster: Cluster, *jobs: str) -> None:
    cluster.run(["scancel", *jobs])
    for job in jobs:
        cluster.wait_for_job(job, "CANCELLED")


def test_srun_reaches_two_nodes_with_their_gpus(plain: Cluster) -> None:
    script = 'echo "$SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES"'
    done = plain.run(["srun", "-N2", "-w", "n3,n4", "--gpus-per-node=2", "sh", "-c", script])
    assert sorted(done.stdout.splitlines()) == ["n3 0 0,1", "n4 1 0,1"]


def test_a_batch_script_starts_steps_on_all_its_nodes(plain: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\nsrun -l sh -c 'echo \"on $SLURMD_NODENAME\"'\n")
    job = plain.submit(["-N2", "-w", "n1,n2", f"--output={tmp_path}/out", str(script)])
    plain.wait_for_job(job, "COMPLETED")
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["0: on n1", "1: on n2"]


def test_clients_do_not_inherit_the_settings_of_a_surrounding_job(
    plain: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    monkeypatch.setenv("KEPT", "yes")
    assert plain.env["SLURM_CONF"] == str(plain.layout.slurm_conf)
    assert plain.env["KEPT"] == "yes"
    assert not {"SLURM_JOB_ID", "SBATCH_PARTITION"} & set(plain.env)


def test_a_failing_command_tells_what_it_said(plain: Cluster) -> None:
    with pytest.raises(ClusterError, match=r"status 1: .*invalid partition"):
        plain.submit(["-p", "nowhere", "--wrap=true"])
    with pytest.raises(ClusterError, match=r"no such|Invalid job id"):
        plain.job(123456)


def test_what_runs_on_a_node_is_found_though_it_hides(plain: Cluster) -> None:
    # A daemon with an empty environment, in a session of its own, whose parent is gone.
    script = "env -i setsid sh -c 'sleep 601 & exit' & wait"
    job = plain.submit(["-w", "n2", "--output=/dev/null", f"--wrap={script}; sleep 600"])
    plain.wait_for_job(job, "RUNNING")
    wait_until(
        lambda: "sleep 601" in [process.command() for process in plain.processes_on("n2")], 20, lambda: "the daemon"
    )
    assert "sleep 601" not in [process.command() for process in plain.processes_on("n1")]
    cancel(plain, job)


def test_a_frozen_node_stands_still_and_goes_on_when_thawed(plain: Cluster) -> None:
    job = sleeper(plain, "-w", "n3")
    plain.freeze("n3")
    assert {process.state for process in plain.processes_on("n3")} == {"T"}
    plain.thaw("n3")
    wait_until(lambda: "T" not in {process.state for process in plain.processes_on("n3")}, 5, lambda: "n3 to thaw")
    assert plain.job(job).state == "RUNNING"
    cancel(plain, job)


def test_without_slurmd_tasks_go_on_until_it_is_started_again(plain: Cluster) -> None:
    job = sleeper(plain, "-w", "n4")
    plain.kill_slurmd("n4")
    assert "slurmd" not in tasks(plain, "n4")
    assert "sleep" in tasks(plain, "n4")
    plain.restart_node("n4")
    wait_until(lambda: "slurmd" in tasks(plain, "n4"), 10, lambda: "slurmd on n4")
    with pytest.raises(ClusterError, match="n4 is up, with its slurmd"):
        plain.restart_node("n4")
    assert "sleep" in tasks(plain, "n4")
    assert plain.job(job).state == "RUNNING"
    cancel(plain, job)


def test_an_urgent_job_takes_the_nodes_and_the_victim_restarts_by_itself(plain: Cluster) -> None:
    victim = sleeper(plain, "-w", "n4", "-p", "grace0")
    urgent = plain.preempt(victim, seconds=600)
    plain.wait_for_job(urgent, "RUNNING")
    assert plain.job(urgent).nodes == "n4"
    assert plain.job(victim).state in ("COMPLETING", "PENDING")
    cancel(plain, urgent)
    job = plain.wait_for_job(victim, "RUNNING")
    assert (job.restarts, job.nodes) == (1, "n4")
    cancel(plain, victim)


def test_only_a_running_job_can_be_preempted(plain: Cluster) -> None:
    job = plain.submit(["--hold", "--wrap=true"])
    with pytest.raises(ClusterError, match=f"job {job} is PENDING"):
        plain.preempt(job)
    cancel(plain, job)


def test_nothing_of_a_crashed_node_lives_and_it_can_be_started_again(plain: Cluster) -> None:
    job = sleeper(plain, "-w", "n2")
    doomed = plain.processes_on("n2")
    assert {"slurmd", "slurmstepd", "sleep"} <= {process.name for process in doomed}
    plain.crash("n2")
    assert plain.processes_on("n2") == []
    assert [processes.find(process.pid) for process in doomed] == [None] * len(doomed)
    for act in (plain.crash, plain.freeze, plain.kill_slurmd):
        with pytest.raises(ClusterError, match="n2 is powered off"):
            act("n2")
    assert "slurmd" in tasks(plain, "n1")
    plain.restart_node("n2")
    cancel(plain, job)
    plain.wait_for_nodes("idle", "n2")


@pytest.mark.full
def test_a_crashed_node_goes_down_and_its_job_runs_elsewhere(plain: Cluster) -> None:
    # The job outlives its srun, which may notice before Slurm does that n2 is gone.
    lasting = "--wrap=srun sleep 600; exec sleep 606"
    job = plain.submit(["-N2", "-w", "n1,n2", "--requeue", "--output=/dev/null", lasting])
    wait_until(lambda: "sleep" in tasks(plain, "n2"), 30, lambda: "n2's task")
    plain.crash("n2")
    plain.wait_for_nodes("down", "n2")
    plain.run(["scontrol", "update", f"jobid={job}", "nodelist="])
    assert plain.job(job).restarts == 1
    restarted = plain.wait_for_job(job, "RUNNING")
    assert "n2" not in restarted.nodes
    plain.restart_node("n2")
    plain.wait_for_nodes("idle", "n2")
    cancel(plain, job)


def test_accounting_is_refused_where_there_is_no_database(plain: Cluster) -> None:
    done = plain.run(["sacct"], check=False)
    assert (done.returncode, done.stderr) == (1, "Slurm accounting storage is disabled\n")


def test_nodes_of_a_plain_cluster_have_no_cable(plain: Cluster) -> None:
    with pytest.raises(ClusterError, match="have no cable: bring it up with --isolate"):
        plain.cut("n1")
    with pytest.raises(ValueError, match="no node 'n9' in this cluster"):
        plain.crash("n9")


@pytest.mark.full
def test_grace_lets_a_victim_run_on_before_its_nodes_are_taken(need_slurm: None, directory: Path) -> None:
    with Cluster.start(ClusterSpec(nodes=1, grace_time=5), directory) as cluster:
        log = directory.parent / "signals"
        script = f"trap 'date +%s >> {log}' TERM; while :; do sleep 0.2; done"
        victim = cluster.submit(["--output=/dev/null", f'--wrap=srun sh -c "{script}"'])
        cluster.wait_for_job(victim, "RUNNING")
        wait_until(lambda: "sleep" in tasks(cluster, "n1"), 20, lambda: "the task")
        began = time.time()
        urgent = cluster.preempt(victim, seconds=1)
        # The step's tasks are told at once; the nodes go at the end of the grace, which Slurm looks at every 30 s.
        wait_until(log.exists, 10, lambda: "the warning")
        assert cluster.job(victim).state == "RUNNING"
        cluster.wait_for_job(urgent, "RUNNING", "COMPLETED", timeout=60)
        assert time.time() - began >= 5
        assert cluster.wait_for_job(victim, "RUNNING").restarts == 1


@pytest.mark.full
@pytest.mark.parametrize("send_user_signal", [False, True])
def test_preemption_sends_the_signal_a_job_asked_for_only_where_the_site_says_so(
    need_slurm: None, directory: Path, send_user_signal: bool
) -> None:
    spec = ClusterSpec(nodes=1, grace_time=30, send_user_signal=send_user_signal)
    with Cluster.start(spec, directory) as cluster:
        log = directory.parent / "signals"
        traps = f'for s in USR1 TERM; do trap "echo $s >> {log}" $s; done; echo ready >> {log}'
        script = directory.parent / "task.sh"
        script.write_text(f"#!/bin/sh\n{traps}\nwhile :; do sleep 0.1; done\n")
        script.chmod(0o755)
        victim = cluster.submit(["--signal=USR1@60", "--output=/dev/null", f"--wrap=srun {script}"])
        wait_until(log.exists, 20, lambda: "the task")
        cluster.preempt(victim)
        wait_until(lambda: len(log.read_text().split()) > 1, 20, lambda: "a signal")
        assert log.read_text().split()[1] == ("USR1" if send_user_signal else "TERM")


def test_other_users_jobs_run_as_themselves_on_roots_cluster(plain: Cluster) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: an ordinary user's cluster is for that user")
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "srun", "id", "-u"],
        env=plain.env,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "65534\n", done.stderr


def test_a_killed_child_of_the_node_is_not_its_end(plain: Cluster) -> None:
    job = sleeper(plain, "-w", "n1")
    (task,) = [process for process in plain.processes_on("n1") if process.name == "sleep"]
    os.kill(task.pid, signal.SIGKILL)
    plain.wait_for_job(job, "FAILED")
    assert "slurmd" in tasks(plain, "n1")


@pytest.mark.parametrize("kill", [False, True])
def test_a_controller_comes_back_with_its_jobs(plain: Cluster, kill: bool) -> None:
    job = sleeper(plain)
    started = int(plain.run(["squeue", "-h", f"--jobs={job}", "--format=%S"], env={"SLURM_TIME_FORMAT": "%s"}).stdout)
    # Its state is written a few seconds after a change; a crash before that forgets the job's start.
    saved = plain.layout.state / "job_state"
    wait_until(lambda: saved.exists() and saved.stat().st_mtime >= started + 1, 20, lambda: "the state to be saved")
    plain.stop_controller(kill)
    assert "slurmctld" not in plain.status()["daemons"]
    with pytest.raises(ClusterError, match="slurmctld does not run"):
        plain.stop_controller()
    plain.start_controller()
    assert plain.job(job).state == "RUNNING"
    with pytest.raises(ClusterError, match="slurmctld runs already"):
        plain.start_controller()
    plain.run(["scancel", job])
