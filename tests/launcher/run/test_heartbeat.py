"""The segment between worker and agent: both directions, other process, torn writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from stoker.launcher.run.heartbeat import NO_STOP, Control, Heartbeat, Phase, Save, Segment

BEAT = Heartbeat(3, Phase.SAVE, 2, 2**40, 2**50, 12.5, 0.25)


@pytest.fixture
def segment() -> Iterator[Segment]:
    s = Segment.create("test")
    yield s
    s.close()


def test_a_new_segment_asks_for_no_stop(segment: Segment) -> None:
    assert segment.read_control() == Control(0, NO_STOP, False, Save.UNDER_WAY)


def test_both_records_read_back_and_do_not_touch_each_other(segment: Segment) -> None:
    control = Control(3, 2**40, True, Save.BOTH)
    segment.beat(BEAT)
    segment.write_control(control)
    assert segment.read_heartbeat() == BEAT
    assert segment.read_control() == control
    segment.beat(Heartbeat(4, Phase.DONE, 0, 1, 2, 3.0, 4.0))
    assert segment.read_control() == control


def test_another_process_writes_through_the_inherited_descriptor(segment: Segment) -> None:
    code = (
        "import sys; from stoker.launcher.run.heartbeat import *\n"
        "Segment(int(sys.argv[1])).beat(Heartbeat(3, Phase.SAVE, 2, 2**40, 2**50, 12.5, 0.25))"
    )
    subprocess.run([sys.executable, "-c", code, str(segment.fd)], pass_fds=[segment.fd], check=True, timeout=60)
    assert segment.read_heartbeat() == BEAT


def test_a_write_that_was_cut_off_is_not_read_and_the_next_write_heals_it(segment: Segment) -> None:
    segment.beat(BEAT)
    version = int.from_bytes(os.pread(segment.fd, 4, 0), "little")
    assert version % 2 == 0
    os.pwrite(segment.fd, (version + 1).to_bytes(4, "little"), 0)
    os.pwrite(segment.fd, b"\xff", 16)
    assert segment.read_heartbeat() is None
    segment.beat(BEAT)
    assert segment.read_heartbeat() == BEAT


def test_a_reader_never_sees_a_mix_of_two_beats(segment: Segment) -> None:
    code = (
        "import sys; from stoker.launcher.run.heartbeat import *\n"
        "s = Segment(int(sys.argv[1]))\n"
        "for n in range(30_000): s.beat(Heartbeat(n, Phase.STEP, n, n, n, n, n))\n"
    )
    segment.beat(Heartbeat(0, Phase.STEP, 0, 0, 0, 0.0, 0.0))
    writer = subprocess.Popen([sys.executable, "-c", code, str(segment.fd)], pass_fds=[segment.fd])
    try:
        while writer.poll() is None:
            h = segment.read_heartbeat()
            assert h is not None
            assert {h.generation, h.micro, h.step, h.sequence, int(h.time), int(h.step_seconds)} == {h.generation}
    finally:
        writer.kill()
        assert writer.wait() == 0
