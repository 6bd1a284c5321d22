"""How long a call takes, and how fast the device could be: copies of memory, products of matrices.

On CUDA a batch of calls is timed by events while the device is kept busy before them, so that Python's share does not
show; inputs take turns, so that the second-level cache holds none of them. On a CPU each call is timed by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

_BUSY = 4_000_000  # clock cycles that the device waits for, in which a batch of calls is queued: about 2 ms


def seconds(calls: Sequence[Callable[[], object]], device: torch.device, rounds: int) -> list[float]:
    """Per call, one number per round; each round makes all the calls, one after another."""
    if device.type != "cuda":
        return [_clock(calls) for _ in range(rounds)]
    return [_events(calls) for _ in range(rounds)]


def _clock(calls: Sequence[Callable[[], object]]) -> float:
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls)


def _events(calls: Sequence[Callable[[], object]]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_BUSY)
    first.record()
    for call in calls:
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / len(calls)


def copies_needed(bytes_of_one: int, device: torch.device) -> int:
    """Sets of inputs that take turns: together four times the second-level cache, between 2 and 32."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(32, -(-4 * cache // max(bytes_of_one, 1))))


def copy_bandwidth(device: torch.device, rounds: int = 10) -> float:
    """Bytes per second, read and written together, of torch's own copy of 1 GiB (on a CPU 64 MiB)."""
    size = 2**30 if device.type == "cuda" else 2**26
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
    return 2 * size / statistics.median(seconds([lambda: target.copy_(source)] * 3, device, rounds))


def matmul_rate(device: torch.device, dtype: torch.dtype, rounds: int = 10) -> float:
    """Floating-point operations per second of one product of square matrices, 8,192 wide (on a CPU 256)."""
    width = 8192 if device.type == "cuda" else 256
    # Not zeros: a device draws less power on them, and clocks higher.
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = a @ b
    return 2 * width**3 / statistics.median(seconds([lambda: torch.mm(a, b, out=out)] * 3, device, rounds))
