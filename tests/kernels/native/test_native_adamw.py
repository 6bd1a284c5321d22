"""csrc/adamw.cu on the CPU: against float64, torch.optim.AdamW and the reference."""

import pytest
import torch
from emulated_runs import only_blocks, sparse
from stoker.kernels import RoundingAddress
from stoker.kernels.reference import adamw as reference
from torch.library import opcheck

HYPER = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(7, 33), (1,), (64,), (0, 3), (5, 2, 3), (3, 3001), (16384,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def adamw(emulated):
    from stoker.kernels.native.adamw import adamw

    return adamw


def state(shapes=SHAPES):
    """Weights and averages after some steps."""
    weights = [torch.randn(s) for s in shapes]
    return weights, [0.1 * torch.randn(s) for s in shapes], [0.01 * torch.rand(s) for s in shapes]


def gradients(shapes=SHAPES, dtype=torch.float32):
    return [(0.1 * torch.randn(s)).to(dtype) for s in shapes]


def copies(*lists):
    return [[t.clone() for t in tensors] for tensors in lists]


def exact(w, g, m, v, step, scale=1.0):
    """The docstring's formula in float64 from the same numbers: (weight, averages, change)."""
    w, g, m, v = (t.double() for t in (w, g, m, v))
    g = g * scale
    m = HYPER["beta1"] * m + (1 - HYPER["beta1"]) * g
    v = HYPER["beta2"] * v + (1 - HYPER["beta2"]) * g * g
    m_hat, v_hat = m / (1 - HYPER["beta1"] ** step), v / (1 - HYPER["beta2"] ** step)
    change = HYPER["lr"] * (HYPER["weight_decay"] * w + m_hat / (v_hat.sqrt() + HYPER["eps"]))
    return w - change, m, v, change


def ulp(x):
    """Of float32 at the size of x."""
    return torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2.0**-120))) - 23)


def assert_within_ulps(found, before, wanted):
    """What native/adamw.py promises."""
    w, m, v = found
    exact_w, exact_m, exact_v, change = wanted
    assert bool(((v - exact_v).abs() <= 3 * ulp(exact_v)).all())
    assert bool(((m - exact_m).abs() <= 3 * ulp(torch.maximum(exact_m.abs(), before.double().abs()))).all())
    assert bool(((w - exact_w).abs() <= 0.51 * ulp(exact_w) + 8 * ulp(change)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_one_step_is_within_ulps_of_the_exact_one(adamw, dtype, step):
    (w, m, v), g = state(), gradients(dtype=dtype)
    before = copies(w, m, v)
    adamw(w, g, m, v, None, **HYPER, step=step, grad_scale=0.37)
    for i in range(len(w)):
        old = [tensors[i] for tensors in before]
        assert_within_ulps((w[i], m[i], v[i]), old[1], exact(old[0], g[i], old[1], old[2], step, 0.37))


@pytest.mark.parametrize("fused", [False, True])
def test_stays_beside_torch_adamw_over_steps(adamw, fused):
    (w, _, _) = state()
    m, v = ([torch.zeros_like(t) for t in w] for _ in range(2))
    theirs = [torch.nn.Parameter(t.clone()) for t in w]
    optimizer = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=fused)
    for step in range(1, 11):
        g = gradients()
        for p, grad in zip(theirs, g, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        adamw(w, g, m, v, None, **HYPER, step=step)
    for ours, other in zip(w, theirs, strict=True):
        torch.testing.assert_close(ours, other.detach(), rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_params_are_the_rounded_image_of_masters(adamw, dtype, grad_dtype):
    (masters, m, v), g = state(), gradients(dtype=grad_dtype)
    alone, alone_m, alone_v = copies(masters, m, v)
    params = [torch.full_like(w, 7.0, dtype=dtype) for w in masters]
    adamw(params, g, m, v, masters, **HYPER, step=3, grad_scale=0.5)
    adamw(alone, g, alone_m, alone_v, None, **HYPER, step=3, grad_scale=0.5)
    for param, master, other in zip(params, masters, alone, strict=True):
        assert torch.equal(master, other)
        assert torch.equal(param, master.to(dtype))


def test_a_scale_on_the_device_gives_the_bits_of_a_number(adamw):
    results = []
    for scale in (0.375, torch.tensor(0.375), torch.tensor([0.375], dtype=torch.float64)):
        torch.manual_seed(1)
        (w, m, v), g = state(), gradients(dtype=torch.bfloat16)
        adamw(w, g, m, v, None, **HYPER, step=2, grad_scale=scale)
        results.append([*w, *m, *v])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_more_tensors_than_one_launch_takes_in_mixed_dtypes(adamw):
    shapes = [(1 + 3 * i % 50,) for i in range(300)]
    dtypes = [DTYPES[i % 3] for i in range(300)]
    masters, m, v = state(shapes)
    g = [t.to(d) for t, d in zip(gradients(shapes), reversed(dtypes), strict=True)]
    params = [w.to(d) for w, d in zip(masters, dtypes, strict=True)]
    before = copies(masters, m, v)
    adamw(params, g, m, v, masters, **HYPER, step=5)
    for i in range(300):
        old = [tensors[i] for tensors in before]
        assert_within_ulps((masters[i], m[i], v[i]), old[1], exact(old[0], g[i], old[1], old[2], 5))
        assert torch.equal(params[i], masters[i].to(dtypes[i]))


def test_a_shard_has_the_bits_of_the_whole_wherever_it_begins(adamw):
    """Aligned or not, in the packed part of a chunk or in its rest."""
    (w, m, v), g = state([(20000,)]), gradients([(20000,)])
    parts = [[t[0][a:b].clone() for t in (w, g, m, v)] for a, b in ((0, 20000), (8191, 8200), (1, 16390))]
    shifted = [torch.cat([torch.zeros(1), t[0]])[1:] for t in (w, g, m, v)]  # unaligned storage
    for params, grads, avgs, avg_sqs in [*parts, shifted]:
        adamw([params], [grads], [avgs], [avg_sqs], None, **HYPER, step=2)
    whole = parts[0]
    for part, place in zip([*parts[1:], shifted], [slice(8191, 8200), slice(1, 16390), slice(None)], strict=True):
        assert all(torch.equal(a, b[place]) for a, b in zip(part, whole, strict=True))


def address(shape, start=None, seed=2**63 + 17):
    return RoundingAddress(seed, 9, 2**31 - 5, start or (0,) * len(shape), tuple(shape))


@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_rounding_adds_the_references_bits_to_the_exact_same_value(adamw, grad_dtype):
    from stoker.kernels.reference import stochastic_round

    shapes = [(40, 64), (7, 33), (129,), (3, 5, 12), (2, 1)]
    (w, m, v), g = state(shapes), gradients(shapes, grad_dtype)
    params = [t.bfloat16() for t in w]
    wide, wide_m, wide_v = copies([p.float() for p in params], m, v)
    where = [address(s) for s in shapes]
    adamw(params, g, m, v, None, **HYPER, step=4, grad_scale=0.5, rounding=where)
    adamw(wide, g, wide_m, wide_v, None, **HYPER, step=4, grad_scale=0.5)
    wanted = [torch.empty_like(p) for p in params]
    stochastic_round(wanted, wide, where)
    assert all(torch.equal(a, b) for a, b in zip(params, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip([*m, *v], [*wide_m, *wide_v], strict=True))


def test_rounded_shards_equal_the_whole(adamw):
    shape = (4, 20, 48)
    (w, m, v), g = state([shape]), gradients([shape])
    lists = [[t[0].clone() for t in (w, g, m, v)], *[None] * 3]
    lists[0][0] = lists[0][0].bfloat16()
    boxes = [((1, 4, 8), (2, 7, 40)), ((0, 3, 5), (4, 16, 11)), ((3, 19, 47), (1, 1, 1))]
    cuts = [tuple(slice(a, a + n) for a, n in zip(start, size, strict=True)) for start, size in boxes]
    parts = [[t[cut].contiguous() for t in lists[0]] for cut in cuts]
    for tensors, start in zip([lists[0], *parts], [(0, 0, 0), *(b[0] for b in boxes)], strict=True):
        p, grad, avg, avg_sq = tensors
        adamw([p], [grad], [avg], [avg_sq], None, **HYPER, step=2, rounding=[address(shape, start)])
    for part, cut in zip(parts, cuts, strict=True):
        assert torch.equal(part[0], lists[0][0][cut])


def test_strided_tensors_are_updated_and_their_neighbours_are_not(adamw):
    storage = torch.randn(6, 10)
    before = storage.clone()
    param, avg, avg_sq = storage[:, ::2], torch.zeros(5, 6).t(), torch.zeros(6, 5)
    grad = torch.randn(5, 6).t()
    plain = [param.clone(), torch.zeros(6, 5), torch.zeros(6, 5)]
    adamw([param], [grad], [avg], [avg_sq], None, **HYPER, step=1)
    adamw([plain[0]], [grad.contiguous()], [plain[1]], [plain[2]], None, **HYPER, step=1)
    assert all(torch.equal(a, b) for a, b in zip((param, avg, avg_sq), plain, strict=True))
    assert torch.equal(storage[:, 1::2], before[:, 1::2])
    assert not torch.equal(param, before[:, ::2])


def test_infinity_and_nan_come_out_as_by_the_reference(adamw):
    g = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, 1.0])
    ours, theirs = ([torch.ones(5), torch.zeros(5), torch.zeros(5)] for _ in range(2))
    for step in (1, 2):
        for function, (w, m, v) in ((adamw, ours), (reference, theirs)):
            function([w], [g.clone()], [m], [v], None, **HYPER, step=step)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0, equal_nan=True)
    assert ours[0].isnan().tolist() == [True, True, True, False, False]


def test_past_two_to_the_31(adamw):
    n = 2**31 + 8192 * 2 + 5
    tensors = [sparse((n,), torch.float32) for _ in range(4)]
    for t in tensors:
        t[-3:] = 1.0
    with only_blocks(0, -1):
        adamw(*([t] for t in tensors), None, **HYPER, step=1)
    small = [torch.ones(3) for _ in range(4)]
    adamw(*([t] for t in small), None, **HYPER, step=1)
    assert all(torch.equal(a[-3:], b) for a, b in zip(tensors, small, strict=True))


def test_opcheck(adamw):
    (w, m, v), g = state([(5,), (2, 3)]), gradients([(5,), (2, 3)])
    numbers = (0.5, 1e-3, 0.9, 0.95, 1e-8, 0.1, 3)
    op = torch.ops.stoker.adamw
    opcheck(op, (w, g, m, v, [], None, *numbers, []))
    opcheck(op, ([t.bfloat16() for t in w], g, m, v, w, torch.tensor(2.0), *numbers, []))
    addresses = [1, 2, 3, 1, 0, 5, 1, 2, 4, 2, 0, 0, 2, 3]
    opcheck(op, ([t.bfloat16() for t in w], g, m, v, [], None, *numbers, addresses))


def test_compiles_to_one_graph(adamw):
    def step(w, g, m, v, factor):
        adamw(w, g, m, v, None, **HYPER, step=2, grad_scale=factor)

    (w, m, v), g = state([(5,), (2, 3)]), gradients([(5,), (2, 3)])
    w2, m2, v2 = copies(w, m, v)
    factor = torch.tensor(0.5)
    torch.compile(step, fullgraph=True, backend="aot_eager")(w, g, m, v, factor)
    step(w2, g, m2, v2, factor)
    assert all(torch.equal(a, b) for a, b in zip([*w, *m, *v], [*w2, *m2, *v2], strict=True))


def test_a_parameter_that_a_graph_has_saved_is_not_changed_unseen(adamw):
    param = torch.nn.Parameter(torch.ones(3))
    loss = param.square().sum()
    adamw([param], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)], None, **HYPER, step=1)
    assert param.grad_fn is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_leaves_of_any_strides_are_updated_without_a_graph(adamw):
    param = torch.nn.Parameter(torch.ones(3, 4).t())
    adamw([param], [torch.ones(4, 3)], [torch.zeros(4, 3)], [torch.zeros(4, 3)], None, **HYPER, step=1)
    assert param.grad_fn is None
    assert bool((param < 1).all())
    assert torch.is_grad_enabled()


def test_an_empty_list_is_fine(adamw):
    adamw([], [], [], [], None, **HYPER, step=1)
    adamw([], [], [], [], [], **HYPER, step=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "step=0, the first step is 1"),
        ({"grads": []}, "0 grads for 1 params"),
        ({"params": []}, "1 grads for 0 params"),
        ({"grads": [torch.ones(4)]}, r"tensors at 0 differ in shape: param \(3,\), grad \(4,\)"),
        ({"params": [torch.ones(3, dtype=torch.bfloat16)]}, r"params\[0\] is torch.bfloat16; small updates vanish"),
        ({"exp_avgs": [torch.ones(3, dtype=torch.bfloat16)]}, "averages at 0 are torch.bfloat16 and torch.float32"),
        ({"masters": []}, "0 masters for 1 params"),
        ({"masters": [torch.ones(3)], "rounding": [address((3,))]}, "leave rounding=None"),
        ({"grads": [torch.ones(3).double()]}, r"grads\[0\] is float64; .* or choose kernels\.adamw=reference"),
        ({name: [torch.ones(3).double()] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}, "=reference"),
        ({"grad_scale": torch.ones(2)}, r"the factor is float32 \[2\]; expected one float32"),
    ],
)
def test_mistakes_are_named(adamw, change, message):
    lists = {name: [torch.ones(3)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    with pytest.raises(ValueError, match=message):
        adamw(**{**lists, "masters": None, **HYPER, "step": 1, **change})
