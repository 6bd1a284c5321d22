import math

import pytest
import torch
from stoker.kernels import rope_cos_sin
from stoker.kernels.reference import rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def inv_freq(rotary, theta=10000.0):
    return 1.0 / theta ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)


def inputs(dtype=torch.float32, dim=16):
    q, k = torch.randn(2, 7, 4, dim).to(dtype), torch.randn(2, 7, 2, dim).to(dtype)
    positions = torch.stack([torch.arange(7), torch.tensor([0, 1, 2, 0, 1, 0, 5000])])
    return q, k, positions


def rotated_by_hand(x, positions, frequencies, scale, interleaved):
    """Pair by pair in float64 with Python's own sine."""
    out = x.double().clone()
    n = len(frequencies)
    for b in range(x.shape[0]):
        for s in range(x.shape[1]):
            for i in range(n):
                angle = int(positions[b, s]) * float(frequencies[i])
                c, w = scale * math.cos(angle), scale * math.sin(angle)
                lo, hi = (2 * i, 2 * i + 1) if interleaved else (i, i + n)
                a, z = x[b, s, :, lo].double(), x[b, s, :, hi].double()
                out[b, s, :, lo], out[b, s, :, hi] = a * c - z * w, z * c + a * w
    return out


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [16, 6])
def test_matches_a_rotation_pair_by_pair(dtype, tolerance, interleaved, rotary):
    q, k, positions = inputs(dtype)
    frequencies = inv_freq(rotary)
    found = rope(q, k, positions, frequencies, 1.25, interleaved)
    for out, x in zip(found, (q, k), strict=True):
        assert out.dtype == dtype
        want = rotated_by_hand(x, positions, frequencies, 1.25, interleaved)
        torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


def test_a_literal_quarter_turn():
    q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    positions, quarter = torch.tensor([[1]]), torch.full((2,), math.pi / 2, dtype=torch.float64)
    halves, _ = rope(q, q, positions, quarter)
    adjacent, _ = rope(q, q, positions, quarter, interleaved=True)
    assert halves.flatten().tolist() == pytest.approx([-3.0, -4.0, 1.0, 2.0], abs=1e-6)
    assert adjacent.flatten().tolist() == pytest.approx([-2.0, 1.0, -4.0, 3.0], abs=1e-6)


def test_matches_llama_of_transformers():
    q, k, positions = inputs()
    angle = positions[..., None] * inv_freq(16)
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
    want = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for found, expected in zip(rope(q, k, positions, inv_freq(16)), want, strict=True):
        # transformers forms the angle in float32: position 5000 is off by 3e-4 there
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 4])
def test_gradcheck(interleaved, rotary):
    q = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 3, 1, 8, dtype=torch.float64, requires_grad=True)
    frequencies = inv_freq(rotary).double()
    assert torch.autograd.gradcheck(
        lambda a, b: rope(a, b, torch.arange(3)[None], frequencies, 0.9, interleaved), (q, k)
    )


def test_scores_depend_on_the_distance_only_even_far_out():
    q, k = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)
    frequencies = inv_freq(32)

    def score(at_q, at_k):
        a, _ = rope(q, q, torch.tensor([[at_q]]), frequencies)
        b, _ = rope(k, k, torch.tensor([[at_k]]), frequencies)
        return float((a * b).sum())

    assert score(5, 2) == pytest.approx(score(10_000_005, 10_000_002), abs=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_precomputed_table_and_strided_inputs_change_no_bit(interleaved):
    q, k, positions = inputs()
    want = rope(q, k, positions, inv_freq(16), 1.5, interleaved)
    table = rope_cos_sin(positions, inv_freq(16), 1.5, q.dtype)
    fused = torch.cat((q, k), 2)[:, :, :, None].expand(-1, -1, -1, 2, -1)[..., 0, :]
    strided = (fused[:, :, :4], fused[:, :, 4:])
    assert not strided[1].is_contiguous()
    found = rope(*strided, positions, inv_freq(16), 1.5, interleaved, table)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("interleaved", [False, True])
def test_inputs_are_left_alone_and_empty_ones_pass(interleaved):
    q, k, positions = inputs()
    before = q.clone(), k.clone()
    rope(q, k, positions, inv_freq(16), 1.0, interleaved)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    out, _ = rope(q[:0], k[:0], positions[:0], inv_freq(16), 1.0, interleaved)
    assert out.shape == (0, 7, 4, 16)


def test_shapes_that_do_not_fit_are_named():
    q, k, positions = inputs()
    with pytest.raises(ValueError, match="rotates twice its length of features; q has 16"):
        rope(q, k, positions, inv_freq(20))
    with pytest.raises(ValueError, match=r"positions \(2, 6\) must be \[B, S\]"):
        rope(q, k, positions[:, :6], inv_freq(16))
