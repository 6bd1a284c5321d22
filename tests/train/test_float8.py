"""float8 layers: clear refusals everywhere, and where torchao is installed its numbers, emulated on the CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from harness import tiny_config, train
from stoker.conf.schema import Fp8, ModelConfig, ParamDtype
from stoker.kernels import select
from stoker.train.data.dataset import Batch
from stoker.train.errors import BadInputError
from stoker.train.grid import single
from stoker.train.init import initialize
from stoker.train.linear import WeightGradients
from stoker.train.model import Decoder, Parts
from stoker.train.parallel.ddp import DistributedDataParallel
from stoker.train.parallel.stages import whole
from stoker.train.params import decoder_table
from torch import Tensor

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48)
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


def test_a_device_without_it_is_told_what_is_needed(tmp_path: Any, tiny_data: Any) -> None:
    config = tiny_config(tiny_data, precision={"fp8": Fp8.rowwise, "params": ParamDtype.bfloat16})
    with pytest.raises(BadInputError, match=r"compute capability 9.0 or more, and this run is on cpu"):
        train(tmp_path, config)


@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
def test_without_the_package_its_name_is_told() -> None:
    from stoker.train.float8 import Products

    with pytest.raises(ValueError, match=r"precision.fp8=rowwise needs the package torchao \(pip install torchao\)"):
        Products(Fp8.rowwise)


def gradients(kind: Fp8 | None) -> tuple[float, dict[str, Tensor]]:
    ops, queue, table = select(), WeightGradients(), decoder_table(CONFIG)
    model = Decoder(Parts.of(CONFIG, ops, queue, dtype=torch.bfloat16), whole(2))
    initialize(model, table, single(), seed=0)
    if kind is not None:
        from stoker.train.float8 import Products, _convert

        _convert(model.blocks.values(), Products(kind, emulate=True))
    share = DistributedDataParallel(model, table, single(), ops, 1 << 20)
    queue.sink = share.sink
    share.begin_step(1)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).repeat(2, 1)
    sums = model(Batch(tokens, tokens.roll(-1, 1), positions, None, torch.arange(2)), 0.01)
    sums.objective.backward()
    share.finish()
    share.close()
    return float(sums.loss.detach()), dict(share.gradients)


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.parametrize("kind", [Fp8.tensorwise, Fp8.rowwise])
def test_gradients_are_near_those_of_bfloat16_and_reach_the_sink(kind: Fp8) -> None:
    (loss, found), (expected_loss, expected) = gradients(kind), gradients(None)
    assert loss == pytest.approx(expected_loss, rel=1e-2)
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm() / gradient.norm())
        assert error < 0.12, name
        if name.endswith("ffn.down"):
            assert error > 1e-3  # it was float8
