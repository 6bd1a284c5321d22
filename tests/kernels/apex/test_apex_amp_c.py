"""kernels/apex/amp_C.py against the references, through a stand-in for the extension (amp_c_stand_in.py)."""

import importlib
import inspect
import math
import sys
from pathlib import Path

import pytest
import torch
from stoker.kernels import RoundingAddress, reference

sys.path.append(str(Path(__file__).parent))

import amp_c_stand_in as stand_in

HYPER = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(7, 33), (1,), (0, 3), (5, 2, 3), (0,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def amp(monkeypatch):
    monkeypatch.setitem(sys.modules, "amp_C", stand_in)
    monkeypatch.delitem(sys.modules, "stoker.kernels.apex.amp_C", raising=False)
    stand_in.calls.clear()
    yield importlib.import_module("stoker.kernels.apex.amp_C")
    monkeypatch.delitem(sys.modules, "stoker.kernels.apex.amp_C")


def test_signatures_are_the_ops(amp):
    for op in ("adamw", "l2norm", "scale", "cast_copy"):
        assert inspect.signature(getattr(amp, op)) == inspect.signature(getattr(reference, op))


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_adamw_over_steps(amp, dtype, grad_dtype, as_tensor):
    """dtype: of params beside masters; None: float32 params without."""
    weights = [torch.randn(s) for s in SHAPES]
    results = []
    for function in (amp.adamw, reference.adamw):
        updated = [w.clone() for w in weights]
        params = updated if dtype is None else [w.to(dtype, copy=True) for w in weights]
        m, v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
        for step in range(1, 5):
            generator = torch.Generator().manual_seed(step)
            grads = [torch.randn(s, generator=generator).to(grad_dtype) for s in SHAPES]
            scale = torch.tensor(0.5) if as_tensor else 0.5
            masters = None if dtype is None else updated
            function(params, grads, m, v, masters, **HYPER, step=step, grad_scale=scale)
        results.append([*updated, *m, *v])
        if dtype is not None:
            assert all(torch.equal(p, w.to(dtype)) for p, w in zip(params, updated, strict=True))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=2e-6, atol=2e-6)


def test_one_pass_where_gradients_have_the_params_dtype(amp):
    masters = [torch.ones(3)]
    amp.adamw(
        [torch.ones(3).bfloat16()],
        [torch.ones(3).bfloat16()],
        [torch.zeros(3)],
        [torch.zeros(3)],
        masters,
        **HYPER,
        step=1,
    )
    assert stand_in.calls == ["multi_tensor_adam_capturable_master"]


def test_a_gradient_that_is_not_finite_is_not_skipped(amp):
    param = torch.ones(2, dtype=torch.bfloat16)
    grads = [torch.tensor([math.nan, 1.0], dtype=torch.float16)]  # widened first, which sets the flag
    amp.adamw([param], grads, [torch.zeros(2)], [torch.zeros(2)], [torch.ones(2)], **HYPER, step=1)
    assert param.isnan().tolist() == [True, False]
    assert param[1].item() < 1


def test_l2norm(amp):
    tensors = [torch.randn(300).to(DTYPES[i % 3]) for i in range(7)] + [torch.empty(0), torch.randn(6, 4).t()]
    torch.testing.assert_close(amp.l2norm(tensors), reference.l2norm(tensors), rtol=1e-6, atol=0)
    torch.testing.assert_close(amp.l2norm(tensors, True), reference.l2norm(tensors, True), rtol=1e-6, atol=0)
    assert amp.l2norm([]).item() == amp.l2norm([torch.empty(0)]).item() == 0.0
    assert amp.l2norm([torch.tensor([math.nan])]).isnan()


def test_scale_and_cast_copy(amp):
    ours = [torch.randn(5).to(d) for d in DTYPES] + [torch.empty(0)]
    theirs = [t.clone() for t in ours]
    amp.scale(ours, 0.37)
    reference.scale(theirs, 0.37)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    targets = [torch.empty_like(t, dtype=torch.bfloat16) for t in ours]
    amp.cast_copy(targets, ours)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(targets, ours, strict=True))
    amp.scale([], 2.0)
    amp.cast_copy([], [])


def test_what_apex_has_not_is_refused(amp):
    one = [torch.ones(3)]
    lists = {name: [torch.ones(3)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    address = RoundingAddress(1, 1, 1, (0,), (3,))
    half = {**lists, "params": [torch.ones(3, dtype=torch.bfloat16)]}
    turned = {name: [torch.ones(3, 2).t()] for name in lists}
    wide = {name: [torch.ones(3).double()] for name in lists}
    for call, message in (
        (lambda: amp.adamw(**half, masters=None, **HYPER, step=1, rounding=[address]), "rounds to the nearest only"),
        (lambda: amp.adamw(**turned, masters=None, **HYPER, step=1), "apex updates contiguous tensors only"),
        (lambda: amp.adamw(**wide, masters=None, **HYPER, step=1), "apex has no torch.float64"),
        (lambda: amp.adamw(**lists, masters=None, **HYPER, step=0), "the first step is 1"),
        (lambda: amp.scale(one, torch.tensor(2.0)), "apex takes a number only"),
        (lambda: amp.l2norm([torch.ones(3).double()]), "apex has no torch.float64"),
        (lambda: amp.cast_copy([torch.ones(2, 2).t()], [torch.ones(2, 2)]), "contiguous tensors only"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
