"""Reading wandb's log files: pieces over block borders, torn and damaged ends, who still writes, notes."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from stoker.launcher.track_log import (
    cut_torn_end,
    last_step,
    log_files,
    recorded_step,
    records,
    wait_for_writers,
    wait_until_unchanged,
    writers,
)
from stoker.launcher.track_notes import Notes
from stoker.launcher.track_process import ends_within

BLOCK = 32768
HEADER = b":W&B\xe1\xbe\x00"


def written(payloads: list[bytes]) -> bytes:
    """A log file as wandb's service writes one, after LevelDB's description of the format."""
    data = bytearray(HEADER)
    for payload in payloads:
        is_first = True
        while True:
            left = BLOCK - len(data) % BLOCK
            if left < 7:
                data += b"\0" * left
                left = BLOCK
            part, payload = payload[: left - 7], payload[left - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[is_first, not payload]
            data += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            is_first = False
            if not payload:
                break
    return bytes(data)


def step_of(payload: bytes) -> int | None:
    return int(payload[1:5]) if payload[:1] == b"h" else None


def rows(first: int, last: int, size: int = 700) -> list[bytes]:
    """Two records per step, one of them of a step."""
    steps = range(first, last + 1)
    return [payload for n in steps for payload in (b"s" * size, b"h%04d" % n + b"." * (size - 5))]


@pytest.mark.parametrize("size", [5, 700, 4000, 32754, 32755, 32761, 40000, 100000])
def test_records_of_every_size_are_read_back(size: int) -> None:
    payloads = [bytes([65 + n]) * size for n in range(9)]
    data = written(payloads)
    found = list(records(data))
    assert [payload for _, payload in found] == payloads
    assert found[-1][0] == len(data)


def test_a_torn_record_is_not_read_wherever_it_is_cut() -> None:
    whole = len(written(rows(1, 3, 40)))
    data = written(rows(1, 4, 40))
    for end in range(whole, len(data)):
        assert max(step for _, p in records(data[:end]) if (step := step_of(p)) is not None) == 3


def test_a_damaged_record_hides_only_the_rest_of_its_block(tmp_path: Path) -> None:
    data = bytearray(written(rows(1, 200)))
    data[BLOCK + 2000] ^= 1
    steps = [step for _, p in records(bytes(data)) if (step := step_of(p)) is not None]
    assert steps[0] == 1
    assert steps[-1] == 200
    assert 150 < len(steps) < 200


def test_the_last_step_of_a_long_file_is_found_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "run.wandb"
    path.write_bytes(written(rows(1, 1500)))
    asked = []

    def counted(payload: bytes) -> int | None:
        asked.append(payload)
        return step_of(payload)

    assert last_step(path, counted) == 1500
    assert len(asked) < 500


def test_the_last_step_is_found_behind_much_else(tmp_path: Path) -> None:
    path = tmp_path / "run.wandb"
    path.write_bytes(written(rows(1, 3) + [b"o" * 1000] * 600))
    assert last_step(path, step_of) == 3


@pytest.mark.parametrize("data", [b"", HEADER, HEADER[:3], HEADER + b"\0" * 20])
def test_a_file_without_records_has_no_step(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "run.wandb"
    path.write_bytes(data)
    assert last_step(path, step_of) == 0


def test_another_kind_of_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.wandb"
    path.write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"run\.wandb: not a log file of wandb \(it begins with b'hello'"):
        last_step(path, step_of)


def test_all_sessions_of_the_run_count_and_no_others(tmp_path: Path) -> None:
    for name, last in (("offline-run-1-x", 5), ("run-2-x", 9), ("offline-run-3-x", 0), ("offline-run-4-y", 50)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"run-{name[-1]}.wandb").write_bytes(written(rows(1, last)))
    (tmp_path / "latest-run").symlink_to("run-2-x")
    assert [p.parent.name for p in log_files(tmp_path, "x")] == ["offline-run-1-x", "offline-run-3-x", "run-2-x"]
    assert recorded_step(tmp_path, "x", step_of) == 9
    assert recorded_step(tmp_path / "nothing", "x", step_of) == 0


@pytest.mark.parametrize("steps", [4, 40, 1500])  # within a block; over blocks; longer than what is looked at first
def test_the_torn_end_of_a_killed_session_is_cut_off(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "run.wandb"
    whole = written(rows(1, steps))
    path.write_bytes(written(rows(1, steps + 1))[: len(whole) + 100])
    assert cut_torn_end(path)
    assert path.read_bytes() == whole
    assert not cut_torn_end(path)
    assert path.read_bytes() == whole


def test_a_session_killed_before_its_first_record_keeps_its_header(tmp_path: Path) -> None:
    path = tmp_path / "run.wandb"
    path.write_bytes(HEADER + b"\1\2")
    assert cut_torn_end(path)
    assert path.read_bytes() == HEADER
    path.write_bytes(b"")
    assert not cut_torn_end(path)


def test_only_processes_that_can_write_a_log_file_are_writers(tmp_path: Path) -> None:
    path = tmp_path / "run-1" / "run-x.wandb"
    path.parent.mkdir()
    path.write_bytes(HEADER)
    opens = "import sys; f = open(sys.argv[1], sys.argv[2]); print(flush=True); sys.stdin.read()"
    found = {}
    for mode in ("rb", "ab"):
        child = subprocess.Popen(
            [sys.executable, "-c", opens, str(path), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        found[mode] = writers(tmp_path) == [child.pid], wait_for_writers(tmp_path, 0.0) == child.pid
        child.communicate()
    assert found == {"rb": (False, False), "ab": (True, True)}
    assert wait_for_writers(tmp_path, 0.0) is None


def test_files_that_still_grow_are_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "run.wandb"
    path.touch()
    grows = "import sys, time\nfor n in range(5):\n    open(sys.argv[1], 'ab').write(b'x'); time.sleep(0.1)"
    child = subprocess.Popen([sys.executable, "-c", grows, str(path)])
    while path.stat().st_size == 0:
        assert child.poll() is None
    wait_until_unchanged([path], 1.0)
    assert child.wait() == 0
    assert path.stat().st_size == 5


def test_notes_tell_what_was_recorded_and_where_a_session_was_killed(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "track.jsonl")
    assert (notes.recorded_step(), notes.ended_elsewhere()) == (0, False)
    notes.write("opened", mode="offline", sent=0)
    notes.write("closed", mode="offline", sent=20)
    notes.write("closed", mode="online", sent=90)
    notes.write("opened", mode="offline", sent=50)
    assert (notes.recorded_step(), notes.ended_elsewhere()) == (20, False)
    notes.write("opened", mode="offline", sent=50, host="another")
    assert notes.ended_elsewhere()


def test_what_does_not_end_is_ended() -> None:
    code = "import time; from stoker.launcher.track_process import ends_within\nwith ends_within(0.1): time.sleep(600)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.startswith("track: wandb does not come to an end")) == (1, True)
    with ends_within(600.0):
        assert os.getpid() > 0
