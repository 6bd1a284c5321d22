"""Pipeline parallelism: runs a step's micro-batches through stages on several ranks, after one of torch's schedules.

Owns: the stages as torch.distributed.pipelining sees them, when weight gradients are formed, what is received into
which memory, forward passes without backward (validation), and errors on the way. Does not own: which layers a stage
has (stages.py), the order of work (torch, shown by plan/schedule.py), where gradients live (a GradientSink).

Shapes: T tokens of a micro-batch on this rank, D hidden.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ...conf.pipeline import SCHEDULES
from ..comm import Communicator, Work, lost_peers
from ..linear import WeightGradients
from ..plan.schedule import TORCH_CLASSES
from .stages import StageSpec, rank_of_stage

MicroBatch = TypeVar("MicroBatch")


class Objective(Protocol):
    """What the last stage returns: something with a scalar to differentiate."""

    @property
    def objective(self) -> Tensor: ...


Result = TypeVar("Result", bound=Objective)


@dataclass(frozen=True)
class LocalStage(Generic[MicroBatch, Result]):
    """One stage of this rank. run: (x [T, D], None in the first stage; micro-batch) -> x [T, D], or in the last stage
    the result. Its linear layers leave their weights' gradients in `queue`, which stages of one rank may share."""

    spec: StageSpec
    module: nn.Module
    run: Callable[[Tensor | None, MicroBatch], Tensor | Result]
    queue: WeightGradients


@dataclass(frozen=True)
class Activation:
    """What goes between stages: one tensor per micro-batch, always of this shape."""

    shape: tuple[int, int]  # [T, D]
    dtype: torch.dtype

    def meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=True)


class Pipeline(Generic[MicroBatch, Result]):
    """A schedule over this rank's stages. `before(kind, stage, micro)` is told of each piece of work (heartbeat)."""

    def __init__(
        self,
        schedule: str,
        stages: Sequence[LocalStage[MicroBatch, Result]],
        count: int,
        micro_steps: int,
        activation: Activation,
        comm: Communicator,
        before: Callable[[str, int, int], None] = lambda kind, stage, micro: None,
    ) -> None:
        """Collective over the axis; raises PeerLostError."""
        comm.barrier()  # NCCL forms a group's communicator with its first use, for which transfers need all ranks there
        facts = SCHEDULES[schedule]
        self.stages, self.count, self.micro_steps, self.activation = stages, count, micro_steps, activation
        self._comm, self._is_v = comm, facts.is_v
        self._stages = [_Stage(s, count, activation, comm, facts.is_split, before) for s in stages]
        made = TORCH_CLASSES[schedule]
        self._schedule = made(
            self._stages[0] if facts.most_chunks == 1 else self._stages,
            micro_steps,
            loss_fn=_objective_itself,
            scale_grads=False,
        )
        # The objective needs no target, but torch hands one to it.
        has_last = any(s.spec.is_last for s in stages)
        self._arguments: dict[str, Any] = {"target": torch.zeros(micro_steps)} if has_last else {}

    def forward_backward(self, batches: Sequence[MicroBatch]) -> list[Result]:
        """All micro-batches of a step, forward and backward; gradients are in the queues' sinks when it returns.

        Returns the last stage's results, by micro-batch; none on ranks that do not hold it. Raises PeerLostError.
        """
        assert len(batches) == self.micro_steps
        for stage in self._stages:
            stage.begin(batches)
        with _first_errors():
            self._schedule.step(return_outputs=False, **self._arguments)
        return [result for stage in self._stages for result in stage.take_results()]

    @property
    def busy_seconds(self) -> float:
        """Time that this rank's last step spent in forward and backward passes, as the host sees it."""
        return sum(stage.busy_seconds for stage in self._stages)

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch]) -> list[Result]:
        """Forward only, any number of micro-batches: the last stage's results, none elsewhere. Raises PeerLostError.

        Stage by stage, each for all micro-batches: what a rank waits for was sent before. Between two ranks the
        receives of a stage are posted before its sends, in the order in which the other sends: nothing can lock up,
        even where transfers in both directions share a queue.
        """
        results: list[Result] = []
        sends: list[Work] = []
        local: list[Tensor] = []
        with _first_errors():
            for stage in self.stages:
                to = self._neighbour(stage.spec.index + 1)
                inputs, local = self._inputs(stage.spec, local, len(batches)), []
                for (x_TD, arrival), batch in zip(inputs, batches, strict=True):
                    arrival.wait()
                    output = stage.run(x_TD, batch)
                    if not isinstance(output, Tensor):
                        results.append(output)
                    elif to == self._comm.rank:
                        local.append(output)
                    else:
                        assert to is not None
                        sends.append(self._comm.send_async(output, to))
            for work in sends:
                work.wait()
        return results

    def _inputs(self, spec: StageSpec, local: list[Tensor], count: int) -> list[tuple[Tensor | None, Work]]:
        """Of a stage, by micro-batch: what it gets, and the transfer to wait for. local: outputs of the stage before,
        where that is on this rank."""
        source = self._neighbour(spec.index - 1)
        if source is None:
            return [(None, Work())] * count
        if source == self._comm.rank:
            return [(x_TD, Work()) for x_TD in local]
        buffers = [self._empty() for _ in range(count)]
        return [(x_TD, self._comm.receive_async(x_TD, source)) for x_TD in buffers]

    def _neighbour(self, stage: int) -> int | None:
        """The rank of a stage, None if there is no such stage."""
        return rank_of_stage(stage, self._comm.size, self._is_v) if 0 <= stage < self.count else None

    def _empty(self) -> Tensor:
        return torch.empty(self.activation.shape, dtype=self.activation.dtype, device=self._comm.device)


def _objective_itself(output: Tensor, target: Tensor) -> Tensor:
    return output


class _Stage(PipelineStage, Generic[MicroBatch, Result]):
    """Torch's stage, with these differences: it takes its micro-batches from us and not through the schedule; memory
    to receive into lives as long as its contents are needed, where torch keeps two buffers per micro-batch for good;
    a backward pass that is not split forms the weights' gradients as it goes."""

    def __init__(
        self,
        local: LocalStage[MicroBatch, Result],
        count: int,
        activation: Activation,
        comm: Communicator,
        is_split: bool,
        before: Callable[[str, int, int], None],
    ) -> None:
        spec, x_TD = local.spec, activation.meta()
        objective = torch.empty((), dtype=activation.dtype, device="meta", requires_grad=True)
        super().__init__(
            local.module,
            spec.index,
            count,
            comm.device,
            input_args=() if spec.is_first else (x_TD,),
            output_args=(objective,) if spec.is_last else (x_TD,),
            group=comm.group,
            dw_builder=local.queue.take if is_split else None,
        )
        self._local, self._activation, self._is_split, self._before = local, activation, is_split, before
        self._batches: Sequence[MicroBatch] = ()
        self._results: list[Result] = []
        self._micro = 0
        self.busy_seconds = 0.0

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Void what an interrupted step may have left."""
        self._batches, self.busy_seconds = batches, 0.0
        self._results.clear()
        self._local.queue.clear()

    def take_results(self) -> list[Result]:
        results, self._results, self._batches = self._results, [], ()
        return results

    # What torch calls.

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Any) -> Tensor:
        output = self._local.run(args[0] if args else None, self._batches[self._micro])
        if isinstance(output, Tensor):
            return output
        self._results.append(output)
        return output.objective

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._micro = fwd_chunk_id
        with self._work("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._local.queue.is_deferred = not full_backward
        with self._work("B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._work("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _allocate(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if not info.is_root_arg:
                info.buffer = torch.empty(self._activation.shape, dtype=self._activation.dtype, device=self.device)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """Buffers that torch makes ahead for all micro-batches take no memory."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    @contextmanager
    def _work(self, kind: str, micro: int) -> Iterator[None]:
        self._before(kind, self._local.spec.index, micro)
        began = time.perf_counter()
        yield
        self.busy_seconds += time.perf_counter() - began


# On an error torch prints the whole schedule, once per rank.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


@contextmanager
def _first_errors() -> Iterator[None]:
    """The error that came first, where torch has wrapped it: a lost peer, no memory, a fault in a stage."""
    try:
        with lost_peers():
            yield
    except RuntimeError as error:
        first: BaseException = error
        while type(first) is RuntimeError and first.__cause__ is not None:
            first = first.__cause__
        if first is error:
            raise
        with lost_peers():
            raise first from error
