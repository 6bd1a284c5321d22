"""kernels/apex/fused_layer_norm_cuda.py against the references, through a stand-in for the extension."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest
import torch
from stoker.kernels import reference

sys.path.append(str(Path(__file__).parent))

import fused_layer_norm_stand_in as stand_in

EPS = 1e-5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # half precision is rounded twice
NAME = "fused_layer_norm_cuda"


@pytest.fixture(scope="module")
def module():
    """Imported once per process: it registers ops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, NAME, stand_in)
        return importlib.import_module(f"stoker.kernels.apex.{NAME}")


@pytest.fixture
def norms(module):
    stand_in.calls.clear()
    return module


def parameters(op, width, dtype):
    return [(1 + 0.1 * torch.randn(width)).to(dtype) for _ in range(1 if op == "rmsnorm" else 2)]


def outputs_and_grads(function, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = function(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in out]
    return [*(o.detach() for o in out), *torch.autograd.grad(out, leaves, upstream)]


def assert_alike(norms, op, tensors, residual=False, **keywords):
    def call(of):
        def function(x, *others):
            weights = others[:-1] if residual else others
            extra = {"residual": others[-1]} if residual else {}
            return getattr(of, op)(x, *weights, EPS, **extra, **keywords)

        return function

    found, wanted = outputs_and_grads(call(norms), tensors), outputs_and_grads(call(reference), tensors)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        tolerance = TOLERANCE[ours.dtype]
        scale = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
def test_signatures_are_the_ops(norms, op):
    assert inspect.signature(getattr(norms, op)) == inspect.signature(getattr(reference, op))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_dtype(norms, dtype):
    x, turned = torch.randn(3, 5, 24).to(dtype), torch.randn(24, 5).to(dtype).T
    assert_alike(norms, "rmsnorm", [x, *parameters("rmsnorm", 24, dtype)])
    assert_alike(norms, "layernorm", [x, *parameters("layernorm", 24, dtype)])
    assert stand_in.calls == ["rms_forward_affine", "rms_backward_affine", "forward_affine", "backward_affine"]
    assert_alike(norms, "rmsnorm", [turned, *parameters("rmsnorm", 24, dtype)])
    assert_alike(norms, "layernorm", [turned, *parameters("layernorm", 24, dtype)])


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
def test_a_residual_is_added_before(norms, op):
    x, residual = (torch.randn(3, 24).bfloat16() for _ in range(2))
    assert_alike(norms, op, [x, *parameters(op, 24, torch.bfloat16), residual], residual=True)


def test_float32_weights_beside_half_precision_take_the_mixed_form(norms):
    x = torch.randn(3, 24).bfloat16()
    assert_alike(norms, "rmsnorm", [x, *parameters("rmsnorm", 24, torch.float32)])
    assert_alike(norms, "layernorm", [x, *parameters("layernorm", 24, torch.float32)])
    forwards = [name for name in stand_in.calls if "forward" in name]
    assert forwards == ["rms_forward_affine_mixed_dtypes", "forward_affine_mixed_dtypes"]


def test_other_mixtures_are_widened(norms):
    wide, narrow = torch.randn(3, 24), torch.randn(3, 24).bfloat16()
    assert_alike(norms, "rmsnorm", [wide, *parameters("rmsnorm", 24, torch.bfloat16)])
    weight, bias = parameters("layernorm", 24, torch.bfloat16)
    assert_alike(norms, "layernorm", [wide, weight, bias])
    assert_alike(norms, "layernorm", [narrow, weight, bias.float()])


def test_an_offset_is_added_in_float32(norms):
    x = torch.full((1, 4), 256.0).bfloat16()
    # In bf16 1 + 2^-9 is 1; here it is rounded to x's dtype at the end only.
    weight = torch.full((4,), 2.0**-9).bfloat16()
    assert norms.rmsnorm(x.float(), weight, 0.0, offset=1.0).unique().tolist() == [1.001953125]
    assert_alike(norms, "rmsnorm", [x, weight], offset=1.0)
    assert stand_in.calls[-2:] == ["rms_forward_affine_mixed_dtypes", "rms_backward_affine"]


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
def test_no_rows_launch_nothing(norms, op):
    assert_alike(norms, op, [torch.empty(0, 4, 8), *parameters(op, 8, torch.float32)])
    assert stand_in.calls == []


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
def test_what_does_not_fit_is_refused(norms, op):
    with pytest.raises(ValueError, match=r"weight has shape \(4,\)"):
        getattr(norms, op)(torch.ones(2, 8), *parameters(op, 4, torch.float32), EPS)
    large = torch.ones(1, 8).expand(2**28, 8)
    with pytest.raises(ValueError, match=rf"x has 2147483648 elements, .*; choose kernels\.{op}=native"):
        getattr(norms, op)(large, *parameters(op, 8, torch.float32), EPS)


def test_compiles_to_one_graph(norms):
    def step(x, weight, bias):
        return norms.layernorm(norms.rmsnorm(x, weight, EPS, offset=1.0), weight, bias, EPS).float().square().sum()

    tensors = [t.requires_grad_() for t in (torch.randn(3, 16).bfloat16(), *parameters("layernorm", 16, torch.float32))]
    eager = torch.autograd.grad(step(*tensors), tensors)
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors), tensors)
    for ours, wanted in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-2, atol=1e-2)
