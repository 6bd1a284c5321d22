"""The riskiest composition: hand-written tensor parallelism x FSDP2 x pipelining with a split backward pass.

Blocks of two linear layers over 2 tensor ranks, sharded over 2 data ranks, in 2 x 2 pipeline stages: loss and every
gradient against one process, in float64. Weight gradients arrive in `.grad` long after autograd is done with a block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from stoker.train.comm import Communicator
from stoker.train.grid import Membership, form
from stoker.train.linear import WeightGradients, embed, linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

V, D, H, LAYERS, ROWS, S, MICRO = 11, 6, 10, 4, 2, 3, 4
SCHEDULES = {"interleaved": ScheduleInterleavedZeroBubble, "v": ScheduleZBVZeroBubble}
STAGES = {"interleaved": {0: (0, 2), 1: (1, 3)}, "v": {0: (0, 3), 1: (1, 2)}}


class _Enter(torch.autograd.Function):
    """Into a column-parallel layer: nothing forward, the sum over tensor ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(grad.clone()), None


class _Leave(torch.autograd.Function):
    """Out of a row-parallel layer: the sum over tensor ranks forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, comm: Communicator) -> Tensor:
        return comm.all_reduce(y.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def weight(name: str, *shape: int) -> Tensor:
    """The same values for a name wherever it is built."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(*shape, dtype=torch.float64, generator=generator) / 2


class Block(nn.Module):
    """x + down(silu(up(rmsnorm(x)))): columns of `up` and rows of `down` over tensor ranks."""

    def __init__(self, layer: int, queue: WeightGradients, tensor: Communicator) -> None:
        super().__init__()
        self.queue, self.tensor = queue, tensor
        up, down = weight(f"up{layer}", H, D), weight(f"down{layer}", D, H)
        self.norm = nn.Parameter(1 + weight(f"norm{layer}", D))
        self.up = nn.Parameter(up.chunk(tensor.size, 0)[tensor.rank].clone())
        self.down = nn.Parameter(down.chunk(tensor.size, 1)[tensor.rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        h = _Enter.apply(F.rms_norm(x, (D,), self.norm), self.tensor)
        return x + _Leave.apply(linear(F.silu(linear(h, self.up, self.queue)), self.down, self.queue), self.tensor)


class Stage(nn.Module):
    """Some of the blocks; the first one embeds tokens, the last one returns logits."""

    def __init__(self, layers: list[int], queue: WeightGradients, tensor: Communicator) -> None:
        super().__init__()
        self.queue = queue
        self.blocks = nn.ModuleDict({str(i): Block(i, queue, tensor) for i in layers})
        self.embedding = nn.Parameter(weight("embedding", V, D)) if 0 in layers else None
        self.head = nn.Parameter(weight("head", V, D)) if LAYERS - 1 in layers else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = embed(x, self.embedding, self.queue)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else linear(x, self.head, self.queue)


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def reference(tokens: Tensor, targets: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by name, in this process alone."""
    model = Stage(list(range(LAYERS)), WeightGradients(), Communicator(None, 0, 1, torch.device("cpu")))
    loss = sum_of_losses(model(tokens), targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def shard(stage: Stage, mesh: DeviceMesh) -> None:
    """Sums over data ranks, no means: gloo knows no scaled sum, so the plain one is asked for."""
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(stage, mesh=mesh)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def build(mesh: DeviceMesh, index: int, tensor: Communicator) -> PipelineStage:
    queue = WeightGradients(is_deferred=True)
    module = Stage([index], queue, tensor)
    shard(module, mesh["data"])
    hidden = torch.empty(ROWS, S, D, dtype=torch.float64, requires_grad=True)  # or no gradient would be sent
    return PipelineStage(
        module,
        index,
        LAYERS,
        torch.device("cpu"),
        input_args=torch.empty(ROWS, S, dtype=torch.int64) if index == 0 else hidden,
        output_args=torch.empty(ROWS, S, V, dtype=torch.float64) if index == LAYERS - 1 else hidden,
        group=mesh.get_group("pipeline"),
        dw_builder=queue.take,
    )


def whole(parameter: Tensor, axis: int | None, tensor: Communicator) -> Tensor:
    """The gradient of the logical parameter, gathered over data ranks (by FSDP2) and tensor ranks."""
    assert parameter.grad is not None
    local = parameter.grad.full_tensor()  # type: ignore[attr-defined]
    if axis is None:
        return local
    parts = [torch.zeros_like(local) for _ in range(tensor.size)]
    parts[tensor.rank] = local
    return torch.cat([tensor.all_reduce(part) for part in parts], axis)


def run_schedule(mesh: DeviceMesh, tensor: Communicator, schedule: str) -> dict[str, float]:
    """The largest difference per gradient of this rank's stages, and of the loss where it is known; two steps."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, V, (2, MICRO * ROWS, S), generator=generator) for _ in range(2))
    stages = [build(mesh, i, tensor) for i in STAGES[schedule][mesh.get_local_rank("pipeline")]]
    runner = SCHEDULES[schedule](stages, MICRO, loss_fn=sum_of_losses, scale_grads=False)
    data = mesh.get_local_rank("data")
    for _ in range(2):
        losses: list[Tensor] = []
        for stage in stages:
            stage.submod.zero_grad()
        runner.step(
            *([tokens[data]] if any(s.is_first for s in stages) else []),
            **({"target": targets[data], "losses": losses} if any(s.is_last for s in stages) else {}),
        )
    loss, gradients = reference(tokens.flatten(0, 1), targets.flatten(0, 1))
    found: dict[str, float] = {}
    if losses:
        total = torch.stack(losses).detach().sum()
        torch.distributed.all_reduce(total, group=mesh.get_group("data"))
        found["loss"] = abs(total.item() - loss)
    for stage in stages:
        for name, p in stage.submod.named_parameters():
            axis = {"up": 0, "down": 1}.get(name.split(".")[-1])
            found[name] = (whole(p, axis, tensor) - gradients[name]).abs().max().item()
    return found


def _differences(member: Membership) -> dict[str, dict[str, float]]:
    grid = form(member)
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipeline", "data", "tensor"))
        tensor = Communicator(mesh.get_group("tensor"), mesh.get_local_rank("tensor"), 2, grid.device)
        return {schedule: run_schedule(mesh, tensor, schedule) for schedule in SCHEDULES}
    finally:
        grid.close()


def test_tensor_fsdp_and_split_backward_pipeline_give_the_gradients_of_one_process(run_ranks: Any) -> None:
    ranks = run_ranks(8, _differences)
    blocks = {f"blocks.{i}.{name}" for i in range(LAYERS) for name in ("norm", "up", "down")}
    for schedule in SCHEDULES:
        differences: dict[str, float] = {}
        for found in ranks:
            differences |= {n: max(value, differences.get(n, 0.0)) for n, value in found[schedule].items()}
        assert set(differences) == {"loss", "embedding", "head"} | blocks
        assert max(differences.values()) < 1e-10, (schedule, differences)
