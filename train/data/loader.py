"""Micro-batches for one data-parallel rank, read ahead by a thread; and the batches of a validation.

Owns which samples a rank gets in which micro-step, prefetching, and the time spent waiting for data. A global batch is
samples [consumed, consumed + global_batch) whatever the number of ranks, and every rank runs equally many micro-steps:
rows that lack a sample are filled up with ignored targets.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .dataset import Batch, TokenDataset

# Seconds that closing waits for the thread: a read that hangs in dead storage must not hold up the end of the process.
_JOIN_LIMIT = 10.0
# Small micro-batches are read several at once, up to so many rows and tokens: most of a small one's cost is per call.
_ROWS_AT_ONCE, _TOKENS_AT_ONCE = 128, 1 << 19


@dataclass(frozen=True)
class Share:
    """One rank's part of every global batch: a contiguous slice, cut into micro-batches.

    With 10 samples on 4 ranks the slices have 2, 3, 2, 3 samples; with micro-batches of 2 all ranks run 2 micro-steps.
    """

    global_batch: int
    micro_batch: int
    dp_rank: int
    dp_size: int

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.micro_batch < 1 or not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(
                f"global batch {self.global_batch}, micro-batch {self.micro_batch}, data-parallel rank {self.dp_rank} "
                f"of {self.dp_size}: batches must be positive and the rank below the size"
            )

    @property
    def micro_steps(self) -> int:
        """Micro-batches per step, the same on every rank."""
        largest_slice = -(-self.global_batch // self.dp_size)
        return -(-largest_slice // self.micro_batch)

    def of(self, first: int, count: int, micro: int) -> range:
        """Sample numbers of this rank in micro-step `micro` of the global batch [first, first + count)."""
        begin, end = (first + count * r // self.dp_size for r in (self.dp_rank, self.dp_rank + 1))
        return range(min(begin + micro * self.micro_batch, end), min(begin + (micro + 1) * self.micro_batch, end))


class _Prefetch:
    """A queue filled by one thread while it holds fewer than `depth` batches.

    It keeps no reference to the loader, so that dropping the loader ends the thread.
    """

    def __init__(self, produce: Callable[[], list[Batch]], depth: int) -> None:
        self._ready: deque[Batch | BaseException] = deque()
        self._changed = threading.Condition()
        self._depth, self._is_closed = depth, False
        self.pid = os.getpid()
        self._thread = threading.Thread(target=self._fill, args=(produce,), name="stoker-data", daemon=True)
        self._thread.start()

    def _fill(self, produce: Callable[[], list[Batch]]) -> None:
        while True:
            items: list[Batch] | list[BaseException]
            try:
                items = produce()
            except BaseException as error:  # raised again in the thread that asks for the batch
                items = [error]
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._depth)
                if self._is_closed:
                    return
                self._ready.extend(items)
                self._changed.notify_all()
            if isinstance(items[-1], BaseException):
                return

    def get(self) -> Batch:
        if not self._ready:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._is_closed)
        if self._is_closed:
            raise RuntimeError("the loader was closed while a batch was waited for")
        item = self._ready[0]
        if isinstance(item, BaseException):
            raise item  # left in place: whoever asks again gets it again
        self._ready.popleft()
        if len(self._ready) == self._depth - 1:  # only now may the thread be waiting
            with self._changed:
                self._changed.notify_all()
        return item

    def close(self) -> None:
        if self.pid != os.getpid():  # in a fork there is no thread to join, and its lock may be held for ever
            return
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_LIMIT)


class Loader:
    """Endless iterator over one rank's micro-batches: next() gives [micro_batch, S]; a step is `micro_steps` of them.

    The reading thread starts with the first next(), and again after a fork. Its errors (ValueError for damaged data,
    OSError) are raised by next(). Close it, or use it in a `with`.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        share: Share,
        *,
        consumed_samples: int = 0,
        prefetch: int = 4,
        pin_memory: bool | None = None,
    ) -> None:
        """prefetch: micro-batches read ahead, at least. pin_memory: default, where CUDA is available."""
        if consumed_samples < 0 or prefetch < 1:
            raise ValueError(f"consumed samples {consumed_samples} must be >= 0, data.prefetch = {prefetch} >= 1")
        self.dataset, self.share, self.micro_steps = dataset, share, share.micro_steps
        self._begin, self._taken, self._waited = consumed_samples, 0, 0.0
        self._depth = prefetch
        rows = min(_ROWS_AT_ONCE, _TOKENS_AT_ONCE // dataset.sequence_length)
        self._at_once = max(1, rows // share.micro_batch)
        self._pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._prefetch: _Prefetch | None = None
        self._finalizer: Callable[[], object] = lambda: None

    @property
    def consumed_samples(self) -> int:
        """Samples of all complete steps, over all ranks: the whole of a loader's state."""
        return self._begin + self._taken // self.micro_steps * self.share.global_batch

    def take_wait(self) -> float:
        """Seconds that next() has waited for data since the last call of this."""
        waited, self._waited = self._waited, 0.0
        return waited

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        if self._prefetch is None or self._prefetch.pid != os.getpid():
            self._start()
        assert self._prefetch is not None
        batch = self._prefetch.get()
        self._taken += 1
        self._waited += time.perf_counter() - began
        return batch

    def _start(self) -> None:
        device = torch.cuda.current_device() if self._pin else None
        produce = _Production(self.dataset, self.share, self._begin, self._taken, self._at_once, device)
        self._prefetch = _Prefetch(produce, self._depth)
        self._finalizer = weakref.finalize(self, self._prefetch.close)

    def close(self) -> None:
        """End the thread; next() after this starts another at the same place."""
        self._finalizer()
        self._prefetch = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass
class _Production:
    """What the thread runs: the next `at_once` micro-steps, counted from `number` micro-steps after sample `begin`."""

    dataset: TokenDataset
    share: Share
    begin: int
    number: int
    at_once: int
    pin_device: int | None  # CUDA device of the thread that asks, None without pinning

    def __call__(self) -> list[Batch]:
        """Damage is reported with the micro-step that holds it, so after a failure the steps are read one by one."""
        try:
            return self._next()
        except (ValueError, OSError):
            if self.at_once == 1:
                raise
            self.at_once = 1
            return self._next()

    def _next(self) -> list[Batch]:
        size, rows = self.share.global_batch, self.share.micro_batch
        samples = np.full((self.at_once, rows), -1, np.int64)
        for k in range(self.at_once):
            step, micro = divmod(self.number + k, self.share.micro_steps)
            own = self.share.of(self.begin + step * size, size, micro)
            samples[k, : len(own)] = own
        batch = self.dataset.batch(samples.reshape(-1))
        if self.pin_device is not None:
            torch.cuda.set_device(self.pin_device)  # per thread: else every rank would open a context on device 0
            batch = batch.pinned()
        self.number += self.at_once
        return batch.split(self.at_once)


@dataclass(frozen=True)
class Validation:
    """Iterable over one rank's batches of a validation: the same samples in the same order each time.

    Every rank gets equally many batches [micro_batch, S]; the last ones may be filled up with ignored targets.
    """

    dataset: TokenDataset
    samples: int
    micro_batch: int
    dp_rank: int
    dp_size: int

    def __len__(self) -> int:
        return -(-self.samples // (self.micro_batch * self.dp_size))

    def __iter__(self) -> Iterator[Batch]:
        for i in range(len(self)):
            begin = (i * self.dp_size + self.dp_rank) * self.micro_batch
            samples = np.arange(begin, begin + self.micro_batch, dtype=np.int64)
            yield self.dataset.batch(np.where(samples < self.samples, samples, -1))
