"""The layout of a run's processes: how many ranks lie on each axis, where a rank is, and who shares what with it.

Owns: sizes, coordinates and groups, as plain numbers. Standard library only, so that launcher and planner can ask;
forming process groups is train/grid.py's.

Order of the axes, outermost first: pipeline, data, context, tensor; neighbours in the last one are neighbouring ranks.
Experts are folded over what lies inside a pipeline stage: the ranks of a stage, in order, are cut into groups of
`expert` neighbours that share one set of experts, whatever data, context and tensor are (parallel folding, Liu et al.
2025, arXiv:2504.14960).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from .problems import Problem
from .schema import Config, DataParallel


class LayoutError(ValueError):
    """Sizes that do not fit together: one problem with the configuration."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. `data_shard`: hsdp's ranks per copy, a part of data x context. `kv_replicas`: tensor ranks
    that hold the same key and value heads."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    data_shard: int = 1
    kv_replicas: int = 1

    def __post_init__(self) -> None:
        assert min(self.data, self.tensor, self.pipeline, self.context, self.expert) >= 1
        if self.stage % self.expert:
            product = f"{self.data} x {self.context} x {self.tensor} = {self.stage}"
            message = f"does not divide data x context x tensor = {product}; {_divisors(self.stage, self.expert)}"
            raise LayoutError(Problem("parallel.expert", str(self.expert), message))

    @staticmethod
    def of(config: Config, world_size: int) -> Layout:
        """The layout of `world_size` ranks.

        Raises:
            LayoutError: they do not divide.
        """
        p = config.parallel
        model_ranks = p.pipeline * p.context * p.tensor
        if world_size % model_ranks:
            field = next(f for f in ("tensor", "context", "pipeline") if getattr(p, f) > 1)
            product = f"pipeline x context x tensor = {p.pipeline} x {p.context} x {p.tensor} = {model_ranks}"
            message = f"{product} does not divide the number of processes, {world_size}; change one of them"
            raise LayoutError(Problem(f"parallel.{field}", str(getattr(p, field)), message))
        data = world_size // model_ranks
        shard = data * p.context
        if p.data is DataParallel.hsdp:
            of_node = max(1, config.cluster.procs_per_node // p.tensor)
            shard = p.data_shard or gcd(of_node, data * p.context)
            if data * p.context % shard:
                product = f"{data} x {p.context} = {data * p.context}"
                message = f"does not divide data x context = {product}; {_divisors(data * p.context, shard)}"
                raise LayoutError(Problem("parallel.data_shard", str(shard), message))
        return Layout(
            data, p.tensor, p.pipeline, p.context, p.expert, shard, max(1, p.tensor // config.model.num_kv_heads)
        )

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data * self.context * self.tensor

    @property
    def world(self) -> int:
        return self.pipeline * self.stage

    @property
    def dense(self) -> int:
        """Ranks over which gradients of dense parameters are summed: data x context."""
        return self.data * self.context

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of every axis and combination that `group` knows, by name."""
        return {
            "tensor": self.tensor,
            "context": self.context,
            "data": self.data,
            "pipeline": self.pipeline,
            "dense": self.dense,
            "stage": self.stage,
            "expert": self.expert,
            "expert_data": self.stage // self.expert,
            "shard": self.data_shard,
            "replicate": self.dense // self.data_shard,
            "kv": self.kv_replicas,
            "tied": 2 if self.pipeline > 1 else 1,
            "world": self.world,
        }

    def group(self, axis: str, rank: int) -> list[int]:
        """The ranks that differ from `rank` only along `axis`, in order; `rank` is among them, except that of `tied`
        (first and last stage) only those of the first and last stage are; for others it is a group of one.

        dense: data and context together; shard, replicate: its inner and outer part; stage: all of the pipeline stage;
        expert: those that share one set of experts; expert_data: those that hold the same experts; kv: those that hold
        the same key and value heads; world: all.
        """
        stage, inside = divmod(rank, self.stage)
        dense, tensor = divmod(inside, self.tensor)
        first = stage * self.stage
        if axis == "tensor":
            inner = [dense * self.tensor + t for t in range(self.tensor)]
        elif axis == "kv":
            start = tensor // self.kv_replicas * self.kv_replicas
            inner = [dense * self.tensor + start + t for t in range(self.kv_replicas)]
        elif axis == "context":
            inner = [(dense // self.context * self.context + c) * self.tensor + tensor for c in range(self.context)]
        elif axis == "data":
            inner = [(d * self.context + dense % self.context) * self.tensor + tensor for d in range(self.data)]
        elif axis == "dense":
            inner = [d * self.tensor + tensor for d in range(self.dense)]
        elif axis == "shard":
            start = dense // self.data_shard * self.data_shard
            inner = [(start + d) * self.tensor + tensor for d in range(self.data_shard)]
        elif axis == "replicate":
            inner = [
                (d * self.data_shard + dense % self.data_shard) * self.tensor + tensor
                for d in range(self.dense // self.data_shard)
            ]
        elif axis == "stage":
            inner = list(range(self.stage))
        elif axis == "expert":
            inner = [inside // self.expert * self.expert + e for e in range(self.expert)]
        elif axis == "expert_data":
            inner = [d * self.expert + inside % self.expert for d in range(self.stage // self.expert)]
        elif axis == "pipeline":
            return [s * self.stage + inside for s in range(self.pipeline)]
        elif axis == "tied":
            ends = sorted({0, self.pipeline - 1})
            return [s * self.stage + inside for s in ends] if stage in ends else [rank]
        else:
            assert axis == "world", axis
            return list(range(self.world))
        return [first + i for i in inner]

    def index(self, axis: str, rank: int) -> int:
        """Where `rank` stands in its group."""
        return self.group(axis, rank).index(rank)


def _divisors(value: int, wanted: int) -> str:
    """`nearest that work: 2 or 4`: the divisors of `value` below and above `wanted`."""
    divisors = [n for n in range(1, value + 1) if value % n == 0]
    near = [*[n for n in divisors if n < wanted][-1:], *[n for n in divisors if n > wanted][:1]]
    return f"nearest that work: {' or '.join(map(str, near))}"
