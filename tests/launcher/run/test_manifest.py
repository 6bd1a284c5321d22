"""What makes a directory a checkpoint, and that any damage to it is noticed. No tensor, no torch."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from stoker.launcher.run import manifest as m
from stoker.launcher.run.layout import CheckpointName, RunDir
from stoker.launcher.run.manifest import BLOCK, InvalidCheckpointError, Manifest
from stoker.launcher.run.verdict_note import VERIFIED, newest_valid, read_note
from stoker.launcher.run.verification import verify, verify_directory

SHARD = "shard-00000.safetensors"
SIDECAR = "shard-00000.crc32"
INDEX_LINE = (
    b'{"name":"w","dtype":"U8","shape":[8],'
    b'"slices":{"count":1,"file":[[0,0,1]],"at":[[64,0,1]],"start":[[[0,0,1]]],"shape":[[[8,0,1]]]}}\n'
)
STATE = {"consumed_samples": 1000, "loss": 2.345678901234567, "text": "\u00e4", "nested": {"2": [1, None, True]}}


def make(run: RunDir, step: int = 10, attempt: int = 1, shard: bytes = bytes(range(256)) * 8) -> Path:
    """A complete checkpoint. Its shard's content is of no matter here."""
    directory = run.checkpoint(CheckpointName(step, attempt))
    directory.mkdir(parents=True)
    content = {
        SHARD: shard,
        SIDECAR: m.block_checksums(shard),
        m.INDEX: INDEX_LINE,
        m.OFFSETS: struct.pack("<Q", 0),
    }
    for name, data in content.items():
        (directory / name).write_bytes(data)
    files = [m.FileEntry(SHARD, len(shard), blocks=SIDECAR)]
    files += [m.describe(name, data) for name, data in content.items() if name != SHARD]
    Manifest("run-1", step, attempt, 1, 1234.5, {"world": 2}, STATE, tuple(files)).write(directory)
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make(RunDir(tmp_path))


def test_a_complete_checkpoint_verifies_and_reads_back(checkpoint: Path) -> None:
    manifest = verify(checkpoint)
    assert (manifest.name, manifest.run, manifest.layout, manifest.state) == (
        CheckpointName(10, 1),
        "run-1",
        {"world": 2},
        STATE,
    )
    assert manifest.files[0] == m.FileEntry(SHARD, 2048, None, SIDECAR)


def test_checksums_cover_blocks_of_4_mib(tmp_path: Path) -> None:
    data = b"\0" * BLOCK + b"\0" * BLOCK + b"abc"
    # crc32 of 4 MiB of zeros, and of "abc"
    assert struct.unpack("<3I", m.block_checksums(data)) == (0x1147406A, 0x1147406A, 0x352441C2)
    assert m.block_checksums(b"") == b""
    directory = make(RunDir(tmp_path), shard=data)
    with (directory / SHARD).open("r+b") as f:
        f.seek(BLOCK + 5)
        f.write(b"\1")
    with pytest.raises(InvalidCheckpointError, match=rf"{SHARD}: block 1 \(from byte {BLOCK}\)"):
        verify(directory)


@pytest.mark.parametrize("name", [SHARD, SIDECAR, m.INDEX, m.OFFSETS])
def test_any_flipped_bit_is_noticed_and_the_file_named(checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    good = path.read_bytes()
    for at in {0, len(good) // 2, len(good) - 1}:
        for bit in range(8):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            with pytest.raises(InvalidCheckpointError, match=name) as e:
                verify(checkpoint)
            assert str(checkpoint) in str(e.value)


def test_any_flipped_bit_in_the_manifest_is_noticed_unless_it_says_the_same(checkpoint: Path) -> None:
    path = checkpoint / m.MANIFEST
    good, read = path.read_bytes(), m.read_manifest(checkpoint)
    missed = []
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        with contextlib.suppress(InvalidCheckpointError):
            if m.read_manifest(checkpoint) != read:
                missed.append(at)
    assert missed == []


def test_a_changed_number_in_the_manifest_is_noticed(checkpoint: Path) -> None:
    path = checkpoint / m.MANIFEST
    path.write_text(path.read_text().replace('"consumed_samples": 1000', '"consumed_samples": 1001'))
    with pytest.raises(InvalidCheckpointError, match=r"manifest.json: checksum does not match"):
        m.read_manifest(checkpoint)


@pytest.mark.parametrize("name", [SHARD, SIDECAR, m.INDEX, m.OFFSETS, m.MANIFEST])
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "longer"])
def test_a_missing_or_wrong_size_file_is_noticed_without_reading_shards(
    checkpoint: Path, name: str, damage: str
) -> None:
    path = checkpoint / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "longer": data + b"x"}[damage])
    with pytest.raises(InvalidCheckpointError, match=name):
        m.check_sizes(checkpoint, m.read_manifest(checkpoint))


def test_a_directory_that_was_renamed_is_refused(checkpoint: Path) -> None:
    other = checkpoint.rename(checkpoint.with_name("step-00000020-a0001"))
    with pytest.raises(InvalidCheckpointError, match="says step-00000010-a0001, but the directory is"):
        verify(other)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "stoker-checkpoint", "version": 2}', "\xff"])
def test_a_foreign_manifest_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / m.MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidCheckpointError, match=r"manifest\.json"):
        verify(checkpoint)


def test_an_empty_directory_is_an_unfinished_save(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpointError, match="the save was not finished"):
        verify(tmp_path)


@pytest.mark.parametrize("name", ["../../outside", "..", ".hidden", "a/b", ""])
def test_a_manifest_cannot_name_files_elsewhere(checkpoint: Path, name: str) -> None:
    good = m.read_manifest(checkpoint)
    replace(good, files=(*good.files, m.FileEntry(name, 1, 0))).write(checkpoint)
    with pytest.raises(InvalidCheckpointError, match="bad file entry"):
        verify(checkpoint)


def test_a_manifest_without_index_is_refused(checkpoint: Path) -> None:
    good = m.read_manifest(checkpoint)
    replace(good, files=good.files[:2]).write(checkpoint)
    with pytest.raises(InvalidCheckpointError, match=r"does not name index\.jsonl, index\.offsets"):
        verify(checkpoint)


def test_state_with_nan_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        Manifest("r", 1, 1, 1, 0.0, {}, {"loss": float("nan")}, ()).write(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [SHARD, SIDECAR])
def test_a_read_error_makes_it_invalid_names_the_file_and_is_not_noted_as_damage(
    checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread

    def broken(fd: int, size: int, at: int) -> bytes:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, size, at)

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(InvalidCheckpointError, match=rf"{name}: .*Input/output error"):
        verify(checkpoint)
    assert not verify_directory(checkpoint).is_good
    assert not (checkpoint / VERIFIED).exists()  # the next try may go well


def test_what_is_written_while_it_is_read_is_not_what_was_verified(checkpoint: Path) -> None:
    written = b"x" + (checkpoint / SHARD).read_bytes()[1:]
    assert verify_directory(checkpoint, seen=lambda _: (checkpoint / SHARD).write_bytes(written)).is_good
    assert read_note(checkpoint, m.read_manifest(checkpoint)) is None


def test_newest_valid_passes_over_what_is_damaged_and_what_is_skipped(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert list(newest_valid(run)) == []
    for step in (10, 20, 30, 40, 50):
        make(run, step)
    make(run, 30, attempt=2)
    (run.checkpoint(CheckpointName(50, 1)) / SHARD).unlink()
    (run.checkpoint(CheckpointName(40, 1)) / m.MANIFEST).unlink()
    (run.checkpoints / "step-00000060-a0001").mkdir()
    found = [str(name) for name, _ in newest_valid(run, frozenset({CheckpointName(20, 1)}))]
    assert found == ["step-00000030-a0002", "step-00000030-a0001", "step-00000010-a0001"]


def test_one_bad_file_of_many_is_named(checkpoint: Path) -> None:
    """Enough for several to be looked at at a time."""
    more = [m.describe(f"more-{number:03d}", b"x" * number) for number in range(200)]
    for number, f in enumerate(more):
        (checkpoint / f.name).write_bytes(b"x" * number)
    manifest = m.read_manifest(checkpoint)
    replace(manifest, files=(*manifest.files, *more)).write(checkpoint)
    m.check_sizes(checkpoint, m.read_manifest(checkpoint))
    (checkpoint / "more-123").write_bytes(b"x" * 122)
    with pytest.raises(InvalidCheckpointError, match="more-123: 122 bytes, expected 123"):
        m.check_sizes(checkpoint, m.read_manifest(checkpoint))


@pytest.mark.parametrize(
    "change",
    [
        {"step": None}, {"attempt": [1]}, {"time": "now"}, {"time": -1}, {"state": []}, {"layout": 1}, {"run": {}},
        {"files": [{"name": "a\x00", "size": 1, "crc32": 1, "blocks": None}]},
        {"files": [{"name": "a\ud800", "size": 1, "crc32": 1, "blocks": None}]},
        {"files": [{"name": "a", "size": 1.5, "crc32": 1, "blocks": None}]},
        {"files": [{"name": "a", "size": 2**63, "crc32": 1, "blocks": None}]},
        {"files": [{"name": "a", "size": 1, "crc32": None, "blocks": []}]},
    ],
)  # fmt: skip
def test_fields_of_other_types_are_damage_even_with_a_right_checksum(
    checkpoint: Path, change: dict[str, object]
) -> None:
    path = checkpoint / m.MANIFEST
    raw = json.loads(path.read_bytes()) | change
    body = {k: v for k, v in raw.items() if k not in ("format", "version", "crc32")}
    path.write_text(json.dumps(raw | {"crc32": m._digest(body)}))
    with pytest.raises(InvalidCheckpointError, match=r"manifest\.json: (fields of other|bad file)"):
        verify(checkpoint)


@pytest.mark.parametrize(("far", "names"), [(0.0, {"MainThread", "sizes_0"}), (1e9, {"MainThread"})])
def test_many_files_get_threads_where_each_takes_long(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, far: float, names: set[str]
) -> None:
    found = set()
    check = m._check_file

    def watched(directory: Path, f: m.FileEntry) -> None:
        found.add(threading.current_thread().name)
        check(directory, f)

    monkeypatch.setattr(m, "_check_file", watched)
    monkeypatch.setattr(m, "_SOME", 2)
    monkeypatch.setattr(m, "_AT_ONCE", 1)
    monkeypatch.setattr(m, "_FAR", far)
    m.check_sizes(checkpoint, m.read_manifest(checkpoint))
    assert found == names
    os.truncate(checkpoint / m.OFFSETS, 3)  # the last of the files
    with pytest.raises(InvalidCheckpointError, match=r"index\.offsets: 3 bytes, expected 8"):
        m.check_sizes(checkpoint, m.read_manifest(checkpoint))
