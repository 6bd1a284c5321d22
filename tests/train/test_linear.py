"""Our linear against autograd's, and the queue of weight gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from stoker.kernels.reference import weight_gradient
from stoker.train.grouped import grouped_linear
from stoker.train.linear import WeightGradients, embed, linear, project
from stoker.train.parallel.experts import Groups
from torch import Tensor


class Recorder:
    """A sink that holds gradients in wide buffers and notes who became ready."""

    def __init__(self) -> None:
        self.buffers: dict[Tensor, Tensor] = {}
        self.ready_order: list[Tensor] = []

    def target(self, weight: Tensor) -> tuple[Tensor, bool]:
        if weight in self.buffers:
            return self.buffers[weight], True
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.buffers[weight] = torch.full(weight.shape, float("nan"), dtype=wide)  # a first write must overwrite
        return self.buffers[weight], False

    def ready(self, weight: Tensor) -> None:
        self.ready_order.append(weight)


def weights(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.nn.Parameter(torch.randn(n, 6, dtype=dtype)) for n in (4, 3, 5)]


def test_projections_have_autograds_outputs_and_gradients() -> None:
    ws, x = weights(), torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.cat([F.linear(x, w) for w in ws], -1)
    coefficients = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * coefficients).sum(), [x, *ws])
    recorder = Recorder()
    found = torch.cat(project(x, ws, WeightGradients(recorder)), -1)
    (found * coefficients).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(x.grad, gradients[0])
    for w, expected_grad in zip(ws, gradients[1:], strict=True):
        torch.testing.assert_close(recorder.buffers[w], expected_grad)
        assert w.grad is None


def test_contributions_of_several_passes_add_up() -> None:
    w = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    recorder = Recorder()
    xs = [torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for x in xs:
        linear(x, w, WeightGradients(recorder)).sum().backward()
    expected = torch.ones(9, 4, dtype=torch.float64).T @ torch.cat(xs)
    torch.testing.assert_close(recorder.buffers[w], expected.detach())


def test_the_queues_op_forms_all_products_but_those_of_experts_without_rows() -> None:
    seen: list[tuple[int, ...]] = []

    def op(total: Tensor, grad_output: Tensor, x: Tensor, holds_sum: bool) -> None:
        seen.append((*total.shape, len(x)))
        weight_gradient(total, grad_output, x, holds_sum)

    queue = WeightGradients(Recorder(), weight_gradient=op)
    sum(y.sum() for y in project(torch.randn(2, 7, 6, dtype=torch.float64), weights(), queue)).backward()
    assert seen == [(4, 6, 14), (3, 6, 14), (5, 6, 14)]
    experts = torch.nn.Parameter(torch.randn(3, 4, 6, dtype=torch.float64))
    groups = Groups((2, 0, 5), torch.tensor([2, 2, 7], dtype=torch.int32))
    grouped_linear(torch.randn(7, 6, dtype=torch.float64), experts, groups, queue).sum().backward()
    assert seen[3:] == [(4, 6, 2), (4, 6, 5)]


def test_deferred_gradients_wait_for_the_drain_and_have_the_same_bits() -> None:
    ws, x = weights(torch.float32), torch.randn(5, 6, requires_grad=True)
    at_once, later = Recorder(), Recorder()
    sum(y.square().sum() for y in project(x, ws, WeightGradients(at_once))).backward()
    queue = WeightGradients(later, is_deferred=True)
    sum(y.square().sum() for y in project(x, ws, queue)).backward()
    assert later.ready_order == []
    queue.drain()
    assert all(torch.equal(later.buffers[w], at_once.buffers[w]) for w in ws)
    assert [id(w) for w in later.ready_order] == [id(w) for w in at_once.ready_order]
    queue.drain()
    assert len(later.ready_order) == 3


def test_a_void_step_leaves_nothing_in_the_queue() -> None:
    recorder = Recorder()
    queue = WeightGradients(recorder, is_deferred=True)
    linear(torch.randn(5, 6, requires_grad=True), weights(torch.float32)[0], queue).sum().backward()
    queue.clear()
    queue.drain()
    assert recorder.ready_order == []


def test_narrow_weights_sum_their_gradients_in_float32() -> None:
    w = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    recorder = Recorder()
    # 256 + 1 is 256 in bfloat16: a narrow sum would stop growing.
    for value in (256.0, 1.0, 1.0, 1.0):
        x = torch.full((1, 1), value, dtype=torch.bfloat16, requires_grad=True)
        linear(x, w, WeightGradients(recorder)).sum().backward()
    assert recorder.buffers[w].dtype == torch.float32
    assert float(recorder.buffers[w]) == 259.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embedding_rows_get_the_sum_of_their_tokens_gradients(dtype: torch.dtype) -> None:
    w = torch.nn.Parameter(torch.randn(5, 3, dtype=dtype))
    tokens = torch.tensor([[0, 2, 2], [4, 2, 0]])
    recorder = Recorder()
    out = embed(tokens, w, WeightGradients(recorder))
    assert torch.equal(out, w[tokens])
    out.backward(torch.ones_like(out))
    assert recorder.buffers[w][:, 0].tolist() == [2.0, 0.0, 3.0, 0.0, 1.0]


def test_without_a_trainer_gradients_are_in_grad() -> None:
    w, x = weights(torch.float32)[0], torch.randn(5, 6, requires_grad=True)
    linear(x, w, WeightGradients()).sum().backward()
    torch.testing.assert_close(w.grad, torch.ones(5, 4).T @ x.detach())


def test_an_input_that_needs_no_gradient_gets_none() -> None:
    w, recorder = weights(torch.float32)[0], Recorder()
    linear(torch.randn(5, 6), w, WeightGradients(recorder)).sum().backward()
    assert w in recorder.buffers
