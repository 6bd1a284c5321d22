"""kernels/apex/xentropy_cuda.py against float64, through a stand-in for the extension (xentropy_stand_in.py)."""

import importlib
import inspect
import math
import sys
from pathlib import Path

import pytest
import torch
from stoker.kernels import reference

sys.path.append(str(Path(__file__).parent))

import xentropy_stand_in as stand_in

GRAD = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
OUR_MODULE = "stoker.kernels.apex.xentropy_cuda"


@pytest.fixture
def cross_entropy(monkeypatch):
    monkeypatch.setitem(sys.modules, "xentropy_cuda", stand_in)
    monkeypatch.delitem(sys.modules, OUR_MODULE, raising=False)
    stand_in.calls.clear()
    yield importlib.import_module(OUR_MODULE).cross_entropy
    monkeypatch.delitem(sys.modules, OUR_MODULE)


def losses_and_grad(function, logits, targets, **options):
    leaf = logits.detach().clone().requires_grad_()
    losses, lse = function(leaf, targets, return_lse=True, **options)
    upstream = torch.randn(losses.shape, generator=torch.Generator().manual_seed(1)).to(losses.dtype)
    return losses.detach(), lse, *torch.autograd.grad(losses, leaf, upstream)


def inputs(dtype=torch.float32):
    logits = (4 * torch.randn(3, 5, 37)).to(dtype)
    targets = torch.randint(0, 37, (3, 5))
    targets[0, 1] = targets[2, 4] = -100
    return logits, targets


def test_its_signature_is_the_ops(cross_entropy):
    assert inspect.signature(cross_entropy) == inspect.signature(reference.cross_entropy)


@pytest.mark.parametrize("dtype", GRAD)
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_losses_and_gradient_match_float64(cross_entropy, dtype, z_loss):
    logits, targets = inputs(dtype)
    found = losses_and_grad(cross_entropy, logits, targets, z_loss=z_loss)
    wanted = losses_and_grad(reference.cross_entropy, logits.double(), targets, z_loss=z_loss)
    assert [t.dtype for t in found] == [torch.float32, torch.float32, dtype]
    for ours, exact, limit in zip(found, wanted, (3e-6, 3e-6, GRAD[dtype]), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=limit, atol=limit)
    assert stand_in.calls == ["forward", "backward"]


def test_ignored_targets_give_exactly_nothing_even_with_infinite_logits(cross_entropy):
    logits, targets = inputs()
    logits[0, 1], logits[2, 4] = math.inf, math.nan
    losses, _, grad = losses_and_grad(cross_entropy, logits, targets, z_loss=1e-2)
    ignored = targets == -100
    assert losses[ignored].tolist() == [0.0, 0.0]
    assert grad[ignored].count_nonzero() == 0
    assert bool(losses.isfinite().all())
    assert bool(grad.isfinite().all())


def test_strided_and_empty_inputs(cross_entropy):
    logits, targets = inputs()
    turned = logits.transpose(0, 1)
    found = losses_and_grad(cross_entropy, turned, targets.t())
    for ours, want in zip(found, losses_and_grad(reference.cross_entropy, turned, targets.t()), strict=True):
        torch.testing.assert_close(ours, want, rtol=3e-6, atol=3e-6)
    stand_in.calls.clear()
    _, _, grad = losses_and_grad(cross_entropy, logits[:0], targets[:0])
    assert (grad.shape, stand_in.calls) == ((0, 5, 37), [])


def test_what_apex_cannot_do_is_refused(cross_entropy):
    logits, targets = inputs()
    with pytest.raises(
        ValueError, match=r"logits is torch.float64; apex has .*; choose kernels.cross_entropy=reference"
    ):
        cross_entropy(logits.double(), targets)
    with pytest.raises(ValueError, match="target 37 is neither a class"):
        cross_entropy(logits, targets.clamp(min=37))
    many = torch.empty(1).expand(2**16, 2**16)
    with pytest.raises(ValueError, match="4294967296 logits; apex counts them in 32 bits"):
        cross_entropy(many, torch.zeros(2**16, dtype=torch.int64))
