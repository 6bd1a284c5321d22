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
        message = (
            "Muon multiplies whole matrices, too slow on a host; choose optim.kind=adamw, or set this to false and cut "
            "the state over ranks by parallel.data=zero1"
        )
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
    p = config.parallel
    reasons = {
        "memory.recompute=selective: the compiler decides itself what a block recomputes; choose full or none": (
            config.memory.recompute is Recompute.selective
        ),
        "model.dropout > 0: the number of the step would be a constant of the graph; set it to 0": (
            config.model.dropout > 0
        ),
        "a mixture of experts: how many tokens an expert gets is not known beforehand": config.model.num_experts > 0,
        "precision.fp8: its layers are found by their weights, which no graph can do": (
            config.precision.fp8 is not Fp8.none
        ),
        "parallel.context > 1: its exchanges report to the heartbeat, which no graph can hold": p.context > 1,
    }
    for reason in [r for r, holds in reasons.items() if holds] + _wants_queue(config):
        yield Problem("kernels.compile", "true", f"does not go with {reason}")


def _fp8(config: Config) -> Iterator[Problem]:
    fp8, params, model = config.precision.fp8, config.precision.params, config.model
    if fp8 is Fp8.none:
        return
    field = "precision.fp8"
    if params is not ParamDtype.bfloat16:
        yield Problem(field, fp8.value, f"multiplies bfloat16 weights, and precision.params={params.value}")
    if config.cluster.gpus_per_node == 0:
        message = "needs GPUs with float8 matrix units (compute capability 8.9 or more), and cluster.gpus_per_node=0"
        yield Problem(field, fp8.value, message)
    width = model.head_dim or model.hidden_size // max(1, model.num_heads)
    sizes = {
        "model.hidden_size": model.hidden_size,
        "model.ffn_size": model.ffn_size,
        "query features": model.num_heads * width,
        "key features": model.num_kv_heads * width,
        "tokens of a micro-batch": config.train.micro_batch * config.data.seq_len // max(1, config.parallel.context),
    }
    for name, size in sizes.items():
        if size % 16:
            yield Problem(field, fp8.value, f"multiplies in blocks of 16, and {name} are {size}; choose a multiple")
    if config.parallel.tensor > 1:
        message = "does not go with parallel.tensor > 1: layers cut over ranks multiply in bfloat16 only; set it to 1"
        yield Problem(field, fp8.value, message)
    for reason in _wants_queue(config):
        yield Problem(field, fp8.value, f"does not go with {reason}")


def _wants_queue(config: Config) -> list[str]:
    """What needs weight gradients to come later than those of the input, or from the queue alone."""
    p, schedule = config.parallel, config.parallel.pipeline_schedule
    reasons = []
    if p.data in (DataParallel.fsdp, DataParallel.hsdp):
        reasons.append(
            f"parallel.data={p.data.value}: it takes weight gradients from the queue only; choose ddp or zero1"
        )
    if p.pipeline > 1 and schedule in SCHEDULES and SCHEDULES[schedule].is_split:
        reasons.append(
            f"parallel.pipeline_schedule={schedule}: all gradients of a block are formed at once, so nothing can be "
            "deferred; choose gpipe, 1f1b or interleaved"
        )
    return reasons
