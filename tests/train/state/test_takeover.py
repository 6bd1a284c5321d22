"""Writers that die or are frozen in the middle, and the attempt that comes after them."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from state_ranks import Crew, Job, digests, make_entries, make_job
from stoker.launcher.run.attempts import SupersededError, claim
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.verification import verify


def save(job: Job, step: int, seed: int) -> str:
    return str(job.checkpointer().save(step, job.entries(seed), {}))


def save_in_haste(job: Job, step: int, seed: int) -> None:
    """Clears nothing away."""
    checkpointer = job.checkpointer()
    checkpointer.begin(step, job.entries(seed), {}, prune=False)
    checkpointer.finish()


def resume(job: Job, step: int, seed: int) -> Any:
    """A later attempt: restores, trains, saves, cleans up."""
    checkpointer, entries = job.checkpointer(), make_entries(0)
    restored = checkpointer.restore(entries)
    found = digests(entries)
    checkpointer.save(step, job.entries(seed), {})
    return [str(restored.name), found]


def names(run: RunDir) -> list[str]:
    return sorted(p.name for p in run.checkpoints.iterdir())


def verify_all(run: RunDir) -> None:
    for name in run.all_checkpoints():
        verify(run.checkpoint(name))


@pytest.mark.parametrize(
    ("point", "killed"),
    [
        ("checkpoint.write@rank=0@step=20:kill", 0),
        ("checkpoint.write@rank=1@step=20:kill", 1),
        ("checkpoint.manifest@step=20:kill", 0),
        ("checkpoint.publish@step=20:kill", 0),
    ],
)
def test_a_writer_killed_anywhere_costs_only_its_own_checkpoint(
    crew: Crew, run: RunDir, point: str, killed: int
) -> None:
    crew.run(save, run, 2, step=10, seed=1)
    ranks = crew.start(save, run, 2, fail=point, step=20, seed=2)
    assert ranks[killed].code() == -9
    assert ranks[1 - killed].result().raised == "PeerLostError"
    assert names(run)[1:] == ["step-00000010-a0001"] or names(run) == ["step-00000010-a0001"]
    claim(run)
    for result in crew.run(resume, run, 2, attempt=2, step=20, seed=2):
        assert result.value == ["step-00000010-a0001", digests(make_entries(1))], result.text
    assert names(run) == ["step-00000010-a0001", "step-00000020-a0002"]
    verify_all(run)


def test_a_writer_frozen_before_its_rename_finds_its_directory_gone(crew: Crew, run: RunDir) -> None:
    crew.run(save, run, 2, step=10, seed=1)
    old = crew.start(save, run, 2, fail="checkpoint.publish@attempt=1:freeze", step=20, seed=2)
    old[0].wait_frozen()
    claim(run)
    for result in crew.run(resume, run, 2, attempt=2, step=20, seed=3):
        assert result.raised is None, result.text
    old[0].thaw()
    for rank in old:
        result = rank.result()
        assert (result.raised, result.events) == ("SupersededError", [])
    assert names(run) == ["step-00000010-a0001", "step-00000020-a0002"]
    verify_all(run)
    restored = make_job(run, 2).checkpointer().restore(entries := make_entries(0))
    assert restored is not None
    assert digests(entries) == digests(make_entries(3))


def test_a_writer_frozen_before_its_rename_publishes_at_most_under_its_own_name(crew: Crew, run: RunDir) -> None:
    old = crew.start(save, run, 2, fail="checkpoint.publish@attempt=1:freeze", step=20, seed=2)
    old[0].wait_frozen()
    claim(run)
    # The new attempt saves, but has not cleared anything away yet.
    for result in crew.run(save_in_haste, run, 2, attempt=2, step=20, seed=3):
        assert result.raised is None, result.text
    old[0].thaw()
    assert [rank.result().raised for rank in old] == ["SupersededError"] * 2
    assert names(run) == ["step-00000020-a0001", "step-00000020-a0002"]
    verify_all(run)
    restored = make_job(run, 2).checkpointer().restore(make_entries(0))
    assert restored is not None
    assert restored.name == CheckpointName(20, 2)


def test_a_writer_that_is_superseded_while_it_writes_does_not_publish(crew: Crew, run: RunDir) -> None:
    old = crew.start(save, run, 2, fail="checkpoint.manifest:freeze", step=20, seed=2)
    old[0].wait_frozen()
    claim(run)
    old[0].thaw()
    assert [rank.result().raised for rank in old] == ["SupersededError"] * 2
    assert names(run) == []


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_writer_frozen_in_the_middle_of_its_file_does_no_harm(crew: Crew, run: RunDir, frozen: int) -> None:
    crew.run(save, run, 2, step=10, seed=1)
    old = crew.start(save, run, 2, fail=f"checkpoint.write@rank={frozen}:freeze", step=20, seed=2)
    old[frozen].wait_frozen()
    claim(run)
    for result in crew.run(resume, run, 2, attempt=2, step=20, seed=3):
        assert result.raised is None, result.text
    old[frozen].thaw()
    assert {rank.result().raised for rank in old} <= {"SupersededError", "SaveFailedError"}
    assert names(run) == ["step-00000010-a0001", "step-00000020-a0002"]
    verify_all(run)


def test_a_superseded_attempt_writes_nothing(crew: Crew, run: RunDir) -> None:
    claim(run)
    assert [r.raised for r in crew.run(save, run, 2, step=10, seed=1)] == ["SupersededError"] * 2
    assert not run.checkpoints.exists()


def test_a_superseded_attempt_removes_nothing(run: RunDir) -> None:
    for step in (10, 20, 30):
        make_job(run, 1).checkpointer(keep=3).save(step, make_entries(0), {})
    claim(run)
    checkpointer = make_job(run, 1).checkpointer(keep=1)
    with pytest.raises(SupersededError):
        checkpointer.save(40, make_entries(0), {})
    assert len(names(run)) == 3


def test_leftovers_of_older_attempts_go_and_nothing_else_does(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        claim(run)
    stay = [
        ".tmp-step-00000020-a0002-g0001-0123abcd",  # this attempt's own
        ".tmp-step-00000020-a0003-g0001-0123abcd",
        ".tmp-other",
        ".tmp-step-00000020-a0001",
        "step-00000005-a0001.old",
        "mine",
    ]
    go = [
        ".tmp-step-00000020-a0001-g0001-0123abcd",
        ".tmp-step-123456789-a0001-g0012-0123abcd",
        ".tmp-deleting-step-00000010-a0001-0123abcd",
    ]
    for name in stay + go:
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "file").touch()
    deleted = []
    original = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **rest: (deleted.append(path.name), original(path, **rest)))
    make_job(run, 2).checkpointer().restore(make_entries(0))
    assert names(run) == sorted(stay)
    # Taken away in one rename first: its writer may be alive, and must not publish a half of it.
    assert len(deleted) == 3
    assert all(name.startswith(".tmp-deleting-") for name in deleted)
