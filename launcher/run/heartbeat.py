"""The 128 bytes of shared memory between a worker and its node's agent.

    0  heartbeat: written by the worker, read by the agent (64 bytes)
    64 control:   written by the agent, read by the worker (64 bytes)

No thread, no system call, no file: a worker that hangs anywhere, in C or in the kernel, simply stops updating.
Both records are guarded by a version that is odd while a write is under way, so a torn read is noticed.

Stop protocol (docs/architecture.md, "Stopping"): the supervisor proposes a stop step. A worker that reaches the
boundary before that step holds there until the proposal is committed or replaced by a later step. An agent that
finds a worker already past the proposed step answers so, and a later one is proposed. Ranks are at most one step
apart, so either all stop after the same step or none does, and no collective is needed to agree.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

SEGMENT_BYTES = 4096
_VERSION = struct.Struct("<I")
# The fields stand beside the version, not in one struct with it: pack_into clears its target before it fills it, and a
# reader must not see an even version there meanwhile.
_FIELDS_AT = 8
_HEARTBEAT = struct.Struct("<IIIxxxxqQdd")  # generation, phase, micro, step, collective sequence, time, median
_CONTROL = struct.Struct("<IxxxxqII")  # generation, stop step, committed, save
_CONTROL_AT = 64
NO_STOP = -1


class Phase(IntEnum):
    """What a worker is doing; each has its own time limit."""

    START = 0  # imports, process group, model, restore
    DATA = 1
    STEP = 2  # forward, backward, reduction, optimizer
    SAVE = 3
    EVAL = 4
    HOLD = 5  # waits at a proposed stop step
    DONE = 6
    COMPILE = 7
    SILENT = 8  # a script of the user's own that does not say where it is


@dataclass(frozen=True)
class Heartbeat:
    generation: int
    phase: Phase
    micro: int
    step: int  # the optimizer step in progress; all steps below it are complete on this rank
    # Collectives begun in this step, in a pipeline counted on from the number of the work: in a hang the culprit is the
    # rank with the smallest.
    sequence: int
    time: float  # time.monotonic() of the last update (one clock per node)
    step_seconds: float  # the worker's own median step time, 0 until known


class Save(IntEnum):
    """What a stop leaves time for."""

    UNDER_WAY = 0  # the save in flight, if there is one
    OWN = 1  # that of the stop's own step; one in flight makes way
    BOTH = 2


@dataclass(frozen=True)
class Control:
    generation: int
    stop_step: int  # first step that must not be run, NO_STOP while there is none
    is_committed: bool
    save: Save


class Segment:
    """One worker's segment. The agent creates it (memfd), the worker maps the inherited descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, SEGMENT_BYTES)

    @classmethod
    def create(cls, name: str) -> Segment:
        fd = os.memfd_create(f"stoker-{name}", 0)
        os.ftruncate(fd, SEGMENT_BYTES)
        segment = cls(fd)
        segment.write_control(Control(0, NO_STOP, False, Save.UNDER_WAY))
        return segment

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)

    def _write(self, layout: struct.Struct, at: int, fields: tuple[float, ...]) -> None:
        version = _VERSION.unpack_from(self._map, at)[0] | 1
        _VERSION.pack_into(self._map, at, version)
        layout.pack_into(self._map, at + _FIELDS_AT, *fields)
        _VERSION.pack_into(self._map, at, (version + 1) & 0xFFFFFFFF)

    def _read(self, layout: struct.Struct, at: int) -> tuple[float, ...] | None:
        for _ in range(1000):
            before = _VERSION.unpack_from(self._map, at)[0]
            fields = layout.unpack_from(self._map, at + _FIELDS_AT)
            if before % 2 == 0 and _VERSION.unpack_from(self._map, at)[0] == before:
                return fields
            time.sleep(0.0001)
        return None  # its writer died in the middle of a write

    def beat(self, h: Heartbeat) -> None:
        fields = (h.generation, int(h.phase), h.micro, h.step, h.sequence, h.time, h.step_seconds)
        self._write(_HEARTBEAT, 0, fields)

    def read_heartbeat(self) -> Heartbeat | None:
        """None if the worker died in the middle of an update."""
        f = self._read(_HEARTBEAT, 0)
        if f is None:
            return None
        return Heartbeat(int(f[0]), Phase(int(f[1])), int(f[2]), int(f[3]), int(f[4]), f[5], f[6])

    def write_control(self, c: Control) -> None:
        self._write(_CONTROL, _CONTROL_AT, (c.generation, c.stop_step, int(c.is_committed), int(c.save)))

    def read_control(self) -> Control:
        f = self._read(_CONTROL, _CONTROL_AT)
        if f is None:  # the agent died while writing: its worker is about to be killed too
            return Control(0, NO_STOP, False, Save.UNDER_WAY)
        return Control(int(f[0]), int(f[1]), bool(f[2]), Save(int(f[3])))
