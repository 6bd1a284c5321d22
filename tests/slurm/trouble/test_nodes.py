"""Nodes without scontrol, and nodes whose clocks are off."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher import jobinfo
from stoker.launcher.rehearsal.trial import wait_for
from stoker.launcher.run.outcome import Cause, Next
from stoker.launcher.run.submissions import submissions

pytestmark = pytest.mark.slurm

# Shifts what a program takes for the time of day by the seconds in /tmp/skew, which is each node's own. (libfaketime
# 0.9.10 breaks Python's time.sleep.)
SKEW = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long skew;
__attribute__((constructor)) static void load(void) {
    FILE *f = fopen("/tmp/skew", "r");
    if (f) { if (fscanf(f, "%ld", &skew) != 1) skew = 0; fclose(f); }
}
int clock_gettime(clockid_t id, struct timespec *t) {
    int failed = syscall(SYS_clock_gettime, id, t);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += skew;
    return failed;
}
time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}
int gettimeofday(struct timeval *restrict v, void *restrict zone) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    v->tv_sec = t.tv_sec;
    v->tv_usec = t.tv_nsec / 1000;
    return 0;
}
"""


def watch(lab: Any, *argv: str) -> str:
    command = [*lab.argv("watch"), "--once", *argv]
    return str(lab.cluster.run(command, cwd=lab.root, check=False, timeout=120).stdout)


def test_without_scontrol_what_can_be_done_is_done_and_the_rest_is_told_at_once(
    lab: Any, same: Callable[..., None]
) -> None:
    nodes = lab.cluster.nodes()
    scontrol = lab.cluster.enter(nodes[0], ["which", "scontrol"]).stdout.strip()
    for node in nodes:
        assert lab.cluster.enter(node, ["mount", "--bind", "/dev/null", scontrol]).returncode == 0
    try:
        apart = {
            "warned": f"cluster.nodelist='{nodes[0]},{nodes[1]}'",
            "power": f"cluster.exclude='{nodes[0]},{nodes[1]}'",
        }
        with ThreadPoolExecutor(2) as pool:
            pause = "step@attempt=1:pause-300"
            warned, power = pool.map(lambda name: lab.launch(name, apart[name], failpoints=pause), apart)
        warned.wait_step(5)
        (event,) = warned.events("no_scontrol")
        assert "cannot be requeued from inside" in event["consequence"]
        assert "no_scontrol: this job cannot be requeued" in watch(lab, str(warned.dir.path))
        lab.cluster.run(["scancel", "--batch", "--signal=USR1", warned.job_id])
        power.wait_step(5)
        victim = power.nodes()[1]
        lab.cluster.crash(victim)
        first = warned.wait_outcome(1)
        assert (first.cause, first.next, first.saved_step) == (Cause.TIME_LIMIT, Next.NOTHING, first.step)
        assert "not requeued: scontrol is not installed on this node" in first.reason
        # Slurm's own requeue needs nothing from us.
        assert power.wait_end().cause is Cause.FINISHED, power.story()
        assert len(submissions(power.dir)) == 1
        same(power)
        lab.cluster.restart_node(victim)
        # From a host that has the commands, the watch goes on with the other.
        wait_for(lambda: warned.job_id not in lab.queue(), lambda: lab.queue())
        assert "-> resumed: " in watch(lab, "--fix", str(warned.dir.path))
        wait_for(lambda: len(warned.dir.all_attempts()) == 2, lambda: warned.story())
        assert warned.wait_end().cause is Cause.FINISHED, warned.story()
        assert len(submissions(warned.dir)) == 2
        same(warned)
    finally:
        for node in nodes:
            lab.cluster.enter(node, ["umount", scontrol])


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for the skewed clock")
def test_clocks_that_are_off_move_no_deadline(lab: Any, same: Callable[..., None], tmp_path: Path) -> None:
    """The batch host is 90 s ahead of the controller, the other node 90 s behind."""
    library = tmp_path / "skew.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-xc", "-", "-o", str(library)]
    subprocess.run(command, input=SKEW, text=True, check=True, timeout=60)
    ahead, behind = lab.cluster.nodes()[:2]
    for node, skew in ((ahead, "+90"), (behind, "-90")):
        assert lab.cluster.enter(node, ["sh", "-c", f"echo '{skew}' > /tmp/skew"]).returncode == 0
    where = f"cluster.nodelist='{ahead},{behind}'"
    # Two minutes: by the batch host's own clock 30 s would be left at the start, half of the warning's lead.
    run = lab.launch(
        "skewed",
        where,
        f"cluster.env={{LD_PRELOAD: '{library}'}}",
        "cluster.time=2",
        failpoints="step@attempt=1:pause-300",
    )
    run.wait_step(5)
    lab.cluster.run(["scancel", "--batch", "--signal=USR1", run.job_id])
    wait_for(lambda: run.events("warned"), lambda: run.story())
    said = run.events("warned")[0]["seconds_left"]
    started = run.events("attempt_started")[0]
    (path,) = (run.dir.attempt(1).path / "events").glob("supervisor.jsonl")
    assert abs(started["time"] - 90.0 - path.stat().st_ctime) < 60.0  # the clock really is off
    info = jobinfo.parse(lab.cluster.run(["scontrol", "show", "job", run.job_id], env={"TZ": "UTC0"}).stdout)
    begun = info.time("StartTime")
    assert begun is not None
    left = begun + 120.0 - time.time()
    assert said == pytest.approx(left, abs=15.0), (said, left, run.story())
    assert run.wait_end().cause is Cause.FINISHED, run.story()
    first = run.outcomes()[0]
    assert first is not None
    assert (first.cause, first.saved_step) == (Cause.TIME_LIMIT, first.step)
    same(run)
