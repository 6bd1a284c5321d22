"""An optimizer in host memory updates as one beside the weights: the plumbing, on the host alone; no GPU is seen."""

from __future__ import annotations

import pytest
import torch
from stoker.conf.schema import Config, MemoryConfig, OptimConfig, PrecisionConfig
from stoker.kernels import select
from stoker.train.box import Box
from stoker.train.optim.adamw import AdamW
from stoker.train.optim.offload import Offloaded
from stoker.train.optim.weights import Optimizer, Weights
from stoker.train.params import ParamFacts, Role
from torch import Tensor

FACTS = [ParamFacts("w", (6, 5), Role.MATRIX, 0.02), ParamFacts("n", (5,), Role.NORM, 0.0)]


def beside(shards: dict[str, Tensor], rounds: bool) -> Optimizer:
    config = Config(precision=PrecisionConfig(stochastic_rounding=rounds), memory=MemoryConfig(offload_optimizer=True))
    boxes = {f.name: Box.whole(f.shape) for f in FACTS}
    return AdamW(Weights.of(shards, boxes, FACTS, config), OptimConfig(), select())


@pytest.mark.parametrize(("dtype", "rounds"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_weights_and_state_have_the_same_bits(dtype: torch.dtype, rounds: bool) -> None:
    plain = {f.name: torch.randn(f.shape).to(dtype) for f in FACTS}
    device = {name: torch.zeros_like(p) for name, p in plain.items()}
    one, other = beside(plain, rounds), Offloaded(device, lambda host: beside(dict(host), rounds))
    # As when a checkpoint is read into weights and state after the optimizer was built.
    for name, p in plain.items():
        device[name].copy_(p)
    for kind, tensors in one.state().items():
        for name, t in tensors.items():
            other.state()[kind][name].copy_(t)
    for update in (1, 2, 3):
        gradients = {name: torch.randn(p.shape) for name, p in plain.items()}
        given = {name: g.clone() for name, g in gradients.items()}
        other.step(given, 1e-2, update, 0.5)
        assert all(torch.equal(given[name], gradients[name]) for name in given)  # worked on copies
        one.step(gradients, 1e-2, update, 0.5)
        assert all(torch.equal(device[name], plain[name]) for name in plain)
    expected, found = one.state(), other.state()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[kind][name], t) for kind, ts in expected.items() for name, t in ts.items())
