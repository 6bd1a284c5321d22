"""Recomputed activations: the same gradients bit for bit, less memory, and no effect of a forward pass twice."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import digest, metrics, tiny_config, train
from stoker.conf.schema import MemoryConfig, ModelConfig, QkNorm, Recompute
from stoker.kernels import select
from stoker.train.data.dataset import Batch
from stoker.train.grid import single
from stoker.train.init import initialize
from stoker.train.linear import WeightGradients
from stoker.train.model import Decoder, DropoutKey, Parts
from stoker.train.parallel.stages import whole
from stoker.train.params import decoder_table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_size=96, qk_norm=QkNorm.head
)


def build(
    memory: MemoryConfig, dtype: torch.dtype = torch.float32, is_deferred: bool = False, **changes: Any
) -> Decoder:
    config = replace(CONFIG, **changes)
    queue = WeightGradients(is_deferred=is_deferred)
    model = Decoder(Parts.of(config, select(), queue, dtype=dtype, memory=memory), whole(config.num_layers))
    initialize(model, decoder_table(config), single(), seed=0)
    return model


def batch(rows: int = 2, length: int = 16) -> Batch:
    tokens = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(1))
    doc_ids = torch.arange(length).repeat(rows, 1) // 6
    positions = torch.arange(length).repeat(rows, 1)
    return Batch(tokens, tokens.roll(-1, 1), positions, doc_ids, torch.arange(rows))


def gradients(model: Decoder, key: DropoutKey | None = None) -> dict[str, Tensor]:
    model(batch(), 0.01, key).objective.backward()
    model.queue.drain()
    return {n: p.grad for n, p in model.named_parameters()}


POLICIES = [
    MemoryConfig(recompute=Recompute.full),
    MemoryConfig(recompute=Recompute.full, recompute_every=3),
    MemoryConfig(recompute=Recompute.selective),
]


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", POLICIES, ids=["full", "every third", "selective"])
def test_gradients_are_bitwise_those_without(memory: MemoryConfig, dtype: torch.dtype, is_deferred: bool) -> None:
    key = DropoutKey(3, 5)
    kept = gradients(build(MemoryConfig(), dtype, dropout=0.2), key)
    again = gradients(build(memory, dtype, is_deferred, dropout=0.2), key)
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[n], again[n]) for n in kept)


class Calls:
    """How often each op ran, in which pass."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.count = function, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.count += 1
        return self.function(*args, **options)


@pytest.mark.parametrize(
    ("memory", "activations", "attentions"),
    [(MemoryConfig(), 4, 4), (POLICIES[0], 8, 8), (POLICIES[1], 6, 6), (POLICIES[2], 8, 4)],
    ids=["none", "full", "every third", "selective"],
)
def test_what_is_computed_twice(memory: MemoryConfig, activations: int, attentions: int) -> None:
    ops = select()
    swiglu, attention = Calls(ops.swiglu), Calls(ops.attention)
    ops = replace(ops, swiglu=swiglu, attention=attention)
    model = Decoder(Parts.of(CONFIG, ops, WeightGradients(), memory=memory), whole(4))
    initialize(model, decoder_table(CONFIG), single(), seed=0)
    with torch.no_grad():
        model(batch())
    assert (swiglu.count, attention.count) == (4, 4)
    gradients(model)
    assert (swiglu.count - 4, attention.count - 4) == (activations, attentions)


class Live(TorchDispatchMode):
    """Bytes of the storages that operations made and someone holds, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.bytes -= size


def live_bytes(memory: MemoryConfig, dtype: torch.dtype) -> tuple[int, int]:
    """After the forward pass, and at the peak of both."""
    model, live = build(memory, dtype, num_layers=8, qk_norm=QkNorm.none), Live()
    data = replace(batch(4, 64), doc_ids=None)
    with live:
        objective = model(data, 0.01).objective
        kept = live.bytes
        objective.backward()
    return kept, live.peak


@pytest.mark.parametrize(
    ("memory", "dtype", "kept", "peak"),
    [
        (POLICIES[0], torch.float32, 0.18, 0.31),
        (POLICIES[1], torch.float32, 0.68, 0.69),
        (POLICIES[2], torch.float32, 0.62, 0.67),
        (POLICIES[2], torch.bfloat16, 0.56, 0.64),
    ],
)
def test_less_is_alive(memory: MemoryConfig, dtype: torch.dtype, kept: float, peak: float) -> None:
    base, found = live_bytes(MemoryConfig(), dtype), live_bytes(memory, dtype)
    assert found[0] / base[0] == pytest.approx(kept, abs=0.03)
    assert found[1] / base[1] == pytest.approx(peak, abs=0.03)


def test_a_graph_that_no_backward_pass_follows_is_let_go() -> None:
    model, live = build(POLICIES[2]), Live()
    left = []
    with live:
        for _ in range(2):
            model(batch(), 0.01)
            left.append(live.bytes)
    assert left[0] == left[1]


def test_a_training_run_has_the_same_bits(tmp_path: Any, tiny_data: Any) -> None:
    options: dict[str, Any] = {"steps": 3, "train": {"micro_batch": 2}, "model": {"dropout": 0.1}}
    kept, _ = train(tmp_path / "kept", tiny_config(tiny_data, **options))
    for kind in (Recompute.full, Recompute.selective):
        again, _ = train(tmp_path / kind.value, tiny_config(tiny_data, **options, memory={"recompute": kind}))
        assert digest(again) == digest(kept)
        assert metrics(tmp_path / kind.value)[-1]["loss"] == metrics(tmp_path / "kept")[-1]["loss"]
