"""kernels/apex/fused_rotary_positional_embedding.py against the reference, through a stand-in for the extension
(fused_rope_stand_in.py)."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest
import torch
from stoker.kernels import reference, rope_cos_sin

sys.path.append(str(Path(__file__).parent))

import fused_rope_stand_in as stand_in

NAME = "fused_rotary_positional_embedding"
# Cosine, product and sum are rounded one by one, and two products are added.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
INV_FREQ = 1.0 / 100.0 ** (torch.arange(0, 12, 2, dtype=torch.float32) / 12)
# Rows at different places: documents of a packed batch.
POSITIONS = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 0, 1, 2]])


@pytest.fixture
def rope(monkeypatch):
    monkeypatch.setitem(sys.modules, NAME, stand_in)
    monkeypatch.delitem(sys.modules, f"stoker.kernels.apex.{NAME}", raising=False)
    stand_in.calls.clear()
    yield importlib.import_module(f"stoker.kernels.apex.{NAME}").rope
    monkeypatch.delitem(sys.modules, f"stoker.kernels.apex.{NAME}")


def inputs(dtype=torch.float32):
    return torch.randn(2, 5, 4, 16).to(dtype), torch.randn(2, 5, 2, 16).to(dtype)


def test_the_signature_is_the_ops(rope):
    assert inspect.signature(rope) == inspect.signature(reference.rope)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_value_and_gradients_with_positions_of_their_own_in_each_row(rope, dtype):
    results = []
    for function, wide in ((rope, dtype), (reference.rope, torch.float64)):
        torch.manual_seed(0)
        leaves = [t.to(wide).requires_grad_() for t in inputs(dtype)]
        out = function(*leaves, POSITIONS, INV_FREQ, 1.25)
        upstream = [torch.ones_like(o) * torch.arange(-8, 8).to(wide) / 8 for o in out]
        results.append([*out, *torch.autograd.grad(out, leaves, upstream)])
    for found, wanted in zip(*results, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert [(name, shape) for name, shape, _ in stand_in.calls] == [
        ("forward_cached", (10, 1, 4, 16)),
        ("forward_cached", (10, 1, 2, 16)),
        ("backward_cached", (10, 1, 4, 16)),
        ("backward_cached", (10, 1, 2, 16)),
    ]


def test_parts_of_a_fused_projection_go_there_uncopied(rope):
    fused = torch.randn(2, 5, 8, 16)
    q, k = fused[:, :, :4], fused[:, :, 4:6]
    found = rope(q, k, POSITIONS, INV_FREQ, cos_sin=rope_cos_sin(POSITIONS, INV_FREQ))
    wanted = reference.rope(q, k, POSITIONS, INV_FREQ)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert [address for _, _, address in stand_in.calls] == [q.data_ptr(), k.data_ptr()]


def test_empty_inputs_do_not_reach_it(rope):
    q, k = inputs()
    found = rope(q[:0], k[:0], POSITIONS[:0], INV_FREQ)
    assert [tuple(t.shape) for t in found] == [(0, 5, 4, 16), (0, 5, 2, 16)]
    assert stand_in.calls == []


def test_what_it_has_not_is_refused_with_a_way_out(rope):
    q, k = inputs()
    with pytest.raises(ValueError, match=r"pairs halves only; choose kernels\.rope=native or reference"):
        rope(q, k, POSITIONS, INV_FREQ, interleaved=True)
    with pytest.raises(ValueError, match=r"q is torch\.float64, apex takes float32, bfloat16 or float16"):
        rope(q.double(), k, POSITIONS, INV_FREQ)
    far = torch.empty(1).expand(1, 2**31, 1, 16)
    positions = torch.zeros(1, dtype=torch.int64).expand(1, 2**31)
    with pytest.raises(ValueError, match=r"reaches past 2\^31 elements, apex does not; choose kernels\.rope=native"):
        rope(far, far, positions, INV_FREQ[:8])
    with pytest.raises(ValueError, match=r"positions \(2, 4\) must be \[B, S\]"):
        rope(q, k, POSITIONS[:, :4], INV_FREQ)
    assert stand_in.calls == []
