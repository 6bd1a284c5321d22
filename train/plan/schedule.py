"""Pipeline schedules as values: what every rank does in which order, how long it takes, and what it holds meanwhile.

Owns: the order of work of each schedule (asked of torch's own schedule classes, without process groups), its simulation
with given durations, the bubble, and the activations in flight. Does not own: running it (parallel/pipeline.py),
drawing it (schedule_draw.py), which layers a stage has (parallel/stages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from ...conf.pipeline import SCHEDULES
from ..parallel.stages import rank_of_stage


class Kind(Enum):
    """Of a stage and micro-batch: forward; backward of inputs and weights at once; or of the inputs, and later of the
    weights."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


_KINDS: dict[str, Kind] = {kind.value: kind for kind in Kind}  # torch's letters are the same


@dataclass(frozen=True)
class Action:
    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro}"


@dataclass(frozen=True)
class Order:
    """A schedule for one step: per rank of axis `pipeline`, its actions in order."""

    schedule: str
    pipeline: int
    chunks: int
    micro_steps: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks

    def rank_of(self, stage: int) -> int:
        return rank_of_stage(stage, self.pipeline, SCHEDULES[self.schedule].is_v)


TORCH_CLASSES: dict[str, type] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved_zb": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}


def order_of(schedule: str, pipeline: int, chunks: int, micro_steps: int) -> Order:
    """The order of work of a schedule named as in parallel.pipeline_schedule.

    Raises:
        ValueError: the schedule does not go with these numbers (conf/checks_parallel.py says why before a run).
    """
    # The list that torch gives for its one-stage schedules is for pictures only, and not what they do.
    if schedule == "gpipe":
        ranks = [_forwards(r, range(micro_steps)) + _backwards(r, range(micro_steps)) for r in range(pipeline)]
    elif schedule == "1f1b":
        ranks = [_one_forward_one_backward(r, pipeline, micro_steps) for r in range(pipeline)]
    else:
        stages = [_stand_in(i, pipeline, chunks) for i in range(chunks)]
        made = TORCH_CLASSES[schedule](stages, micro_steps, scale_grads=False)
        ranks = [list(_actions(made.pipeline_order[r])) for r in range(pipeline)]
    return Order(schedule, pipeline, chunks, micro_steps, tuple(map(tuple, ranks)))


def _forwards(stage: int, micros: Iterable[int]) -> list[Action]:
    return [Action(Kind.FORWARD, stage, m) for m in micros]


def _backwards(stage: int, micros: Iterable[int]) -> list[Action]:
    return [Action(Kind.BACKWARD, stage, m) for m in micros]


def _one_forward_one_backward(stage: int, stages: int, micro_steps: int) -> list[Action]:
    first = min(micro_steps, stages - stage)
    actions = _forwards(stage, range(first))
    for micro in range(micro_steps):
        actions += _backwards(stage, [micro]) + _forwards(
            stage, range(first + micro, min(first + micro + 1, micro_steps))
        )
    return actions


def _stand_in(index: int, pipeline: int, chunks: int) -> Any:
    """What a schedule reads of a stage when it is made; which rank it is made for changes nothing."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=pipeline * chunks,
        group_size=pipeline,
        group_rank=0,
        submod=None,
        stage_index_to_group_rank={},
    )


def _actions(listed: Sequence[Any]) -> Iterator[Action]:
    """Without waits. A forward and a backward that torch pairs are done one after the other."""
    for item in listed:
        for action in () if item is None else item.sub_actions or (item,):
            kind = _KINDS.get(action.computation_type.value)
            if kind is not None:  # else a matter of FSDP
                yield Action(kind, action.stage_index, action.microbatch_index)


@dataclass(frozen=True)
class Durations:
    """Seconds (or any unit) of one micro-batch in each stage, by stage, and of one transfer between ranks."""

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    transfer: float = 0.0

    @staticmethod
    def even(stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0) -> Durations:
        """The same for all stages; the defaults are the usual assumption of papers."""
        return Durations([forward] * stages, [input] * stages, [weight] * stages)

    def of(self, action: Action) -> float:
        if action.kind is Kind.FORWARD:
            return self.forward[action.stage]
        if action.kind is Kind.INPUT:
            return self.input[action.stage]
        if action.kind is Kind.WEIGHT:
            return self.weight[action.stage]
        return self.input[action.stage] + self.weight[action.stage]


@dataclass(frozen=True)
class Span:
    """One action in time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step: per rank, its spans in order."""

    order: Order
    ranks: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> float:
        """From the first start to the last end over all ranks."""
        return max(spans[-1].end for spans in self.ranks)

    @property
    def busy(self) -> list[float]:
        """Time spent computing, by rank."""
        return [sum(span.end - span.start for span in spans) for spans in self.ranks]

    @property
    def bubble(self) -> float:
        """Part of all ranks' time in which they wait, 0 to 1."""
        return 1.0 - sum(self.busy) / (len(self.ranks) * self.length)


def simulate(order: Order, durations: Durations) -> Timeline:
    """Every action starts when its rank is free and its input has come; sending takes no time from the sender."""
    ended: dict[Action, float] = {}
    free = [0.0] * order.pipeline
    spans: list[list[Span]] = [[] for _ in order.ranks]
    left = [iter(actions) for actions in order.ranks]
    waiting = [next(actions, None) for actions in left]
    while any(waiting):
        is_stuck = True
        for rank, action in enumerate(waiting):
            while action is not None and (ready := _ready(order, durations, ended, action)) is not None:
                start = max(free[rank], ready)
                free[rank] = ended[action] = start + durations.of(action)
                spans[rank].append(Span(action, start, free[rank]))
                action = next(left[rank], None)
                is_stuck = False
            waiting[rank] = action
        assert not is_stuck, f"{order.schedule}: {', '.join(map(str, filter(None, waiting)))} wait for one another"
    return Timeline(order, tuple(map(tuple, spans)))


def _ready(order: Order, durations: Durations, ended: Mapping[Action, float], action: Action) -> float | None:
    """When the input of an action is there; None: not known yet."""
    stage, micro = action.stage, action.micro
    if action.kind is Kind.FORWARD:
        if stage == 0:
            return 0.0
        source, kinds = stage - 1, [Kind.FORWARD]
    elif action.kind is Kind.WEIGHT:
        return ended.get(Action(Kind.INPUT, stage, micro))
    elif stage == order.stages - 1:
        return ended.get(Action(Kind.FORWARD, stage, micro))
    else:
        source, kinds = stage + 1, [Kind.BACKWARD, Kind.INPUT]
    end = next((ended[a] for kind in kinds if (a := Action(kind, source, micro)) in ended), None)
    if end is None:
        return None
    return end + (durations.transfer if order.rank_of(source) != order.rank_of(stage) else 0.0)


@dataclass(frozen=True)
class InFlight:
    """What a rank holds at one moment, in micro-batches by stage. full: forward done, backward not. waiting: the
    gradient of the input is formed, that of the weights is not; of the activations only their inputs are left."""

    full: Mapping[int, int] = field(default_factory=dict)
    waiting: Mapping[int, int] = field(default_factory=dict)

    def cost(self, of_full: Callable[[int], float], of_waiting: Callable[[int], float]) -> float:
        """Total, given what a micro-batch of a stage takes."""
        full = sum(n * of_full(stage) for stage, n in self.full.items())
        return full + sum(n * of_waiting(stage) for stage, n in self.waiting.items())


def peak_in_flight(
    order: Order, of_full: Callable[[int], float] = lambda stage: 1.0, of_waiting: Callable[[int], float] | None = None
) -> list[InFlight]:
    """What each rank holds when that is most, where a micro-batch of a stage costs of_full(stage), and one of which
    only the weights' gradients are left of_waiting(stage) (default: as much). No durations are needed: a rank's order
    is fixed."""
    weigh = of_waiting or of_full
    return [max(_moments(actions), key=lambda held: held.cost(of_full, weigh)) for actions in order.ranks]


def _moments(actions: Sequence[Action]) -> Iterator[InFlight]:
    """What is held after each action; a backward pass lets go at its end."""
    full: dict[int, int] = {}
    waiting: dict[int, int] = {}
    for action in actions:
        stage = action.stage
        if action.kind is Kind.FORWARD:
            full[stage] = full.get(stage, 0) + 1
        elif action.kind is Kind.WEIGHT:
            waiting[stage] -= 1
        else:
            full[stage] -= 1
            if action.kind is Kind.INPUT:
                waiting[stage] = waiting.get(stage, 0) + 1
        yield InFlight(dict(full), dict(waiting))
