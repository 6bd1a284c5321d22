"""Layers cut over the tensor axis against whole ones in one process, in float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stoker.conf.layout import Layout
from stoker.kernels import select
from stoker.train.comm import PeerLostError
from stoker.train.grid import Membership, form
from stoker.train.linear import WeightGradients, project, reduce_linear
from stoker.train.parallel.tensor import TensorAxis
from stoker.train.parallel.vocabulary import VocabularyLoss, embed_tokens, vocabulary_loss
from torch import Tensor

IGNORE, V, D, H, T = -100, 11, 6, 9, 8
SIZES = [(2, True), (2, False), (4, True)]


class Sink:
    """Gradients in wide buffers whose first content must be overwritten."""

    def __init__(self) -> None:
        self.buffers: dict[Tensor, Tensor] = {}

    def target(self, weight: Tensor) -> tuple[Tensor, bool]:
        if weight in self.buffers:
            return self.buffers[weight], True
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.buffers[weight] = torch.full(weight.shape, float("nan"), dtype=wide)
        return self.buffers[weight], False

    def ready(self, weight: Tensor) -> None:
        pass


def numbers(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same values for a name on every rank."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def cut(whole: Tensor, dim: int, axis: TensorAxis) -> Tensor:
    """This rank's part, the first ranks' one longer where it does not divide."""
    return torch.nn.Parameter(torch.tensor_split(whole, axis.size, dim)[axis.rank].clone())


def start_of(length: int, axis: TensorAxis) -> int:
    return sum(len(part) for part in torch.tensor_split(torch.empty(length), axis.size)[: axis.rank])


def far(found: Tensor, expected: Tensor) -> float:
    """Elementwise distance; float64 rounding is below 1e-12 at these sizes."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


# ---- column parallel, then row parallel, with biases


def feed_forward(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """What the two layers are without an axis: autograd's own."""
    gate, up = F.linear(x, w["gate"], w["gate_bias"]), F.linear(x, w["up"], w["up_bias"])
    return F.linear(F.silu(gate) * up, w["down"], w["down_bias"])


SHAPES = {"gate": (H, D), "up": (H, D), "down": (D, H), "gate_bias": (H,), "up_bias": (H,), "down_bias": (D,)}


def rank_feed_forward(
    member: Membership, sequence: bool, deferred: bool, dtype: str = "float64"
) -> tuple[dict[str, float], bool]:
    grid = form(member, Layout(tensor=member.world_size), backend="gloo")
    axis, kind = TensorAxis(grid.tensor, sequence), getattr(torch, dtype)
    whole = {n: torch.nn.Parameter(numbers(n, *shape, dtype=kind)) for n, shape in SHAPES.items()}
    x_TD, grad_TD = numbers("x", T, D, dtype=kind).requires_grad_(), numbers("grad", T, D, dtype=kind)
    expected_TD = feed_forward(x_TD, whole)
    expected = dict(zip(("x", *whole), torch.autograd.grad(expected_TD, [x_TD, *whole.values()], grad_TD), strict=True))

    dims = {"down": 1, "down_bias": None}
    parts = {n: w if dims.get(n, 0) is None else cut(w.detach(), dims.get(n, 0) or 0, axis) for n, w in whole.items()}
    queue = WeightGradients(Sink(), is_deferred=deferred)
    x_RD = axis.own(x_TD.detach()).clone().requires_grad_()
    for _ in range(2):  # accumulation: gradients of two passes
        gate, up = project(x_RD, (parts["gate"], parts["up"]), queue, axis, (parts["gate_bias"], parts["up_bias"]))
        y_RD = reduce_linear(F.silu(gate) * up, parts["down"], queue, axis, parts["down_bias"])
        y_RD.backward(axis.own(grad_TD))
    waited = not queue.sink.buffers
    queue.drain()

    gradients = {n: queue.sink.buffers[p] for n, p in parts.items()}
    if sequence:
        grid.tensor.all_reduce(gradients["down_bias"])
    distances = {"y": far(y_RD, axis.own(expected_TD)), "x": far(x_RD.grad, 2 * axis.own(expected["x"]))}
    for name, gradient in gradients.items():
        whole_grad = expected[name].to(gradient.dtype)
        dim = dims.get(name, 0)
        wanted = whole_grad if dim is None else torch.tensor_split(whole_grad, axis.size, dim)[axis.rank]
        distances[name] = far(gradient, 2 * wanted) / (1.0 if dtype == "float64" else float(whole_grad.abs().max()))
    grid.close()
    return distances, waited


@pytest.mark.parametrize(("size", "sequence"), SIZES)
@pytest.mark.parametrize("deferred", [False, True])
def test_columns_then_rows_are_the_whole_layers(
    run_ranks: Callable[..., Any], size: int, sequence: bool, deferred: bool
) -> None:
    for distances, waited in run_ranks(size, rank_feed_forward, sequence=sequence, deferred=deferred):
        assert set(distances) == {"y", "x", *SHAPES}
        assert max(distances.values()) < 1e-10, distances
        assert waited == deferred


def test_half_precision_layers_keep_wide_gradients(run_ranks: Callable[..., Any]) -> None:
    for distances, _ in run_ranks(2, rank_feed_forward, sequence=True, deferred=False, dtype="bfloat16"):
        assert max(d for name, d in distances.items() if name in SHAPES) < 0.05, distances


# ---- the vocabulary


def rank_embedding(member: Membership, sequence: bool, deferred: bool) -> list[float]:
    grid = form(member, Layout(tensor=member.world_size), backend="gloo")
    axis, queue = TensorAxis(grid.tensor, sequence), WeightGradients(Sink(), is_deferred=deferred)
    table, grad_TD = numbers("table", V, D).requires_grad_(), numbers("grad", T, D)
    tokens = torch.tensor([0, 10, 5, 5, 6, 3, 9, 0])
    expected = F.embedding(tokens, table)
    (table_grad,) = torch.autograd.grad(expected, table, grad_TD)
    part = cut(table.detach(), 0, axis)
    for _ in range(2):
        x_RD = embed_tokens(tokens, part, queue, axis, start_of(V, axis))
        x_RD.backward(axis.own(grad_TD))
    queue.drain()
    wanted = torch.tensor_split(2 * table_grad, axis.size)[axis.rank]
    grid.close()
    return [far(x_RD, axis.own(expected)), far(queue.sink.buffers[part], wanted)]


@pytest.mark.parametrize(("size", "sequence", "deferred"), [(2, True, True), (4, True, False), (4, False, False)])
def test_an_embedding_of_uneven_parts_is_the_whole_one(
    run_ranks: Callable[..., Any], size: int, sequence: bool, deferred: bool
) -> None:
    for distances in run_ranks(size, rank_embedding, sequence=sequence, deferred=deferred):
        assert max(distances) < 1e-10


def whole_loss(x: Tensor, w: Tensor, targets: Tensor, z_loss: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """(objective, cross-entropy) as textbooks write them."""
    logits = F.linear(x, w)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    penalty = logits.logsumexp(-1).square()[targets != IGNORE].sum()
    return loss + z_loss * penalty, loss


def rank_loss(
    member: Membership, sequence: bool, z_loss: float, softcap: float | None, token_grad: float | None, seed_grad: float
) -> dict[str, float]:
    grid = form(member, Layout(tensor=member.world_size), backend="gloo")
    axis, queue = TensorAxis(grid.tensor, sequence), WeightGradients(Sink())
    x_TD, head = numbers("x", T, D).requires_grad_(), numbers("head", V, D).requires_grad_()
    targets = torch.tensor([3, IGNORE, 0, 10, 5, 6, IGNORE, 8])
    objective, loss = whole_loss(x_TD, head, targets, z_loss, softcap)
    x_grad, head_grad = torch.autograd.grad(objective * seed_grad, [x_TD, head])

    part, x_RD = cut(head.detach(), 0, axis), axis.own(x_TD.detach()).clone().requires_grad_()
    plan = VocabularyLoss(select(), queue, axis, start_of(V, axis), V, IGNORE, z_loss, softcap, token_grad, chunk=3)
    for _ in range(2):
        found = vocabulary_loss(x_RD, part, targets, plan)
        (found[0] * seed_grad).backward()
    with torch.no_grad():
        again = vocabulary_loss(x_RD, part, targets, plan)
    distances = {
        "objective": far(found[0], objective),
        "loss": far(found[1], loss),
        "no grad": far(again[0], objective),
        "x": far(x_RD.grad, axis.own(2 * x_grad)),
        "head": far(queue.sink.buffers[part], torch.tensor_split(2 * head_grad, axis.size)[axis.rank]),
    }
    grid.close()
    return distances


LOSSES: list[tuple[int, dict[str, Any]]] = [
    (2, {"sequence": True, "z_loss": 0.0, "softcap": None, "token_grad": 0.25, "seed_grad": 0.25}),
    (2, {"sequence": False, "z_loss": 0.1, "softcap": None, "token_grad": None, "seed_grad": 0.25}),
    (4, {"sequence": True, "z_loss": 0.1, "softcap": 2.0, "token_grad": 0.25, "seed_grad": 0.5}),  # not as promised
    (4, {"sequence": False, "z_loss": 0.0, "softcap": 2.0, "token_grad": None, "seed_grad": 1.0}),
]


@pytest.mark.parametrize(("size", "case"), LOSSES)
def test_the_loss_of_uneven_parts_is_the_whole_one(run_ranks: Callable[..., Any], size: int, case: Any) -> None:
    for distances in run_ranks(size, rank_loss, **case):
        assert max(distances.values()) < 1e-10, distances


def rank_narrow_loss(member: Membership) -> list[float]:
    grid = form(member, Layout(tensor=2), backend="gloo")
    axis, queue = TensorAxis(grid.tensor, True), WeightGradients(Sink())
    x_TD, head = numbers("x", T, D, dtype=torch.bfloat16), numbers("head", V, D, dtype=torch.bfloat16)
    wide_x, wide_head = x_TD.float().requires_grad_(), head.float().requires_grad_()
    targets = torch.tensor([3, IGNORE, 0, 10, 5, 6, IGNORE, 8])
    objective, _ = whole_loss(wide_x, wide_head, targets, 0.1, 2.0)
    x_grad, head_grad = torch.autograd.grad(objective, [wide_x, wide_head])
    part, x_RD = cut(head, 0, axis), axis.own(x_TD).clone().requires_grad_()
    plan = VocabularyLoss(select(), queue, axis, start_of(V, axis), V, IGNORE, 0.1, 2.0, 1.0, chunk=3)
    found, _ = vocabulary_loss(x_RD, part, targets, plan)
    found.backward()
    assert queue.sink.buffers[part].dtype == found.dtype == torch.float32
    wanted = torch.tensor_split(head_grad, axis.size)[axis.rank]
    grid.close()
    return [
        float((found - objective).abs() / objective),
        far(x_RD.grad.float(), axis.own(x_grad)) / float(x_grad.abs().max()),
        far(queue.sink.buffers[part], wanted) / float(head_grad.abs().max()),
    ]


def test_half_precision_loses_only_the_rounding_of_logits(run_ranks: Callable[..., Any]) -> None:
    for loss, x, head in run_ranks(2, rank_narrow_loss):
        assert loss < 0.005
        assert max(x, head) < 0.02


def rank_bad_target(member: Membership) -> str:
    grid = form(member, Layout(tensor=2), backend="gloo")
    grid.tensor.barrier()  # who leaves at once, while others still connect, breaks their connection
    axis = TensorAxis(grid.tensor, False)
    plan = VocabularyLoss(select(), WeightGradients(Sink()), axis, start_of(V, axis), V)
    part = cut(numbers("head", V, D), 0, axis)
    try:
        vocabulary_loss(numbers("x", T, D), part, torch.full((T,), V), plan)
    except ValueError as error:
        return str(error)
    finally:
        grid.close()
    return "taken"


def test_a_target_outside_of_the_vocabulary_is_refused_on_every_rank(run_ranks: Callable[..., Any]) -> None:
    for message in run_ranks(2, rank_bad_target):
        assert message.startswith("cross_entropy: target 11 is neither a class (0 to 10) nor ignore_index=-100")


# ---- the axis


def rank_gradient_order(member: Membership) -> bool:
    """Whether dX and dW are those of the same inputs after the input's own rows have been overwritten."""
    grid = form(member, Layout(tensor=2), backend="gloo")
    axis, queue = TensorAxis(grid.tensor, True), WeightGradients(Sink(), is_deferred=True)
    ws = [cut(numbers(n, 4, D), 0, axis) for n in "ab"]
    x = axis.own(numbers("x", T, D)).clone().requires_grad_()
    sum(y.square().sum() for y in project(x, ws, queue, axis)).backward()
    held = [add for _, add in queue._waiting]
    shapes = {tuple(add.x_TI.own_RD.shape) for add in held}
    one = len({id(add.x_TI) for add in held}) == 1
    grid.close()
    return shapes == {(T // 2, D)} and one


def test_deferred_products_hold_only_this_ranks_tokens_and_gather_them_once(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(2, rank_gradient_order) == [True, True]


def rank_left_alone(member: Membership) -> str:
    grid = form(member, Layout(tensor=2), backend="gloo", timeout=20)
    axis, queue = TensorAxis(grid.tensor, True), WeightGradients(Sink())
    x, w = axis.own(numbers("x", T, D)).clone().requires_grad_(), cut(numbers("a", 4, D), 0, axis)
    (y,) = project(x, (w,), queue, axis)
    if member.rank == 1:
        os._exit(1)
    try:
        y.sum().backward()
    except PeerLostError:
        return "told"
    return "nothing"


def test_a_rank_lost_in_the_backward_pass_is_told_as_such(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(2, rank_left_alone, may_die=(1,)) == ["told", None]


def test_an_axis_of_one_rank_cuts_nothing() -> None:
    from stoker.train.grid import single

    axis = TensorAxis(single().tensor, sequence=True)
    x = torch.randn(5, 3)
    assert not axis.cuts_tokens
    assert axis.own(x) is x
