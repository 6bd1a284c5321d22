"""Every schedule, with deferred weight gradients in buffers of their own, against plain accumulation in one process."""

from __future__ import annotations

import builtins
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from stoker.conf.layout import Layout
from stoker.conf.pipeline import SCHEDULES
from stoker.train.grid import Grid, Membership, form
from stoker.train.linear import WeightGradients, add_or_copy, embed, gradient_dtype, linear, project
from stoker.train.parallel.pipeline import Activation, LocalStage, Pipeline
from stoker.train.parallel.stages import StageSpec, balance, rank_of_stage
from stoker.train.plan.schedule import order_of
from torch import Tensor, nn

V, D, H, ROWS = 11, 6, 10, 8


class Sink:
    """Gradients by parameter in wide buffers; norms come from autograd, as in a reducer."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.buffers: dict[Tensor, Tensor] = {}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take)

    def target(self, weight: Tensor) -> tuple[Tensor, bool]:
        if weight in self.buffers:
            return self.buffers[weight], True
        self.buffers[weight] = torch.full(weight.shape, float("nan"), dtype=gradient_dtype(weight.dtype))
        return self.buffers[weight], False

    def ready(self, weight: Tensor) -> None:
        pass

    def _take(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            add_or_copy(parameter.grad, *self.target(parameter))
            parameter.grad = None


class Sums(NamedTuple):
    objective: Tensor
    loss: Tensor


def weight(name: str, *shape: int, dtype: torch.dtype) -> nn.Parameter:
    """The same values for a name wherever it is built."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return nn.Parameter((torch.randn(*shape, dtype=torch.float64, generator=generator) / 2).to(dtype))


class Block(nn.Module):
    def __init__(self, layer: int, queue: WeightGradients, dtype: torch.dtype) -> None:
        super().__init__()
        self.queue = queue
        self.norm = nn.Parameter(1 + weight(f"norm{layer}", D, dtype=dtype).detach())
        self.gate, self.up = (weight(f"{n}{layer}", H, D, dtype=dtype) for n in ("gate", "up"))
        self.down = weight(f"down{layer}", D, H, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(F.rms_norm(x, (D,), self.norm), (self.gate, self.up), self.queue)
        return x + linear(F.silu(gate) * up, self.down, self.queue)


class Stage(nn.Module):
    """Some of the blocks; the first one embeds tokens, the last one has the loss. tied: one tensor for both ends."""

    def __init__(self, spec: StageSpec, queue: WeightGradients, dtype: torch.dtype, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.queue = queue
        self.blocks = nn.ModuleDict({str(i): Block(i, queue, dtype) for i in spec.layers})
        if spec.is_first:
            self.embedding = weight("embedding", V, D, dtype=dtype) if tied is None else tied
        if spec.is_last:
            self.norm = nn.Parameter(1 + weight("norm", D, dtype=dtype).detach())
            self.head = weight("head", V, D, dtype=dtype) if tied is None else tied

    def forward(self, x: Tensor | None, batch: Tensor) -> Tensor | Sums:
        if x is None:
            x = embed(batch[0], self.embedding, self.queue)
        for block in self.blocks.values():
            x = block(x)
        if not hasattr(self, "head"):
            return x
        logits = linear(F.rms_norm(x, (D,), self.norm), self.head, self.queue)
        loss = F.cross_entropy(logits.to(gradient_dtype(logits.dtype)), batch[1], reduction="sum")
        return Sums(0.25 * loss, loss.detach())


def make_batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(0, V, (count, 2, ROWS), generator=generator))


def reference(layers: int, batches: list[Tensor], dtype: torch.dtype, tied: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by name, in this process alone."""
    weight_ = weight("embedding", V, D, dtype=dtype) if tied else None
    queue = WeightGradients()
    model = Stage(StageSpec(0, tuple(range(layers)), True, True), queue, dtype, weight_)
    queue.sink = sink = Sink(list(model.parameters()))
    loss = 0.0
    for batch in batches:
        sums = model(None, batch)
        sums.objective.backward()
        loss += sums.loss.item()
    return loss, {name: sink.buffers[p] for name, p in model.named_parameters()}


class Built(NamedTuple):
    """One rank's pipeline. log: what it did, in order, as plan/schedule.py writes it."""

    pipeline: Pipeline[Tensor, Sums]
    parameters: dict[str, Tensor]
    sink: Sink
    log: list[str]


def build(grid: Grid, case: dict[str, Any]) -> Built:
    """The stages of this rank; layers cost 2, the embedding 1, the head 3: stages are uneven."""
    pipe, facts, dtype = grid.pipeline, SCHEDULES[case["schedule"]], getattr(torch, case["dtype"])
    count = pipe.size * facts.chunks
    slices = balance([2] * case["layers"], 1, 3, count)
    tied = weight("embedding", V, D, dtype=dtype) if case["tied"] else None
    stages = []
    for i in range(count):
        if rank_of_stage(i, pipe.size, facts.is_v) == pipe.rank:
            spec, queue = StageSpec(i, tuple(slices[i]), i == 0, i == count - 1), WeightGradients()
            module = Stage(spec, queue, dtype, tied)
            stages.append(LocalStage(spec, module, module, queue))
    parameters = {name: p for s in stages for name, p in s.module.named_parameters(remove_duplicate=False)}
    sink = Sink(list(dict.fromkeys(parameters.values())))
    for stage in stages:
        stage.queue.sink = sink
    log: list[str] = []
    pipeline = Pipeline(
        case["schedule"],
        stages,
        count,
        case["micro"],
        Activation((ROWS, D), dtype),
        pipe,
        lambda kind, stage, micro: log.append(f"{stage}{kind}{micro}"),
    )
    return Built(pipeline, parameters, sink, log)


def differences(grid: Grid, case: dict[str, Any]) -> dict[str, float]:
    """Largest difference to one process, of whatever this rank knows; nan where a gradient is missing."""
    built, batches = build(grid, case), make_batches(case["micro"])
    loss, gradients = reference(case["layers"], batches, getattr(torch, case["dtype"]), case["tied"])
    for _ in range(2):  # the second step must not see the first
        built.sink.buffers.clear()
        results = built.pipeline.forward_backward(batches)
    buffers = {name: built.sink.buffers[p] for name, p in built.parameters.items()}
    ends = [name for name in ("embedding", "head") if name in buffers]
    if case["tied"] and len(ends) == 1:  # a copy on either end
        grid.comms["tied"].all_reduce(buffers[ends[0]])
    gradients.setdefault("head", gradients["embedding"])
    found = {name: (buffers[name] - gradients[name]).abs().max().item() for name in buffers}
    if results:
        found["loss"] = abs(sum(r.loss.item() for r in results) - loss)
    evaluated = built.pipeline.forward(make_batches(case["micro"] + 1)[:-1])
    if evaluated:
        found["validation"] = abs(sum(r.loss.item() for r in evaluated) - loss)
    order = order_of(case["schedule"], grid.pipeline.size, SCHEDULES[case["schedule"]].chunks, case["micro"])
    found["order"] = float(built.log != 2 * list(map(str, order.ranks[grid.pipeline.rank])))
    found["held"] = float(sum(i.buffer is not None for s in built.pipeline._stages for i in _infos(s)))
    return found


def _infos(stage: Any) -> list[Any]:
    return [i for table in (stage.args_recv_info, stage.grad_recv_info) for infos in table.values() for i in infos]


def _cases(member: Membership, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    grid = form(member, Layout(pipeline=member.world_size))
    try:
        return [differences(grid, case) for case in cases]
    finally:
        grid.close()


def case(schedule: str, layers: int, micro: int, tied: bool = False, dtype: str = "float64") -> dict[str, Any]:
    return {"schedule": schedule, "layers": layers, "micro": micro, "tied": tied, "dtype": dtype}


def check(ranks: list[list[dict[str, float]]], cases: list[dict[str, Any]], limit: float = 1e-10) -> None:
    for i, each in enumerate(cases):
        found: dict[str, float] = {}
        for rank in ranks:
            found |= {name: max(value, found.get(name, 0.0)) for name, value in rank[i].items()}
        blocks = {f"blocks.{k}.{name}" for k in range(each["layers"]) for name in ("norm", "gate", "up", "down")}
        extra = {"norm", "embedding", "head", "loss", "validation", "order", "held"}
        assert set(found) == blocks | extra, each
        assert all(value <= limit for value in found.values()), (each, found)  # so nan is no match either


def test_every_schedule_on_two_ranks_has_the_gradients_of_one_process(run_ranks: Any) -> None:
    cases = [case(schedule, 5, 4) for schedule in SCHEDULES]
    # Numbers of micro-batches that are no multiple of anything, where the schedule allows it.
    cases += [case("gpipe", 2, 1), case("1f1b", 3, 5), case("interleaved", 4, 1), case("zbv", 4, 3)]
    check(run_ranks(2, _cases, cases=cases, timeout=200), cases)


@pytest.mark.parametrize(
    "schedules",
    [
        ("interleaved_zb", "dualpipev"),
        pytest.param(("gpipe", "1f1b", "interleaved", "zbv"), marks=pytest.mark.full),
    ],
    ids="-".join,
)
def test_every_schedule_on_four_ranks_has_the_gradients_of_one_process(
    run_ranks: Any, schedules: tuple[str, ...]
) -> None:
    cases = [case(schedule, 11, 8) for schedule in schedules]
    check(run_ranks(4, _cases, cases=cases, timeout=200), cases)


def test_tied_embeddings_get_the_gradients_of_both_ends(run_ranks: Any) -> None:
    cases = [case(schedule, 5, 4, tied=True) for schedule in ("1f1b", "dualpipev")]
    check(run_ranks(2, _cases, cases=cases, timeout=200), cases)


def test_wide_gradients_of_narrow_weights_have_the_bits_of_one_process(run_ranks: Any) -> None:
    cases = [case(schedule, 5, 4, dtype="bfloat16") for schedule in ("1f1b", "interleaved_zb", "zbv")]
    check(run_ranks(2, _cases, cases=cases, timeout=200), cases, limit=0.0)


class Fault(NamedTuple):
    """A stage that fails in the backward pass of its second micro-batch."""

    module: nn.Module
    error: type[BaseException]

    def __call__(self, x: Tensor | None, batch: Tensor) -> Tensor | Sums:
        output = self.module(x, batch)

        def fail(grad: Tensor) -> None:
            if self.error is SystemExit:
                os._exit(1)
            raise self.error("in the backward pass")

        if batch[0, 0] == -1:
            output.objective.register_hook(fail)
        return output


def _faulty(member: Membership, error: str) -> str:
    grid = form(member, Layout(pipeline=2))
    try:
        built, batches = build(grid, case("1f1b", 2, 4)), make_batches(4)
        if grid.rank == 1:
            stage = built.pipeline._stages[0]
            stage._local = replace(stage._local, run=Fault(stage._local.module, getattr(builtins, error)))
            batches[1][0, 0] = -1
        try:
            built.pipeline.forward_backward(batches)
        except Exception as e:
            return type(e).__name__
        return "no error"
    finally:
        grid.close()


def test_a_fault_in_a_stage_is_raised_as_it_was_and_is_a_lost_peer_to_others(run_ranks: Any) -> None:
    assert run_ranks(2, _faulty, error="MemoryError") == ["PeerLostError", "MemoryError"]


def test_a_rank_that_dies_is_a_lost_peer_to_others(run_ranks: Any) -> None:
    assert run_ranks(2, _faulty, error="SystemExit", may_die=(1,)) == ["PeerLostError", None]
