"""Compiled blocks: the same numbers as eager ones, one graph for all blocks alike, gradients to the same place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import metrics, tiny_config, train
from stoker.conf.schema import MemoryConfig, ModelConfig, QkNorm, Recompute
from stoker.kernels import reference, select
from stoker.kernels.bench.case import Maker
from stoker.kernels.bench.cases import SMALL, cases
from stoker.train.compile import compile_blocks
from stoker.train.data.dataset import Batch
from stoker.train.grid import single
from stoker.train.init import initialize
from stoker.train.linear import WeightGradients
from stoker.train.model import Decoder, Parts
from stoker.train.parallel.ddp import DistributedDataParallel
from stoker.train.parallel.stages import whole
from stoker.train.params import decoder_table
from torch import Tensor
from traced import Traced, tells_outputs

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_size=48, qk_norm=QkNorm.head
)


@pytest.fixture(autouse=True)
def _fresh_compiler(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes that outlives the test
    yield
    torch._dynamo.reset()


def build(memory: MemoryConfig | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(Parts.of(CONFIG, select(), WeightGradients(), dtype=dtype, memory=memory), whole(4))
    initialize(model, decoder_table(CONFIG), single(), seed=0)
    return model


def batch() -> Batch:
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).repeat(2, 1)
    return Batch(tokens, tokens.roll(-1, 1), positions, positions // 6, torch.arange(2))


def pass_through(model: Decoder, data: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by way of the sink that the trainer has, over two micro-steps."""
    ops, table = select(), decoder_table(CONFIG)
    share = DistributedDataParallel(model, table, single(), ops, 1 << 20)
    model.queue.sink = share.sink
    share.begin_step(2)
    for _ in range(2):
        sums = model(data, 0.01)
        sums.objective.backward()
        model.queue.drain()
    share.finish()
    share.close()
    return float(sums.loss), dict(share.gradients)


def assert_alike(compiled: Decoder, eager: Decoder, data: Batch, tolerance: float = 1e-5) -> None:
    (loss, found), (expected_loss, expected) = pass_through(compiled, data), pass_through(eager, data)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < tolerance, name


class Counter:
    """A backend that counts the graphs, and runs them as they are, forward and backward traced."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.count += 1
        return aot_eager(graph, inputs)


def test_all_blocks_share_a_graph_and_give_the_same_gradients() -> None:
    """With documents, and every second layer recomputed."""
    compiled, counter = build(MemoryConfig(recompute=Recompute.full, recompute_every=2)), Counter()
    compile_blocks(compiled.blocks.values(), counter)
    assert_alike(compiled, build(), batch())
    assert counter.count == 2  # of the first block, which gets no branch to add, and of the others


# linear_cross_entropy is no op for a graph: it chooses its chunks as it goes, and stands behind the blocks.
COMPILED_OPS = {f"{c.op}, {c.title}": c for c in cases(SMALL) if c.gradients and c.op != "linear_cross_entropy"}


@tells_outputs
@pytest.mark.parametrize("name", COMPILED_OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_of_ops_have_one_name(name: str, dtype: torch.dtype) -> None:
    case, traced = COMPILED_OPS[name], Traced()
    inputs = case.make(Maker(torch.device("cpu"), dtype, 1))
    for i in case.gradients:
        inputs[i].requires_grad_()
    torch.compile(partial(case.call, getattr(reference, case.op)), fullgraph=True, backend=traced)(inputs)
    assert traced.ambiguous == []


@tells_outputs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_of_blocks_have_one_name(dtype: torch.dtype) -> None:
    model, traced = build(dtype=dtype), Traced()
    compile_blocks(model.blocks.values(), traced)
    pass_through(model, batch())
    assert traced.functions > 10
    assert traced.ambiguous == []


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiler_gives_the_same_gradients(dtype: torch.dtype) -> None:
    compiled = build(dtype=dtype)
    compile_blocks(compiled.blocks.values())
    assert_alike(compiled, build(dtype=dtype), batch(), 1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.full
def test_a_compiled_run_goes_as_an_eager_one(tmp_path: Any, tiny_data: Any) -> None:
    options: dict[str, Any] = {"steps": 5, "train": {"eval_interval": 4, "eval_batches": 1}}
    config = tiny_config(tiny_data, **options)
    train(tmp_path / "eager", config)
    train(tmp_path / "compiled", replace(config, kernels=replace(config.kernels, compile=True)))
    eager, compiled = (metrics(tmp_path / run) for run in ("eager", "compiled"))
    for name in ("loss", "grad_norm", "eval_loss"):
        assert [m[name] for m in compiled if name in m] == pytest.approx(
            [m[name] for m in eager if name in m], rel=1e-5
        )
