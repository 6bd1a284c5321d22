"""What the watch finds, as a table over facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from stoker.launcher.run.outcome import Cause, Next, Outcome
from stoker.launcher.slurm import QueuedJob
from stoker.launcher.state import RunState, State
from stoker.launcher.watch_checks import Facts, Fix, findings

RUNNING = RunState(State.RUNNING)
INTERRUPTED = RunState(State.INTERRUPTED, "after preempted, it was not started again", 1)
FAILED = RunState(State.FAILED, "job 7 is no longer known to Slurm and nothing says why", 1)


def job(state: str, reason: str = "None") -> QueuedJob:
    return QueuedJob("7", state, "1:00:00", "n1", reason, "/w", "")


WELL = Facts("run", RUNNING, 1, job=job("RUNNING"), attempts=1, silent=20.0, stalled=20.0, free=0.5, free_bytes=10**12)


def outcome(cause: Cause, then: Next = Next.NOTHING) -> Outcome:
    return Outcome(cause, then, 1, "its reason", time=0.0)


def test_a_run_that_is_well_has_no_finding() -> None:
    assert findings(WELL) == []
    assert findings(replace(WELL, state=RunState(State.FINISHED, "", 0), job=None)) == []


HELD = RunState(State.HELD, "`scontrol release 7` lets it go on")
CASES: dict[str, tuple[dict[str, Any], str, Fix | None, str]] = {
    "held by Slurm": (
        {"state": HELD, "job": job("PENDING", "launch_failed_requeued_held")},
        "held",
        Fix.RELEASE,
        "Slurm holds job 7: launch_failed_requeued_held",
    ),
    "held by Slurm, as newer versions write it": (
        {"state": HELD, "job": job("PENDING", "launch failed requeued held")},
        "held",
        Fix.RELEASE,
        "Slurm holds job 7",
    ),
    "held by Slurm again and again": (
        {"state": HELD, "job": job("PENDING", "launch_failed_requeued_held"), "releases": 3},
        "held",
        None,
        "held again after 3 releases",
    ),
    "held by a person": (
        {"state": HELD, "job": job("PENDING", "JobHeldUser")},
        "held",
        None,
        "job 7 is held, not by Slurm's own doing",
    ),
    "interrupted": ({"state": INTERRUPTED, "job": None}, "lost", Fix.RESUME, "was not started again"),
    "gone without a word": ({"state": FAILED, "job": None}, "lost", Fix.RESUME, "no longer known to Slurm"),
    "not requeued at the time limit": (
        {"state": FAILED, "job": None, "outcome": outcome(Cause.TIME_LIMIT)},
        "lost",
        Fix.RESUME,
        "time_limit: its reason",
    ),
    "killed for memory": ({"state": FAILED, "job": job("OUT_OF_MEMORY")}, "lost", None, "no longer known"),
    "interrupted where nothing is to continue": (
        {"state": INTERRUPTED, "continuation": "none"},
        "lost",
        None,
        "resilience.continuation=none",
    ),
    "resumed too often": ({"state": INTERRUPTED, "resumes": 3}, "lost", None, "resumed 3 times by the watch"),
    "ended as headless, and then nobody resumed it": (
        {"state": RunState(State.CANCELLED, "by scancel", 143), "was_replaced": True},
        "lost",
        Fix.RESUME,
        "did nothing and was ended",
    ),
    "submitting broke off": (
        {"state": RunState(State.UNKNOWN), "job": None, "has_job": False, "waiting": 4000.0},
        "lost",
        None,
        "did not come to a job",
    ),
    "headless": (
        {"silent": 301.0, "node_states": "n1 down*"},
        "headless",
        Fix.REPLACE,
        "job 7 is RUNNING, but nothing of it has reported for 5 min (nodes: n1 down*)",
    ),
    "never reported": ({"silent": None, "starting": 4000.0}, "headless", None, "its supervisor has not reported"),
    "chain without a next job": (
        {"continuation": "chain", "has_successor": False},
        "chain",
        None,
        "no next job waits",
    ),
    "can never start": (
        {"state": RunState(State.PENDING), "job": job("PENDING", "PartitionTimeLimit"), "waiting": 10.0},
        "pending",
        None,
        "cannot start: PartitionTimeLimit (its time is above the partition's limit)",
    ),
    "waits for what cannot happen": (
        {"state": RunState(State.PENDING), "job": job("PENDING", "DependencyNeverSatisfied")},
        "pending",
        None,
        "can no longer happen",
    ),
    "above a limit per job": (
        {"state": RunState(State.PENDING), "job": job("PENDING", "QOSMaxNodePerJobLimit")},
        "pending",
        None,
        "one job alone is above the limit",
    ),
    "nodes are down": (
        {"state": RunState(State.REQUEUED), "job": job("PENDING", "ReqNodeNotAvail, UnAvailableNodes:n2")}
        | {"waiting": 4000.0},
        "pending",
        None,
        "job 7 waits for 67 min: ReqNodeNotAvail, UnAvailableNodes:n2 (nodes that it asks for are down",
    ),
    "waits for days": (
        {"state": RunState(State.PENDING), "job": job("PENDING", "Priority"), "waiting": 90000.0},
        "pending",
        None,
        "waits for 25 h: Priority",
    ),
    "no step": ({"stalled": 3700.0}, "stalled", None, "no step for 62 min"),
    "starts without end": ({"fruitless": 3}, "fruitless", None, "3 attempts in a row made no step"),
    "events warn": ({"alerts": ("checkpoint_failed: disk full",)}, "alert", None, "checkpoint_failed: disk full"),
    "no room for a checkpoint": (
        {"checkpoint_bytes": 6 * 10**11},
        "disk",
        None,
        "1000.0 GB free for checkpoints; a checkpoint takes 600.0 GB",
    ),
    "disk nearly full": ({"free": 0.02}, "disk", None, "(2.0 %)"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_found_once(case: str) -> None:
    changes, check, fix, text = CASES[case]
    found = findings(replace(WELL, **changes))
    assert [(f.check, f.fix) for f in found] == [(check, fix)]
    assert text in found[0].text


QUIET: dict[str, dict[str, Any]] = {
    "a cancelled run": {"state": RunState(State.CANCELLED, "by scancel", 143), "job": None},
    "a cancelled run whose job was lost": {"state": INTERRUPTED, "is_cancelled": True},
    "a run on this machine": {"state": INTERRUPTED, "mode": "local"},
    "Slurm does not answer": {"state": RunState(State.UNKNOWN, "no answer"), "queue_known": False, "job": None},
    "a crash is for a person to see": {"state": FAILED, "outcome": outcome(Cause.CRASH), "job": None},
    "waits its turn": {"state": RunState(State.PENDING), "job": job("PENDING", "Priority"), "waiting": 3600.0},
    "nodes are down for a moment": {
        "state": RunState(State.REQUEUED),
        "job": job("PENDING", "ReqNodeNotAvail,_UnavailableNodes:n2"),
        "waiting": 30.0,
    },
    "a user's limit over all jobs": {
        "state": RunState(State.PENDING),
        "job": job("PENDING", "QOSMaxJobsPerUserLimit"),
    },
    "is being submitted": {"state": RunState(State.UNKNOWN), "job": None, "has_job": False, "waiting": 60.0},
    "is being set up": {"silent": None, "starting": 600.0, "stalled": None},
    "one bad start": {"fruitless": 1},
    "chain with a next job": {"continuation": "chain", "has_successor": True},
    "chain, nobody can tell": {"continuation": "chain", "has_successor": None},
    "suspended by Slurm": {"state": RunState(State.SUSPENDED), "job": job("SUSPENDED"), "silent": None},
}


@pytest.mark.parametrize("case", QUIET)
def test_what_is_well_or_nobody_s_business_is_not_told(case: str) -> None:
    assert findings(replace(WELL, **QUIET[case])) == []
