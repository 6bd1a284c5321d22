"""csrc/rope.cu on the CPU against float64."""

import pytest
import torch
from emulated_runs import assert_order_does_not_matter, only_blocks, outputs_and_grads, sparse
from stoker.kernels import rope_cos_sin
from stoker.kernels.reference import rope as reference
from torch.library import opcheck
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

# Cosines and sines are float32; half precision rounds the result once.
TOLERANCE = {torch.float32: 5e-7, torch.bfloat16: 4.0e-3, torch.float16: 5e-4}
# B, S, heads of q, heads of k, features per head, of which are turned
SHAPES = [
    (2, 5, 5, 2, 64, 64),  # 4 or 2 heads side by side
    (1, 3, 9, 1, 48, 48),  # lanes that have no pair
    (1, 2, 6, 3, 544, 544),  # more pairs than lanes, more heads than are in flight
    (2, 3, 3, 1, 64, 32),  # the rest passes
    (1, 3, 2, 1, 20, 14),  # no pack of 16 bytes
    (1, 1, 1, 1, 2, 2),
]


@pytest.fixture
def rope(emulated):
    from stoker.kernels.native.rope import rope

    return rope


def inv_freq(turned, theta=10000.0):
    return 1.0 / theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)


def inputs(shape, dtype=torch.float32):
    rows, length, heads, key_heads, width, _ = shape
    q = torch.randn(rows, length, heads, width).to(dtype)
    return q, torch.randn(rows, length, key_heads, width).to(dtype), torch.randint(0, 5000, (rows, length))


def parts_of_a_projection(q, k):
    """The same values as views of one tensor [B, S, features of q, k and v], as a fused projection returns it."""
    fused = torch.cat((q.flatten(2), k.flatten(2), k.flatten(2)), 2)
    parts = fused.split((q[0, 0].numel(), k[0, 0].numel(), k[0, 0].numel()), 2)
    return [part.unflatten(2, like.shape[2:]) for part, like in zip(parts, (q, k), strict=False)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients_match_float64(rope, shape, interleaved, dtype):
    q, k, positions = inputs(shape, dtype)
    frequencies = inv_freq(shape[-1])

    def run(function):
        return lambda a, b: function(a, b, positions, frequencies, 1.25, interleaved)

    found = outputs_and_grads(run(rope), [q, k])
    wanted = outputs_and_grads(run(reference), [q.double(), k.double()])
    for ours, exact in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_matches_llama_of_transformers(rope):
    q, k, positions = inputs((2, 6, 4, 2, 16, 16))
    angle = positions[..., None] * inv_freq(16)
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
    for found, wanted in zip(rope(q, k, positions, inv_freq(16)), llama(q, k, cos, sin, unsqueeze_dim=2), strict=True):
        # transformers forms the angle in float32: position 5000 is off by 3e-4 there
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)


def test_interleaved_matches_gptj_of_transformers(rope):
    q, k, positions = inputs((2, 6, 4, 2, 16, 16))
    angle = positions[..., None] * inv_freq(16)
    for found, x in zip(rope(q, k, positions, inv_freq(16), interleaved=True), (q, k), strict=True):
        torch.testing.assert_close(found, gptj(x, angle.sin(), angle.cos()), rtol=0, atol=2e-3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck(rope, interleaved):
    q, k, positions = inputs((1, 3, 2, 1, 8, 4), torch.float64)
    assert torch.autograd.gradcheck(
        lambda a, b: rope(a, b, positions, inv_freq(4), 0.9, interleaved), (q.requires_grad_(), k.requires_grad_())
    )


def test_opcheck(rope):
    q, k, positions = inputs((2, 3, 4, 2, 16, 12), torch.bfloat16)
    cos, sin = rope_cos_sin(positions, inv_freq(12))
    opcheck(torch.ops.stoker.rope, (q, k, cos, sin, True, -1))
    opcheck(torch.ops.stoker.rope_, (q, k, cos, sin, False, 1))


def test_compiles_to_one_graph(rope):
    q, k, positions = inputs((2, 3, 4, 2, 16, 16))
    table = rope_cos_sin(positions, inv_freq(16))

    def step(a, b):
        out = rope(a, b, positions, inv_freq(16), cos_sin=table)
        return torch.cat([o.square().flatten() for o in rope(*out, positions, inv_freq(16))])

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found, wanted = (outputs_and_grads(f, [q, k]) for f in (compiled, step))
    for ours, eager in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_of_a_fused_projection_and_other_strides_change_no_bit(rope, interleaved, dtype):
    q, k, positions = inputs((2, 3, 4, 2, 32, 32), dtype)
    wanted = rope(q, k, positions, inv_freq(32), 1.0, interleaved)
    by_head = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k)]
    unaligned = [torch.cat((torch.zeros(1, dtype=dtype), t.flatten()))[1:].view(t.shape) for t in (q, k)]
    by_feature = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in (q, k)]
    for strided in (parts_of_a_projection(q, k), by_head, unaligned, by_feature):
        found = rope(*strided, positions, inv_freq(32), 1.0, interleaved)
        assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, wanted, strict=True))


def test_one_table_for_all_rows_is_read_where_it_lies(rope):
    q, k, _ = inputs((3, 4, 2, 1, 16, 16))
    positions = torch.arange(4).expand(3, 4)
    cos, sin = rope_cos_sin(positions[:1], inv_freq(16))
    found = rope(q, k, positions, inv_freq(16), cos_sin=(cos.expand(3, -1, -1), sin.expand(3, -1, -1)))
    wanted = rope(q, k, positions, inv_freq(16))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[4]])
def test_in_place_gives_the_bits_of_out_of_place(rope, shape, interleaved, dtype):
    q, k, positions = inputs(shape, dtype)
    cos, sin = rope_cos_sin(positions, inv_freq(shape[-1]))
    wanted = torch.ops.stoker.rope(q, k, cos, sin, interleaved, -1)
    found = parts_of_a_projection(q, k)
    torch.ops.stoker.rope_(*found, cos, sin, interleaved, -1)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_in_place_leaves_the_values_of_a_fused_projection_alone(rope):
    q, k, positions = inputs(SHAPES[3])
    cos, sin = rope_cos_sin(positions, inv_freq(32))
    fused = torch.cat((q.flatten(2), k.flatten(2), k.flatten(2)), 2)
    of_q, of_k = fused[..., :192].unflatten(2, (3, 64)), fused[..., 192:256].unflatten(2, (1, 64))
    torch.ops.stoker.rope_(of_q, of_k, cos, sin, False, 1)
    assert torch.equal(fused[..., 256:], k.flatten(2))
    assert not torch.equal(of_k, k)


def test_inplace_turns_where_they_lie_unless_gradients_are_asked_for(rope):
    q, k, positions = inputs(SHAPES[3])
    wanted = rope(q, k, positions, inv_freq(32))
    given = parts_of_a_projection(q, k)
    found = rope(*given, positions, inv_freq(32), inplace=True)
    assert [t.data_ptr() for t in found] == [t.data_ptr() for t in given]
    leaves = [t.clone().requires_grad_() for t in (q, k)]
    with_grad = rope(*leaves, positions, inv_freq(32), inplace=True)
    assert torch.equal(leaves[0], q)
    with torch.no_grad():
        without = rope(*leaves, positions, inv_freq(32), inplace=True)
    for results in (found, with_grad, without):
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
    assert without[0].data_ptr() == leaves[0].data_ptr()


def test_inplace_compiles_to_one_graph(rope):
    q, k, positions = inputs((2, 3, 4, 2, 16, 16))

    def step(a, b):
        return rope(a * 2, b * 2, positions, inv_freq(16), inplace=True)

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k)
    assert all(torch.equal(a, b) for a, b in zip(found, step(q, k), strict=True))


def test_inputs_are_left_alone_and_the_inverse_brings_them_back(rope):
    q, k, positions = inputs((2, 3, 4, 2, 16, 12))
    before = q.clone(), k.clone()
    cos, sin = rope_cos_sin(positions, inv_freq(12))
    back = torch.ops.stoker.rope(*torch.ops.stoker.rope(q, k, cos, sin, False, 1), cos, sin, False, -1)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    for found, wanted in zip(back, before, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3, 2, 1, 8, 8), (2, 0, 2, 1, 8, 8), (1, 2, 2, 0, 8, 8), (1, 2, 2, 1, 8, 0)])
def test_empty(rope, shape):
    q, k, positions = inputs(shape)
    found = outputs_and_grads(lambda a, b: rope(a, b, positions, inv_freq(shape[-1])), [q, k])
    wanted = outputs_and_grads(lambda a, b: reference(a, b, positions, inv_freq(shape[-1])), [q, k])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_same_bits_twice_and_in_any_order_of_threads(rope):
    q, k, positions = inputs((2, 5, 5, 2, 64, 32), torch.bfloat16)
    assert_order_does_not_matter(lambda: rope(q, k, positions, inv_freq(32)))


def test_places_past_two_to_the_31_elements(rope):
    """Tokens that lie further apart than that."""
    width, far = 64, 2**31 + 192
    q, k = (
        sparse((far + heads * width,), torch.bfloat16).as_strided((1, 2, heads, width), (far, far, width, 1))
        for heads in (4, 1)
    )
    for x in (q, k):
        x[:, 1] = torch.randn(x.shape[2:])
    positions = torch.tensor([[0, 7]])
    near = rope(q[:, 1:].clone(), k[:, 1:].clone(), positions[:, 1:], inv_freq(width))
    found = rope(q, k, positions, inv_freq(width))
    assert q.stride(1) > 2**31
    assert all(torch.equal(a[:, 1:], b) for a, b in zip(found, near, strict=True))
    # Written as well, by the block that has it.
    cos, sin = rope_cos_sin(positions, inv_freq(width))
    with only_blocks(-1):
        torch.ops.stoker.rope_(q, k, cos, sin, False, 1)
    assert all(torch.equal(a[:, 1:], b) for a, b in zip((q, k), near, strict=True))


def test_what_does_not_fit_is_refused_as_the_reference_does(rope):
    q, k, positions = inputs((2, 3, 4, 2, 16, 16))
    table = rope_cos_sin(positions, inv_freq(16))
    with pytest.raises(ValueError, match="rotates twice its length of features; q has 16"):
        rope(q, k, positions, inv_freq(20))
    with pytest.raises(ValueError, match=r"positions \(2, 2\) must be \[B, S\]"):
        rope(q, k, positions[:, :2], inv_freq(16))
    with pytest.raises(ValueError, match=r"cos_sin is \(2, 3, 8\), \(2, 3, 7\); .* it has \(2, 3, 8\) twice"):
        rope(q, k, positions, inv_freq(16), cos_sin=(table[0], table[1][..., :7]))
    with pytest.raises(ValueError, match=r"expected one dtype; or choose kernels\.rope=reference"):
        rope(q, k.half(), positions, inv_freq(16))
    with pytest.raises(ValueError, match=r"expected float32 \[B, S, at most half of the features\]; or choose"):
        rope(q.bfloat16(), k.bfloat16(), positions, inv_freq(16), cos_sin=tuple(t.bfloat16() for t in table))
    with pytest.raises(ValueError, match=r"q is int64; expected float32, bfloat16 or float16"):
        rope(q.long(), k.long(), positions, inv_freq(16))


def test_in_place_refuses_what_would_be_written_twice(rope):
    q, k, positions = inputs((2, 3, 4, 2, 16, 16))
    cos, sin = rope_cos_sin(positions, inv_freq(16))
    for given in ((q[:, :, :1].expand(-1, -1, 4, -1), k), (q.transpose(2, 3).contiguous().transpose(2, 3), k)):
        with pytest.raises(RuntimeError, match="every element in a place of its own"):
            torch.ops.stoker.rope_(*given, cos, sin, False, 1)
    with pytest.raises(RuntimeError, match="q and k must be two tensors"):
        torch.ops.stoker.rope_(q, q, cos, sin, False, 1)
