"""Megatron-Core's distributed checkpoint: asynchronous by its own strategy, which forks a writer from each rank.

It is written for CUDA. What of torch.cuda it calls on the way is answered for the CPU here; no tensor is touched.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
torch.cuda.synchronize = lambda *args, **kwargs: None

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from state import Contender

logging.getLogger().setLevel(logging.ERROR)


def contenders(setting: Any, state: dict[str, torch.Tensor]) -> dict[str, Contender]:
    store = dist.TCPStore("127.0.0.1", setting.port, is_master=False)
    store = dist.PrefixStore("megatron", store)
    dist.init_process_group("gloo", store=store, rank=setting.rank, world_size=setting.size)
    parallel_state.initialize_model_parallel()
    return {"Megatron-Core async": MegatronCore(setting, state)}


class MegatronCore:
    """Metadata of an earlier save is used again, as its trainer does by default for asynchronous saves."""

    def __init__(self, setting: Any, state: dict[str, torch.Tensor]) -> None:
        self._setting, self._state = setting, state
        self._queue = AsyncCallsQueue()
        self._strategy = TorchDistSaveShardedStrategy(cached_metadata=True)

    def _sharded(self) -> dict[str, Any]:
        place = (0, self._setting.rank, self._setting.size)
        return {name: ShardedTensor.from_rank_offsets(name, t, place) for name, t in self._state.items()}

    def begin(self, directory: Path) -> None:
        request = dist_checkpointing.save(
            self._sharded(),
            str(directory),
            self._strategy,
            validate_access_integrity=False,
            async_sharded_save=True,
            async_strategy="mcore",
        )
        self._queue.schedule_async_request(request)

    def prepare(self) -> None: ...

    def wake(self) -> None: ...

    def before_update(self) -> None: ...

    def numbers(self) -> list[float]:
        return [0.0, 0.0]

    def is_over(self, sums: list[float]) -> bool:
        """By a collective of its own; what follows the writing (metadata) is done here, when all ranks have written."""
        self._queue.maybe_finalize_async_calls(blocking=False)
        return self._queue.get_num_unfinalized_calls() == 0

    def wait(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def load(self, directory: Path) -> None:
        loaded = dist_checkpointing.load(self._sharded(), str(directory))
        for name, tensor in self._state.items():
            if loaded[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(loaded[name])

    def close(self) -> None:
        self._queue.close()
