"""Rules between the fields of `model`: shapes that no model can have, and switches that would have no effect.

Owns: `model_rules`. Ranges of single fields are checks.py's, how a model is cut over processes checks_parallel.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .fields import show
from .problems import Problem
from .schema import Config, ModelConfig, Norm, Positions, RopeScaling

# What only one kind of scaling of the rotary frequencies reads.
_OF_SCALING = {
    "rope_factor": (RopeScaling.linear, RopeScaling.llama3, RopeScaling.yarn),
    "rope_original_length": (RopeScaling.llama3, RopeScaling.yarn),
    "rope_low_freq_factor": (RopeScaling.llama3,),
    "rope_high_freq_factor": (RopeScaling.llama3,),
    "rope_beta_fast": (RopeScaling.yarn,),
    "rope_beta_slow": (RopeScaling.yarn,),
}


def model_rules(config: Config) -> Iterator[Problem]:
    model = config.model
    if min(model.num_heads, model.num_kv_heads, model.hidden_size) >= 1:
        yield from _heads(model)
    for rule in (_norms, _windows, _scaling):
        yield from rule(model)
    yield from _positions(model, config.data.seq_len)
    if model.sliding_window >= config.data.seq_len > 0:
        message = f"has no effect on samples of data.seq_len={config.data.seq_len}; 0 says the same"
        yield _warning("sliding_window", model.sliding_window, message)


def _heads(model: ModelConfig) -> Iterator[Problem]:
    heads, groups, hidden = model.num_heads, model.num_kv_heads, model.hidden_size
    if heads % groups:
        near = nearest_of([n for n in range(1, heads + 1) if heads % n == 0], groups)
        yield Problem("model.num_kv_heads", str(groups), f"does not divide model.num_heads={heads}; nearest: {near}")
    turns_pairs = model.positions is Positions.rope
    if model.head_dim is None and hidden % heads:
        below, above = around(hidden, heads)
        message = f"not a multiple of model.num_heads={heads}; nearest: {below} or {above}, or set model.head_dim"
        yield Problem("model.hidden_size", str(hidden), message)
    elif turns_pairs and model.head_dim is None and (hidden // heads) % 2:
        message = f"gives heads of {hidden // heads}; rotary embedding turns pairs, so set an even model.head_dim"
        yield Problem("model.hidden_size", str(hidden), message)
    elif turns_pairs and model.head_dim is not None and model.head_dim % 2:
        yield Problem("model.head_dim", str(model.head_dim), "expected an even number: rotary embedding turns pairs")


def _norms(model: ModelConfig) -> Iterator[Problem]:
    if model.norm is Norm.layernorm and model.norm_offset:
        message = "only RMSNorm has an offset; set it to 0 with model.norm=layernorm"
        yield Problem("model.norm_offset", show(model.norm_offset), message)


def _windows(model: ModelConfig) -> Iterator[Problem]:
    if model.sliding_window <= 0:
        if model.global_every:
            yield _no_effect(
                "global_every", model.global_every, "without model.sliding_window all layers attend to all"
            )
        if model.rope_theta_local is not None:
            message = "is for layers with a sliding window; set model.sliding_window, or model.rope_theta instead"
            yield Problem("model.rope_theta_local", show(model.rope_theta_local), message)
    elif model.global_every == 1:
        message = "lets every layer attend to all; set model.sliding_window=0 for that"
        yield Problem("model.global_every", "1", message)
    elif model.global_every > model.num_layers:
        yield _no_effect("global_every", model.global_every, f"there are only model.num_layers={model.num_layers}")


def _positions(model: ModelConfig, seq_len: int) -> Iterator[Problem]:
    if model.positions is Positions.learned:
        if model.max_positions < seq_len:
            message = f"has no row for every token of a sample; expected at least data.seq_len={seq_len}"
            yield Problem("model.max_positions", str(model.max_positions), message)
        if model.rope_scaling is not RopeScaling.none:
            message = "stretches rotary frequencies, which model.positions=learned has not; set it to none"
            yield Problem("model.rope_scaling", model.rope_scaling.value, message)
    elif model.max_positions:
        yield _no_effect("max_positions", model.max_positions, "only model.positions=learned has rows of positions")


def _scaling(model: ModelConfig) -> Iterator[Problem]:
    kind, plain = model.rope_scaling, ModelConfig()
    for name, readers in _OF_SCALING.items():
        value = getattr(model, name)
        if kind not in readers and value != getattr(plain, name):
            readable = " or ".join(reader.value for reader in readers)
            yield _no_effect(name, value, f"model.rope_scaling={kind.value} does not read it, {readable} does")
    if kind is not RopeScaling.none and 0 < model.rope_factor < 1:
        yield Problem("model.rope_factor", show(model.rope_factor), "would shorten the context; expected at least 1")
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if kind is RopeScaling.llama3 and low >= high > 0:
        message = f"expected less than model.rope_high_freq_factor={show(high)}"
        yield Problem("model.rope_low_freq_factor", show(low), message)
    slow, fast = model.rope_beta_slow, model.rope_beta_fast
    if kind is RopeScaling.yarn and slow >= fast > 0:
        yield Problem("model.rope_beta_slow", show(slow), f"expected less than model.rope_beta_fast={show(fast)}")


def around(value: int, step: int) -> tuple[int, int]:
    """The multiples of `step` below and above."""
    return value // step * step, (value // step + 1) * step


def nearest_of(values: Sequence[int], wanted: int) -> int:
    return min(values, key=lambda n: (abs(n - wanted), n))


def _no_effect(name: str, value: object, reason: str) -> Problem:
    return _warning(name, value, f"has no effect: {reason}")


def _warning(name: str, value: object, message: str) -> Problem:
    return Problem(f"model.{name}", show(value), message, "warning")
