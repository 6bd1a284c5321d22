"""Rules for a mixture of experts: shapes that no layer can have, and how experts may be cut over processes.

Owns: `expert_rules`. How many ranks an axis may have at all is checks_parallel.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from .fields import show
from .problems import Problem
from .schema import Balance, Config, ModelConfig

# What a model without experts does not read.
_FIELDS = (
    "experts_per_token expert_ffn_size shared_expert_ffn_size dense_layers router router_normalize router_scale balance"
    " balance_weight balance_rate router_z_loss"
)


def expert_rules(config: Config) -> Iterator[Problem]:
    model, parallel = config.model, config.parallel
    if model.num_experts < 0 or parallel.expert < 1:
        return  # told as ranges
    if model.num_experts == 0:
        yield from _unread(model)
        if parallel.expert > 1:
            message = "there are no experts to share: set model.num_experts, or 1 here"
            yield Problem("parallel.expert", str(parallel.expert), message)
        return
    yield from _shape(model)
    yield from _balance(model)
    if model.num_experts % parallel.expert:
        works = [n for n in range(1, model.num_experts + 1) if model.num_experts % n == 0]
        near = sorted(works, key=lambda n: (abs(n - parallel.expert), n))[:2]
        message = f"does not divide model.num_experts={model.num_experts}; nearest that work: "
        yield Problem("parallel.expert", str(parallel.expert), message + " or ".join(map(str, sorted(near))))
    if parallel.tensor > 1 and not parallel.sequence:
        message = (
            "with experts and parallel.tensor > 1 each rank routes tokens of its own, so they must be cut: set true"
        )
        yield Problem("parallel.sequence", "false", message)


def _shape(model: ModelConfig) -> Iterator[Problem]:
    if model.experts_per_token > model.num_experts:
        message = f"there are only model.num_experts={model.num_experts}"
        yield Problem("model.experts_per_token", str(model.experts_per_token), message)
    if model.dense_layers >= model.num_layers:
        message = f"leaves none of model.num_layers={model.num_layers} to the experts; set model.num_experts=0 for that"
        yield Problem("model.dense_layers", str(model.dense_layers), message)
    if model.linear_bias:
        yield Problem("model.linear_bias", "true", "experts have no biases; set it to false with model.num_experts")


def _balance(model: ModelConfig) -> Iterator[Problem]:
    plain = ModelConfig()
    for name, reader in (("balance_weight", Balance.loss), ("balance_rate", Balance.bias)):
        value = getattr(model, name)
        if model.balance is not reader and value != getattr(plain, name):
            message = f"has no effect: model.balance={model.balance.value} does not read it, {reader.value} does"
            yield Problem(f"model.{name}", show(value), message, "warning")


def _unread(model: ModelConfig) -> Iterator[Problem]:
    plain = ModelConfig()
    for name in _FIELDS.split():
        value = getattr(model, name)
        if value != getattr(plain, name):
            text = value.value if isinstance(value, Enum) else show(value)
            message = "has no effect: the model has no experts (model.num_experts=0)"
            yield Problem(f"model.{name}", text, message, "warning")
