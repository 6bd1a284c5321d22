"""Rules for optimizer, precision, memory and compiler: what cannot be combined, why, and what works instead."""

from __future__ import annotations

from collections.abc import Iterator

from .fields import show
from .pipeline import SCHEDULES
from .problems import Problem, nearest
from .schema import Config, DataParallel, Fp8, OptimizerKind, ParamDtype, Recompute

# The values of train.params.Role, which this package does not import.
ROLES = ("matrix", "norm", "bias", "embedding", "head", "router")


def memory_rules(config: Config) -> Iterator[Problem]:
    """All of them."""
    for rule in (_optimizer, _rounding, _offload, _recompute, _compile, _fp8):
        yield from rule(config)


def _optimizer(config: Config) -> Iterator[Problem]:
    optim = config.optim
    if optim.muon_lr is not None and optim.muon_lr <= 0:
        yield Problem("optim.muon_lr", show(optim.muon_lr), "expected a positive number")
    if not 0 <= optim.muon_momentum < 1:
        yield Problem("optim.muon_momentum", show(optim.muon_momentum), "expected at least 0 and less than 1")
    if not 1 <= optim.muon_steps <= 20:
        yield Problem("optim.muon_steps", str(optim.muon_steps), "expected 1 to 20 iterations; 5 are usual")
    for role, factor in optim.lr_factors.items():
        if role not in ROLES:
            near = nearest(role, ROLES)
            known = f"did you mean {near}?" if near else f"there are: {', '.join(ROLES)}"
            yield Problem(f"optim.lr_factors.{role}", show(factor), f"no such role; {known}")
        if factor < 0:
            yield Problem(f"optim.lr_factors.{role}", show(factor), "expected 0 (frozen but for decay) or more")


def _rounding(config: Config) -> Iterator[Problem]:
    precision = config.precision
    if precision.stochastic_rounding and precision.params is not ParamDtype.bfloat16:
        message = (
            f"rounds to bfloat16, and precision.params={precision.params.value}; set it to bfloat16, or this to false"
        )
        yield Problem("precision.stochastic_rounding", "true", message)


def _offload(config: Config) -> Iterator[Problem]:
    if not config.memory.offload_optimizer:
        return
    if config.optim.kind is OptimizerKind.muon:
        message = "Muon multiplies whole matrices, too slow on a host; choose optim.kind=adamw, or parallel.data=zero1"
        yield Problem("memory.offload_optimizer", "true", message)
    if config.cluster.gpus_per_node == 0:
        yield Problem(
            "memory.offload_optimizer", "true", "has no effect without GPUs (cluster.gpus_per_node=0)", "warning"
        )


def _recompute(config: Config) -> Iterator[Problem]:
    every = config.memory.recompute_every
    if every < 1:
        yield Problem("memory.recompute_every", str(every), "expected 1 (each layer) or more")
    elif every > 1 and config.memory.recompute is Recompute.none:
        message = "has no effect with memory.recompute=none; choose full or selective"
        yield Problem("memory.recompute_every", str(every), message, "warning")


def _compile(config: Config) -> Iterator[Problem]:
    if not config.kernels.compile:
        return
    p, schedule = config.parallel, config.parallel.pipeline_schedule
    collectives = "its collectives report to the heartbeat, which no graph can hold"
    is_split = p.pipeline > 1 and schedule in SCHEDULES and SCHEDULES[schedule].is_split
    reasons = {
        "memory.recompute=selective: the compiler decides itself what a block recomputes; choose full or none": (
            config.memory.recompute is Recompute.selective
        ),
        "model.dropout > 0: the number of the step would be a constant of the graph; set it to 0": (
            config.model.dropout > 0
        ),
        "a mixture of experts: how many tokens an expert gets is not known beforehand": config.model.num_experts > 0,
        f"parallel.tensor > 1: {collectives}": p.tensor > 1,
        f"parallel.context > 1: {collectives}": p.context > 1,
        f"parallel.data={p.data.value}: it takes weight gradients from the queue only; choose ddp or zero1": (
            p.data in (DataParallel.fsdp, DataParallel.hsdp)
        ),
        f"parallel.pipeline_schedule={schedule}: a compiled block forms all its gradients at once, so nothing can be "
        "deferred; choose gpipe, 1f1b or interleaved": is_split,
    }
    for reason, holds in reasons.items():
        if holds:
            yield Problem("kernels.compile", "true", f"does not go with {reason}")


def _fp8(config: Config) -> Iterator[Problem]:
    fp8 = config.precision.fp8
    if fp8 is Fp8.none:
        return
    field = "precision.fp8"
    if config.precision.params is not ParamDtype.bfloat16:
        message = (
            f"multiplies bfloat16 weights, and precision.params={config.precision.params.value}; set it to bfloat16"
        )
        yield Problem(field, fp8.value, message)
    if config.cluster.gpus_per_node == 0:
        message = "needs GPUs with float8 matrix units (compute capability 8.9 or more), and cluster.gpus_per_node=0"
        yield Problem(field, fp8.value, message)
