import pytest
import torch
from stoker.kernels.reference import adamw

SHAPES = [(7, 33), (1,), (64,), (0, 3), (5, 2, 3)]
HYPER = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def state(dtype=torch.float32, shapes=SHAPES):
    params = [torch.randn(s).to(dtype) for s in shapes]
    return params, [torch.zeros(s, dtype=dtype) for s in shapes], [torch.zeros(s, dtype=dtype) for s in shapes]


def gradients(step, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def by_hand(params, scale, steps, hyper=HYPER, grad_dtype=torch.float32):
    """The formula of the docstring in float64."""
    w = [p.double() for p in params]
    m, v = [torch.zeros_like(p) for p in w], [torch.zeros_like(p) for p in w]
    for step in range(1, steps + 1):
        for i, grad in enumerate(gradients(step, grad_dtype)):
            g = grad.double() * scale
            m[i] = hyper["beta1"] * m[i] + (1 - hyper["beta1"]) * g
            v[i] = hyper["beta2"] * v[i] + (1 - hyper["beta2"]) * g * g
            m_hat, v_hat = m[i] / (1 - hyper["beta1"] ** step), v[i] / (1 - hyper["beta2"] ** step)
            w[i] = w[i] * (1 - hyper["lr"] * hyper["weight_decay"]) - hyper["lr"] * m_hat / (
                v_hat.sqrt() + hyper["eps"]
            )
    return w, m, v


@pytest.mark.parametrize("fused", [False, True])
def test_equals_torch_adamw_over_steps(fused):
    params, avgs, avg_sqs = state()
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=fused)
    for step in range(1, 6):
        for p, g in zip(theirs, gradients(step), strict=True):
            p.grad = g
        optimizer.step()
        adamw(params, gradients(step), avgs, avg_sqs, None, **HYPER, step=step)
    for mine, other in zip(params, theirs, strict=True):
        if fused:
            assert torch.equal(mine, other)
        torch.testing.assert_close(mine, other.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_gradient_scale_is_multiplied_in(dtype, tolerance, as_tensor):
    params, avgs, avg_sqs = state(dtype)
    want = by_hand(params, 0.37, 4)
    scale = torch.tensor(0.37, dtype=torch.float64) if as_tensor else 0.37
    for step in range(1, 5):
        adamw(params, gradients(step, dtype), avgs, avg_sqs, None, **HYPER, step=step, grad_scale=scale)
    for found, expected in zip((params, avgs, avg_sqs), want, strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_a_literal_first_step():
    params, avgs, avg_sqs = [torch.tensor([1.0])], [torch.zeros(1)], [torch.zeros(1)]
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 0.0, "weight_decay": 0.5}
    adamw(params, [torch.tensor([2.0])], avgs, avg_sqs, None, **hyper, step=1, grad_scale=0.5)
    # decay to 0.95, then one full lr against the sign of the gradient
    assert params[0].item() == pytest.approx(0.85, rel=1e-6)
    assert avgs[0].item() == pytest.approx(0.1, rel=1e-6)
    assert avg_sqs[0].item() == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_bf16_params_are_the_rounded_image_of_float32_masters(grad_dtype):
    masters, avgs, avg_sqs = state()
    params = [m.bfloat16() for m in masters]
    want, _, _ = by_hand(masters, 0.5, 5, grad_dtype=grad_dtype)
    for step in range(1, 6):
        adamw(params, gradients(step, grad_dtype), avgs, avg_sqs, masters, **HYPER, step=step, grad_scale=0.5)
    for param, master, exact in zip(params, masters, want, strict=True):
        assert param.dtype == torch.bfloat16
        assert torch.equal(param, master.bfloat16())
        torch.testing.assert_close(master.double(), exact, rtol=2e-6, atol=2e-6)


def test_updates_too_small_for_bf16_survive_in_the_masters():
    masters, avgs, avg_sqs = [torch.ones(8)], [torch.zeros(8)], [torch.zeros(8)]
    params = [torch.ones(8, dtype=torch.bfloat16)]
    hyper = {**HYPER, "lr": 1e-4, "weight_decay": 0.0}
    for step in range(1, 101):
        adamw(params, [torch.ones(8)], avgs, avg_sqs, masters, **hyper, step=step)
    assert masters[0][0].item() == pytest.approx(0.99, abs=1e-4)
    assert params[0][0].item() == pytest.approx(0.99, abs=4e-3)


def test_the_same_inputs_give_the_same_bits_and_a_shard_the_same_as_the_whole():
    results = []
    for rows in (slice(0, 40), slice(0, 40), slice(13, 29)):
        torch.manual_seed(3)
        whole, grad = torch.randn(40, 37), torch.randn(40, 37)
        param, avg, avg_sq = whole[rows].clone(), torch.zeros_like(whole[rows]), torch.zeros_like(whole[rows])
        for step in (1, 2):
            adamw([param], [grad[rows].clone()], [avg], [avg_sq], None, **HYPER, step=step, grad_scale=0.3)
        results.append(param)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0][13:29], results[2])


def test_strided_tensors_are_updated_and_their_neighbours_are_not():
    storage = torch.randn(6, 10)
    before = storage.clone()
    param, avg, avg_sq = storage[:, ::2], torch.zeros(5, 6).t(), torch.zeros(6, 5)
    plain = [param.clone(), torch.zeros(6, 5), torch.zeros(6, 5)]
    grad = torch.randn(5, 6).t()
    adamw([param], [grad], [avg], [avg_sq], None, **HYPER, step=1)
    adamw(*([t] for t in (plain[0], grad.contiguous(), plain[1], plain[2])), None, **HYPER, step=1)
    for a, b in zip((param, avg, avg_sq), plain, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(storage[:, 1::2], before[:, 1::2])
    assert not torch.equal(param, before[:, ::2])


def test_leaf_parameters_are_updated_without_a_graph_and_an_empty_list_is_fine():
    param = torch.nn.Parameter(torch.ones(3))
    adamw([param], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)], None, **HYPER, step=1)
    assert param.requires_grad
    assert param.grad_fn is None
    assert param[0].item() < 1
    adamw([], [], [], [], None, **HYPER, step=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "step=0, the first step is 1"),
        ({"grads": []}, "0 grads for 1 params"),
        ({"grads": [torch.ones(4)]}, r"tensors at 0 differ in shape: param \(3,\), grad \(4,\)"),
        ({"params": [torch.ones(3, dtype=torch.bfloat16)]}, r"params\[0\] is torch.bfloat16; small updates vanish"),
        ({"exp_avgs": [torch.ones(3, dtype=torch.bfloat16)]}, "averages at 0 are torch.bfloat16 and torch.float32"),
        ({"masters": []}, "0 masters for 1 params"),
    ],
)
def test_mistakes_are_named(change, message):
    lists = {name: [torch.ones(3)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    with pytest.raises(ValueError, match=message):
        adamw(**{**lists, "masters": None, **HYPER, "step": 1, **change})
