"""The emulation of CUDA on the CPU: intrinsics, order of threads, deadlocks, memory; what is broken is seen."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch  # noqa: F401 -- the objects are linked to its libraries
from emulated_build import built
from emulated_runs import ORDERS, in_every_order, only_blocks, thread_order
from stoker.kernels.native.build import Target

HERE = Path(__file__).parent

Case = Callable[..., "list[int] | str"]


def _cases(folder: str) -> Case:
    library = ctypes.CDLL(str(built(Target(emulated=True, sources=HERE / folder))))

    def run(name: str, size: int = 256, n: int = 0) -> list[int] | str:
        """`size` integers that the kernel wrote (-1 where it did not), or what it raised."""
        out = (ctypes.c_int * size)(*[-1] * size)
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64]
        why = function(out, n).decode()
        return why or list(out)

    return run


@pytest.fixture(scope="module")
def sound() -> Case:
    return _cases("sound")


@pytest.fixture(scope="module")
def broken() -> Case:
    return _cases("broken")


@pytest.mark.parametrize("order", ORDERS)
def test_exchanges_give_each_lane_the_value_that_cuda_gives(sound: Case, order: str) -> None:
    with thread_order(order):
        flat = sound("exchange_results", 13 * 64)
    row = [flat[64 * k : 64 * k + 64] for k in range(13)]
    assert row[0] == [5] * 32 + [37] * 32
    assert row[1][:17] == [5] * 8 + [13] * 8 + [21]
    assert row[2][:17] == [*range(16, 32), 0]
    assert row[3][:17] == [*range(8), *range(8), 16]  # a later group is out of reach, an earlier one is not
    assert row[4][:32] == [*range(3, 32), 29, 30, 31]
    assert row[5][:8] == [3, 1, 2, 3, 7, 5, 6, 7]
    assert row[6][:32] == [0, 1, 2, *range(29)]
    assert row[7][:8] == [0, 1, 2, 0, 4, 5, 6, 4]
    assert row[8] == [0xAAAAAAAA - 2**32] * 64
    assert row[9] == [0] * 32 + [1] * 32
    assert row[10] == [1] * 32 + [0] * 32
    assert row[11][:4] == [3, 1, 7, 5]
    assert row[12][:4] == [1, 0, 3, 2]


def test_bit_intrinsics_give_what_cuda_gives(sound: Case) -> None:
    assert sound("bit_results", 10) == [8, 4, 0, 31, -2, 2, 0x3F800000, 3, 23, 8]


def test_indices_and_sizes_have_three_dimensions(sound: Case) -> None:
    out = sound("index_results", 64)
    assert out[:13] == [383] + [18] * 12
    assert out[32:] == [100 * z + 10 * y + x for z in range(2) for y in range(4) for x in range(4)]


def test_a_sound_kernel_gives_the_same_in_every_order(sound: Case) -> None:
    results = in_every_order(lambda: sound("block_sums", 2 * 3 * 256, 1000))
    assert results == [([499500] * 256 + [500500] * 256 + [501500] * 256) * 2] * 3


@pytest.mark.parametrize("case", ["missing_barrier", "missing_warp_barrier", "reused_too_early", "blocks_in_a_row"])
def test_a_missing_barrier_changes_the_result_with_the_order(broken: Case, case: str) -> None:
    results = in_every_order(lambda: broken(case))
    assert not any(isinstance(result, str) for result in results)
    assert results[0] != results[1]


def test_of_a_huge_grid_chosen_blocks_run_alone(sound: Case) -> None:
    with only_blocks(0, 5, -1, 2**30 + 7):
        out = sound("marks_of_blocks", 64)
    assert {k: v for k, v in enumerate(out) if v != -1} == {0: 0, 5: 5, 7: 7, 63: 2**30 - 1}


@pytest.mark.parametrize("value", ["sideways", "random:", "random:x"])
def test_an_unknown_order_is_an_error(sound: Case, value: str) -> None:
    with thread_order(value):
        why = sound("bit_results")
    assert why == f"STOKER_EMULATION_ORDER is '{value}'; expected ascending, descending or random:<seed>"


WAITING = {
    "divergent_barrier": (
        "kernel half_the_block, block (0, 0, 0): deadlock: "
        "threads 0-39 wait at __syncthreads (waiting.cu:6); threads 40-63 have returned"
    ),
    "missing_lane": (
        "kernel without_lane_3, block (0, 0, 0): deadlock: "
        "threads 0-2, 4-31 wait at __shfl_sync (waiting.cu:14); threads 3 wait at __syncthreads (waiting.cu:16)"
    ),
    "different_barriers": (
        "kernel two_barriers, block (0, 0, 0): threads meet at different barriers: "
        "threads 0-31 wait at __syncthreads (waiting.cu:23); threads 32-63 wait at __syncthreads (waiting.cu:25)"
    ),
    "partial_mask": (
        "kernel part_of_a_warp, block (0, 0, 0): a mask other than 0xffffffff at __shfl_xor_sync (waiting.cu:32)"
    ),
    "ragged_block": "kernel nothing, block (0, 0, 0): a block of 48 threads; expected a multiple of 32 up to 1024",
    "empty_grid": (
        "kernel nothing, block (0, 0, 0): a grid of (0, 1, 1) blocks; "
        "each size is at least 1 and at most (2147483647, 65535, 65535)"
    ),
    "too_much_shared_memory": ("kernel nothing, block (0, 0, 0): 1048576 bytes of shared memory; a block has 232448"),
}


@pytest.mark.parametrize("case", WAITING)
def test_threads_that_wait_for_ever_are_named_with_their_lines(broken: Case, case: str) -> None:
    with thread_order("ascending"):
        assert broken(case) == f"emulation: {WAITING[case]}"


def test_after_a_deadlock_the_next_launch_is_sound(broken: Case) -> None:
    assert "deadlock" in broken("divergent_barrier")
    with thread_order("descending"):
        assert broken("missing_barrier", 64)[:32] == [*range(63, 31, -1)]


@pytest.mark.parametrize(("order", "poison"), [("ascending", -1), ("descending", 0x7B7B7B7B)])
@pytest.mark.parametrize("case", ["stale_shared_memory", "stale_template_memory"])
def test_shared_memory_of_one_block_does_not_reach_the_next(broken: Case, case: str, order: str, poison: int) -> None:
    with thread_order(order):
        assert broken(case, 2) == [poison] * 2


def test_a_write_past_dynamic_shared_memory_raises(broken: Case) -> None:
    assert broken("write_past_dynamic_shared", n=0) == [1] * 64 + [-1] * 192
    assert broken("write_past_dynamic_shared", n=1).endswith("wrote outside of its 256 bytes of dynamic shared memory")


def test_an_access_where_no_memory_is_raises(broken: Case) -> None:
    why = broken("short_address", n=2**20 - 1 + 2**20)
    assert why.startswith("emulation: kernel address_in_32_bits, block (0, 0, 0): thread ")
    assert why.endswith(", where no memory is")


def test_too_large_a_frame_raises(broken: Case) -> None:
    assert broken("large_stack").endswith(" needs more than 65536 bytes of stack")


def test_a_variable_that_nothing_was_written_to_shows(broken: Case) -> None:
    assert broken("stale_register", n=4)[:32] == [1] * 32
    assert broken("stale_register", n=3)[:32] == [-0x01010102] * 32
