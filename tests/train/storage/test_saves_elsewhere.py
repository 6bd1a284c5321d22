"""A trainer's checkpoints in a store, behind a link, by way of the node's disk: saved, restored, kept, and refused."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import stoker.train.storage.local as local_module
from state_ranks import Job, blank, digests, make_entries, make_job
from stoker.launcher.run.attempts import claim
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.train.state.checkpointer import SaveFailedError
from stoker.train.state.restorer import NoValidCheckpointError
from stoker.train.storage.bucket import Bucket


@pytest.fixture
def job(run: RunDir) -> Iterator[Job]:
    claim(run)
    made = make_job(run, 1)
    yield made
    made.close()


@pytest.fixture(params=["store", "link", "disk"])
def settings(request: pytest.FixtureRequest, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    if request.param == "store":
        return {"storage": f"{request.getfixturevalue('store')}/runs"}
    if request.param == "link":
        (tmp_path / "elsewhere").mkdir()
        run.checkpoints.symlink_to(tmp_path / "elsewhere")
        return {"storage": str(tmp_path)}
    monkeypatch.setattr(local_module, "LARGE", 2**20)
    return {"local": str(tmp_path / "nvme")}


def test_what_is_saved_is_restored_and_the_oldest_goes(job: Job, run: RunDir, settings: dict) -> None:
    checkpointer = job.checkpointer(keep=2, **settings)
    for step in (10, 20, 30):
        checkpointer.save(step, make_entries(step), {"at": step})
    assert [str(n) for n in run.all_checkpoints()] == ["step-00000030-a0001", "step-00000020-a0001"]
    claim(run)
    later = make_job(run, 2)
    restored = later.checkpointer(**settings).restore(entries := blank(make_entries(1)))
    assert restored is not None
    assert (restored.name, restored.manifest.state) == (CheckpointName(30, 1), {"at": 30})
    assert digests(entries) == digests(make_entries(30))
    later.close()
    assert [e["event"] for e in job.events] == ["checkpoint_saved"] * 3


def test_a_store_that_refuses_fails_the_save_and_the_next_one_comes(
    job: Job, run: RunDir, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = job.checkpointer(storage=f"{store}/runs")
    checkpointer.save(10, make_entries(10), {})
    end = Bucket.put

    def refused(self: Bucket, key: str, data: bytes) -> None:
        if key == "index.jsonl":
            raise PermissionError(errno.EACCES, "AccessDenied", self.url(key))
        end(self, key, data)

    with monkeypatch.context() as m:
        m.setattr(Bucket, "put", refused)
        with pytest.raises(SaveFailedError) as caught:
            checkpointer.save(20, make_entries(20), {})
    at = f"{store}/runs/some-run/step-00000020-a0001/g0001-00000002.index.jsonl"
    assert str(caught.value).endswith(f": {at}: AccessDenied")
    checkpointer.save(30, make_entries(30), {})
    assert [str(n) for n in run.all_checkpoints()] == ["step-00000030-a0001", "step-00000010-a0001"]
    keys = Bucket(f"{store}/runs/some-run/").sizes()
    assert {key.partition("/")[0] for key in keys} == {"step-00000030-a0001", "step-00000010-a0001"}


def test_a_store_that_is_not_there_ends_the_run_at_its_start(job: Job, store: str) -> None:
    with pytest.raises(NoValidCheckpointError, match=r"cannot say which checkpoints there are: .*bucket"):
        job.checkpointer(storage=f"{store}-other").restore(make_entries(1))
