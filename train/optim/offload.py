"""An optimizer in host memory: averages and masters lie there, and are updated by the host's processors.

Owns: images of shards and gradients in page-locked memory, and the copies between them and the device. Does not own:
the update. On the device remain weights and gradients; both cross the bus once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..linear import gradient_dtype
from .weights import Optimizer


class Offloaded:
    """An `Optimizer` (weights.py) around one that only sees host memory."""

    def __init__(self, shards: Mapping[str, Tensor], build: Callable[[Mapping[str, Tensor]], Optimizer]) -> None:
        """build: from shards in host memory to the optimizer that updates them."""
        self._shards = dict(shards)
        self._host = {name: _locked(shard, shard.dtype).copy_(shard) for name, shard in self._shards.items()}
        self._gradients = {name: _locked(shard, gradient_dtype(shard.dtype)) for name, shard in self._shards.items()}
        self._inner = build(self._host)
        self._is_first = True

    def state(self) -> dict[str, dict[str, Tensor]]:
        """See Optimizer; in host memory."""
        return self._inner.state()

    def step(self, gradients: Mapping[str, Tensor], rate: float, update: int, grad_scale: float) -> None:
        """See Optimizer. The last copies to the device are under way when it returns."""
        if self._is_first:
            # A checkpoint may have been read into the shards since they were copied.
            for name, image in self._host.items():
                image.copy_(self._shards[name], non_blocking=True)
            self._is_first = False
        for name, image in self._gradients.items():
            image.copy_(gradients[name], non_blocking=True)
        # Also the end of the last step's copies: until then its images must not change.
        _wait_for_device(self._shards)
        self._inner.step(self._gradients, rate, update, grad_scale)
        for name, image in self._host.items():
            self._shards[name].copy_(image, non_blocking=True)


def _locked(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Host memory of a shard's shape that a GPU can copy to and from while the host does something else."""
    return torch.empty(like.shape, dtype=dtype, pin_memory=like.is_cuda)


def _wait_for_device(tensors: Mapping[str, Tensor]) -> None:
    for device in {t.device for t in tensors.values() if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
