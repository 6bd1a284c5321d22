"""What depends on the device and is not a collective: determinism, memory in use.

Global switches are set here, by the trainer that needs them; importing the package sets none.
"""

from __future__ import annotations

import os
import resource

import torch

_GIB = 1024**3


def set_determinism(is_deterministic: bool) -> None:
    """Make equal inputs give equal bits, or let the libraries choose the fastest way.

    On CUDA it must come before the first matrix product (cuBLAS reads its workspace setting once).
    """
    if is_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The same switch as torch.use_deterministic_algorithms, which besides imports the compiler (2 s in each worker).
    torch.set_deterministic_debug_mode("error" if is_deterministic else "default")
    # Filling every new tensor guards against reading uninitialised memory, at the price of a pass over all of it.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (torch types it as a module)
    torch.backends.cudnn.benchmark = not is_deterministic


def memory_gib(device: torch.device) -> float:
    """The most memory this process had allocated on a CUDA device so far; on the CPU, what it holds now (RSS). GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / _GIB
