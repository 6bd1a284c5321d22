"""Reading what Slurm's commands print."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.launcher.slurm import Reply, is_sure_refusal, parse_job_id, parse_squeue, squeue


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("123\n", ("123", None)),
        ("123;alpha\n", ("123", "alpha")),
        ("*** Welcome to the cluster ***\nMaintenance on 2026-12-01!\n4711\nsee https://example.org\n", ("4711", None)),
        ("Submitted batch job 99\n", ("99", None)),
        ("Submitted batch job 99 on cluster beta\n", ("99", "beta")),
        ("2026\n4711\n", None),  # a banner of digits only: not to be guessed
        ("4711\n4711\n", ("4711", None)),
        ("job 12 accepted\n", None),
        ("", None),
    ],
)
def test_job_id_is_found_among_banners(text: str, expected: tuple[str, str | None] | None) -> None:
    assert parse_job_id(text) == expected


def test_squeue_rows_and_noise() -> None:
    row = "\x1f".join(["12_3", "PENDING", "0:00", "", "(Resources) x", "/a b|c", "mine stoker:ab", "/a b|c/s x"])
    (job,) = parse_squeue(f"CLUSTER: alpha\n{row}\n\nslurm_load_jobs: warning\n")
    assert (job.job_id, job.state, job.nodes, job.reason) == ("12_3", "PENDING", "", "(Resources) x")
    assert (job.workdir, job.comment) == ("/a b|c", "mine stoker:ab")
    assert job.carries("ab")
    assert job.starts(Path("/a b|c/s"))
    assert not job.starts(Path("/a b|c"))


@pytest.mark.parametrize(
    ("state", "is_over"),
    [("COMPLETED", True), ("TIMEOUT", True), ("NODE_FAIL", True), ("SUSPENDED", False), ("CONFIGURING", False),
     ("COMPLETING", False), ("REQUEUE_HOLD", False), ("REQUEUED", False), ("A_NEW_STATE", False)],
)  # fmt: skip
def test_only_known_ends_are_ends(state: str, is_over: bool) -> None:
    (job,) = parse_squeue("\x1f".join(["1", state, "", "", "", "", "", ""]))
    assert job.is_over is is_over


@pytest.mark.parametrize(
    ("reply", "is_sure"),
    [
        (Reply(1, "", "sbatch: error: Batch job submission failed: Invalid account"), True),
        (Reply(1, "", "sbatch: error: invalid partition specified: nope"), True),
        (Reply(1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"), False),
        (Reply(1, "", "sbatch: error: Unable to contact slurm controller (connect failure)"), False),
        (Reply(None, "", ""), False),
        (Reply(-9, "", ""), False),
    ],
)  # fmt: skip
def test_only_a_clear_refusal_is_one(reply: Reply, is_sure: bool) -> None:
    assert is_sure_refusal(reply) is is_sure


def test_no_slurm_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert squeue(["1"]) is None
    assert squeue([]) == []
