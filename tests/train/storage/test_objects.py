"""Checkpoints in an object store: a real server of the S3 protocol holds the bytes, the run directory the manifest."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import stoker.train.storage.bucket as bucket_module
import stoker.train.storage.objects as objects_module
from checkpoint_bytes import SHARD, SIDECAR, begin, fill, put, save
from stoker.conf.schema import CheckpointConfig
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.manifest import MANIFEST, InvalidCheckpointError, read_manifest
from stoker.launcher.run.verdict_note import newest_valid
from stoker.launcher.run.verification import verify
from stoker.train.state.reader import Range, VerifiedReader
from stoker.train.storage.base import Shelf
from stoker.train.storage.bucket import Bucket
from stoker.train.storage.choice import shelf_of

MIB = 2**20
TEN = CheckpointName(10, 1)


@pytest.fixture
def shelf(run: RunDir, store: str) -> Shelf:
    return shelf_of(run, CheckpointConfig(storage=f"{store}/runs"))


@pytest.fixture
def bucket(store: str) -> Bucket:
    """What the run has there."""
    return Bucket(f"{store}/runs/some-run/")


def files_of(run: RunDir) -> list[str]:
    return sorted(str(p.relative_to(run.checkpoints)) for p in run.checkpoints.rglob("*") if p.is_file())


def read(shelf: Shelf, name: CheckpointName, at: int, size: int) -> bytes:
    into = bytearray(size)
    VerifiedReader(shelf.source(name), shelf.manifest(name)).read([Range(SHARD, at, size, memoryview(into))])
    return bytes(into)


def test_a_saved_checkpoint_is_read_back_and_found_by_tools_without_a_client(
    run: RunDir, shelf: Shelf, bucket: Bucket
) -> None:
    shard = os.urandom(9 * MIB + 5)
    save(shelf, 10, shard)
    at = "step-00000010-a0001/g0001-00000001."
    assert sorted(bucket.sizes()) == sorted(
        f"{at}{name}" for name in ("index.jsonl", "index.offsets", "manifest.json", SIDECAR, SHARD)
    )
    assert files_of(run) == ["step-00000010-a0001/manifest.json"]
    assert shelf.names() == [TEN]
    manifest = shelf.manifest(TEN)
    assert manifest.location == bucket.url(at)
    assert read(shelf, TEN, 3 * MIB, 5 * MIB) == shard[3 * MIB : 8 * MIB]
    assert verify(run.checkpoint(TEN)) == read_manifest(run.checkpoint(TEN)) == manifest
    assert [name for name, _ in newest_valid(run)] == [TEN]
    assert json.loads(bucket.get(f"{at}{MANIFEST}")) == json.loads((run.checkpoint(TEN) / MANIFEST).read_bytes())


def test_a_large_file_goes_in_parts_as_it_comes(shelf: Shelf, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "_PART", 5 * MIB)
    parts: list[tuple[int, int]] = []
    send = Bucket.upload_part

    def watched(self: Bucket, key: str, upload: str, number: int, data: bytes) -> dict[str, object]:
        parts.append((number, len(data)))
        return send(self, key, upload, number, data)

    monkeypatch.setattr(Bucket, "upload_part", watched)
    data = os.urandom(12 * MIB)
    target = begin(shelf, 10)
    sink = target.create(SHARD, len(data))
    for at in range(0, len(data), 3 * MIB):
        wave = bytearray(data[at : at + 3 * MIB])
        sink.write(memoryview(wave))
        wave[:] = bytes(len(wave))  # its memory is used again
    assert bucket.sizes() == {}  # nobody sees half of it
    sink.finish()
    assert sorted(parts) == [(1, 5 * MIB), (2, 5 * MIB), (3, 2 * MIB)]
    assert target.read(SHARD) == data
    assert bucket.uploads() == []


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_abandoned_save_leaves_nothing(
    run: RunDir, shelf: Shelf, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    monkeypatch.setattr(objects_module, "_PART", 5 * MIB)
    target = begin(shelf, 10)
    fill(target, 10, b"y" * 1000)
    if is_begun:
        sink = target.create("shard-00001.safetensors", 11 * MIB)
        sink.write(memoryview(bytes(6 * MIB)))
        assert len(bucket.uploads()) == 1
        sink.abort()
        sink.abort()
    target.discard()
    assert (bucket.sizes(), bucket.uploads()) == ({}, [])
    assert not run.checkpoints.exists() or files_of(run) == []


class Superseded(Exception):
    pass


def refuse() -> None:
    raise Superseded


def test_the_last_check_decides_before_anything_is_seen(run: RunDir, shelf: Shelf) -> None:
    with pytest.raises(Superseded):
        save(shelf, 10, last=refuse)
    assert shelf.names() == []
    assert list(run.all_checkpoints()) == []


def test_what_earlier_attempts_left_is_swept_and_what_they_finished_is_taken_up(
    run: RunDir, shelf: Shelf, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "_PART", 5 * MIB)
    save(shelf, 5)
    unfinished = begin(shelf, 10)
    fill(unfinished, 10, b"half")
    unfinished.create("shard-00001.safetensors", 11 * MIB)  # its writer dies
    with pytest.raises(Superseded):
        save(shelf, 15, last=refuse, save=2)  # dies between the manifest and its copy
    other = begin(shelf, 20, attempt=2)
    put(other, SHARD, b"of this attempt")
    shelf.sweep(2)
    assert bucket.uploads() == []
    assert [str(n) for n in shelf.names()] == ["step-00000015-a0001", "step-00000005-a0001"]
    for name in shelf.names():
        shelf.manifest(name)
    left = {key.partition("/")[0] for key in bucket.sizes()}
    assert left == {"step-00000005-a0001", "step-00000015-a0001", "step-00000020-a0002"}
    shelf.sweep(2, "g0001-00000002")  # of this attempt, what its first save left
    assert {key.partition("/")[0] for key in bucket.sizes()} == {"step-00000005-a0001", "step-00000015-a0001"}


def test_a_writer_that_wakes_up_late_does_not_take_away_what_was_taken_up(shelf: Shelf, bucket: Bucket) -> None:
    old = begin(shelf, 10)
    with pytest.raises(Superseded):
        old.publish(fill(old, 10, b"whole"), refuse)  # frozen there, while attempt 2 begins
    shelf.sweep(2)
    assert shelf.names() == [TEN]
    old.discard()
    shelf.manifest(TEN)
    assert read(shelf, TEN, 0, 5) == b"whole"


def test_removal_takes_the_objects_too_and_is_done_later_if_the_store_refuses(
    run: RunDir, shelf: Shelf, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        save(shelf, step)
    shelf.remove(TEN)
    assert {key.partition("/")[0] for key in bucket.sizes()} == {"step-00000020-a0001"}

    def refused(self: Bucket, keys: list[str]) -> None:
        raise PermissionError(13, "AccessDenied", keys[0])

    with monkeypatch.context() as m:
        m.setattr(Bucket, "delete", refused)
        shelf.remove(CheckpointName(20, 1))
    assert shelf.names() == []
    assert len(bucket.sizes()) == 5
    shelf.sweep(1)
    assert bucket.sizes() == {}
    assert list(run.checkpoints.iterdir()) == []


def test_a_store_that_deletes_one_by_one_only(shelf: Shelf, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    save(shelf, 10)

    def unknown(self: Bucket, keys: list[str]) -> None:
        raise OSError(5, "NotImplemented", keys[0])

    monkeypatch.setattr(Bucket, "_delete_together", unknown)
    shelf.remove(TEN)
    assert bucket.sizes() == {}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("missing", f"{SHARD}: None bytes, expected 1000"),
        ("short", f"{SHARD}: 10 bytes, expected 1000"),
        ("sidecar", f"{SIDECAR}: checksum does not match"),
    ],
)
def test_damage_in_the_store_is_seen_at_the_small_files(shelf: Shelf, bucket: Bucket, damage: str, said: str) -> None:
    save(shelf, 10)
    at = "step-00000010-a0001/g0001-00000001."
    if damage == "missing":
        bucket.delete([at + SHARD])
    elif damage == "short":
        bucket.put(at + SHARD, b"0123456789")
    else:
        bucket.put(at + SIDECAR, b"four")
    with pytest.raises(InvalidCheckpointError, match=said):
        shelf.manifest(TEN)


def test_a_changed_block_is_not_read(shelf: Shelf, bucket: Bucket) -> None:
    save(shelf, 10)
    bucket.put(f"step-00000010-a0001/g0001-00000001.{SHARD}", b"x" * 999 + b"y")
    with pytest.raises(InvalidCheckpointError, match=r"block 0 .* does not match"):
        read(shelf, TEN, 0, 10)


def test_a_shard_that_is_not_whole_is_not_published(run: RunDir, shelf: Shelf) -> None:
    target = begin(shelf, 10)
    manifest = fill(target, 10, b"z" * 100)
    put(target, SHARD, b"z" * 99)
    with pytest.raises(OSError, match="99 bytes, expected 100"):
        target.publish(manifest)
    assert shelf.names() == []


def test_a_bucket_that_is_not_there_is_said_at_the_start(run: RunDir, store: str) -> None:
    shelf = shelf_of(run, CheckpointConfig(storage=f"{store}-other"))
    with pytest.raises(OSError, match=r"bucket") as caught:
        shelf.names()
    assert caught.value.strerror
    assert str(caught.value.filename).startswith(f"{store}-other/some-run/")


def test_a_store_that_nobody_serves_is_an_error_with_its_name(
    run: RunDir, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    bucket_module._connection.cache_clear()
    try:
        with pytest.raises(OSError, match=r"127\.0\.0\.1:9") as caught:
            save(shelf_of(run, CheckpointConfig(storage=f"{store}/x")), 10)
        assert str(caught.value.filename).startswith(f"{store}/x/some-run/step-00000010-a0001/")
    finally:
        bucket_module._connection.cache_clear()


def test_no_key_is_written_anywhere(run: RunDir, shelf: Shelf, bucket: Bucket, tmp_path: Path) -> None:
    save(shelf, 10)
    texts = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()] + [bucket.get(k) for k in bucket.sizes()]
    assert not any(b"testing-secret" in text for text in texts)


def test_a_run_that_moved_to_a_store_still_has_its_directories(run: RunDir, shelf: Shelf) -> None:
    save(shelf_of(run, CheckpointConfig()), 10, b"a" * 10)
    save(shelf, 20, b"b" * 10)
    back = shelf_of(run, CheckpointConfig())
    for of in (shelf, back):
        assert [str(n) for n in of.names()] == ["step-00000020-a0001", "step-00000010-a0001"]
        for name, expected in zip(of.names(), (b"b" * 10, b"a" * 10), strict=True):
            assert read(of, name, 0, 10) == expected


def test_the_client_is_made_after_a_fork(shelf: Shelf) -> None:
    save(shelf, 10)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            save(shelf, 20)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(shelf.names()) == 2
