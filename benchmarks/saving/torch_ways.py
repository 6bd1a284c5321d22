"""torch's distributed checkpoint (DCP), synchronous and asynchronous, and safetensors' own file calls."""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from state import Contender, sync_directory
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

logging.getLogger().setLevel(logging.ERROR)


def contenders(setting: Any, state: dict[str, torch.Tensor]) -> dict[str, Contender]:
    store = dist.TCPStore("127.0.0.1", setting.port, is_master=False)
    store = dist.PrefixStore("torch", store)
    dist.init_process_group("gloo", store=store, rank=setting.rank, world_size=setting.size)
    return {
        "DCP": Dcp(setting.rank, state),
        "DCP async": AsyncDcp(setting.rank, state, None),
        "DCP async, stager": AsyncDcp(setting.rank, state, stager()),
        "safetensors": Safetensors(setting.rank, state),
    }


def stager() -> DefaultStager:
    """Copies in a thread; the training step waits for it before the update. All that needs CUDA is off."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
        )
    )


class _Blocking:
    """All is over when `begin` returns."""

    def prepare(self) -> None: ...

    def wake(self) -> None: ...

    def before_update(self) -> None: ...

    def numbers(self) -> list[float]:
        return [1.0, 0.0]

    def is_over(self, sums: list[float]) -> bool:
        return sums[0] == dist.get_world_size()

    def wait(self) -> None: ...

    def close(self) -> None: ...


class Dcp(_Blocking):
    """Every rank has its own names, so that there is nothing to agree on about shards."""

    def __init__(self, rank: int, state: dict[str, torch.Tensor]) -> None:
        self.state = {f"{name}@{rank}": tensor for name, tensor in state.items()}

    def begin(self, directory: Path) -> None:
        dcp.save(self.state, checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        dcp.load(dict(self.state), checkpoint_id=directory)


class AsyncDcp(Dcp):
    def __init__(self, rank: int, state: dict[str, torch.Tensor], stager: DefaultStager | None) -> None:
        super().__init__(rank, state)
        self._stager = stager
        self._group = dist.new_group(backend="gloo")  # its thread's collectives run beside those of the steps
        self._staged: Future[Any] | None = None
        self._written: Future[Any]

    def begin(self, directory: Path) -> None:
        answer = dcp.async_save(
            self.state, checkpoint_id=directory, process_group=self._group, async_stager=self._stager
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged, self._written = answer.staging_completion, answer.upload_completion
        else:
            self._written = answer

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def numbers(self) -> list[float]:
        return [float(self._written.done()), 0.0]

    def wait(self) -> None:
        self._written.result()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class Safetensors(_Blocking):
    """One file per rank, synced here: the library does not."""

    def __init__(self, rank: int, state: dict[str, torch.Tensor]) -> None:
        self._rank, self._state = rank, state

    def begin(self, directory: Path) -> None:
        path = directory / f"{self._rank}.safetensors"
        save_file(self._state, path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        sync_directory(directory)

    def load(self, directory: Path) -> None:
        loaded = load_file(directory / f"{self._rank}.safetensors")
        for name, tensor in self._state.items():
            tensor.copy_(loaded[name])
