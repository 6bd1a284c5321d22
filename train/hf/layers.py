"""What differs from layer to layer in config.json: attention windows, and experts.

Owns: turning lists of layers into the regular patterns that our settings can say, and refusing others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...conf.schema import ModelConfig
from .fields import Fields, Settings, cannot

_WINDOW = ("sliding_window", "global_every")
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class SameWindow:
    """All layers have the window, or none. `switch`: the field that must be true for it to count."""

    default: int = 0
    switch: str | None = None

    settings: tuple[str, ...] = _WINDOW

    def read(self, fields: Fields) -> Settings:
        if fields.get("layer_types") and set(fields.get("layer_types")) != {SLIDING}:
            raise fields.error("layer_types", "transformers does not read it for this family; remove it")
        if self.switch is not None and not fields.value(self.switch, bool, False):
            fields.read.add("sliding_window")
            return {"sliding_window": 0}
        is_null = "sliding_window" in fields.raw and fields.get("sliding_window") is None
        return {"sliding_window": 0 if is_null else fields.value("sliding_window", int, self.default)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.sliding_window and model.global_every:
            raise cannot("global_every", model.global_every, "all its layers have the window; expected 0")
        written: dict[str, Any] = {"sliding_window": model.sliding_window or None}
        return written if self.switch is None else {self.switch: bool(model.sliding_window), **written}


@dataclass(frozen=True)
class QwenWindow:
    """Layers have it from `max_window_layers` on, or those that `layer_types` says."""

    settings: tuple[str, ...] = _WINDOW

    def read(self, fields: Fields) -> Settings:
        is_used, layers = fields.value("use_sliding_window", bool, False), fields.value("num_hidden_layers", int)
        first = fields.value("max_window_layers", int, 28)
        types = _types(fields) or [SLIDING if layer >= first else FULL for layer in range(layers)]
        window = fields.value("sliding_window", int, 4096)
        return _pattern(fields, types, window) if is_used else {"sliding_window": 0}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        window = model.sliding_window
        types = _written_types(model)
        first = 0 if window else model.num_layers
        return {
            "use_sliding_window": bool(window),
            "sliding_window": window or None,
            "max_window_layers": first,
            "layer_types": types,
        }


@dataclass(frozen=True)
class GemmaWindow:
    """Every n-th layer sees all, the others have the window."""

    every: int  # n, where config.json leaves the layers' types out

    settings: tuple[str, ...] = _WINDOW

    def read(self, fields: Fields) -> Settings:
        layers = fields.value("num_hidden_layers", int)
        every = fields.value("sliding_window_pattern", int, self.every)
        types = _types(fields) or [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
        return _pattern(fields, types, fields.value("sliding_window", int, 4096))

    def write(self, model: ModelConfig) -> dict[str, Any]:
        # Its masks are made for both kinds of layers, even where only one occurs.
        return {"sliding_window": model.sliding_window or 4096, "layer_types": _written_types(model)}


def _types(fields: Fields) -> list[str] | None:
    found = fields.get("layer_types")
    if found is None:
        return None
    layers = fields.value("num_hidden_layers", int)
    if not isinstance(found, list) or len(found) != layers or not set(found) <= {FULL, SLIDING}:
        raise fields.error("layer_types", f"expected {layers} times {FULL} or {SLIDING}")
    return found


def _pattern(fields: Fields, types: Sequence[str], window: int) -> Settings:
    full = [layer for layer, kind in enumerate(types) if kind == FULL]
    if len(full) == len(types):
        return {"sliding_window": 0}
    every = full[0] + 1 if full else 0
    if full and (every == 1 or full != list(range(every - 1, len(types), every))):
        name = "layer_types" if fields.raw.get("layer_types") else "max_window_layers"
        raise fields.error(name, f"layers {full} see all; here only every n-th can")
    return {"sliding_window": window, "global_every": every}


def _written_types(model: ModelConfig) -> list[str]:
    every = model.global_every
    is_full = [model.sliding_window == 0 or (every > 0 and (i + 1) % every == 0) for i in range(model.num_layers)]
    return [FULL if full else SLIDING for full in is_full]


@dataclass(frozen=True)
class MixtralExperts:
    """All layers have them, and `intermediate_size` is their width."""

    settings: tuple[str, ...] = ("num_experts", "experts_per_token", "ffn_size", "expert_ffn_size", "dense_layers")

    def read(self, fields: Fields) -> Settings:
        return {
            "num_experts": fields.value("num_local_experts", int, 8),
            "experts_per_token": fields.value("num_experts_per_tok", int, 2),
            "ffn_size": fields.value("intermediate_size", int),
        }

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.num_experts == 0 or model.dense_layers:
            raise cannot("dense_layers", model.dense_layers, "all its layers have experts; expected 0")
        return {
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "intermediate_size": model.expert_ffn_size or model.ffn_size,
        }


@dataclass(frozen=True)
class QwenExperts:
    """Layers without them are listed; here these are the first ones."""

    settings: tuple[str, ...] = (
        "num_experts",
        "experts_per_token",
        "ffn_size",
        "expert_ffn_size",
        "dense_layers",
        "router_normalize",
    )

    def read(self, fields: Fields) -> Settings:
        name = "num_experts" if "num_experts" in fields.raw else "num_local_experts"
        return {
            "num_experts": fields.value(name, int, 128),
            "experts_per_token": fields.value("num_experts_per_tok", int, 8),
            "expert_ffn_size": fields.value("moe_intermediate_size", int, 768),
            "router_normalize": fields.value("norm_topk_prob", bool, False),
            "ffn_size": fields.value("intermediate_size", int),
            "dense_layers": self._dense_layers(fields),
        }

    def _dense_layers(self, fields: Fields) -> int:
        layers, step = fields.value("num_hidden_layers", int), fields.value("decoder_sparse_step", int, 1)
        dense = fields.get("mlp_only_layers") or []
        if not isinstance(dense, list) or step < 1:
            raise fields.error("mlp_only_layers", "expected a list of layers, and decoder_sparse_step of at least 1")
        dense = [layer for layer in range(layers) if layer in dense or (layer + 1) % step]
        if dense != list(range(len(dense))):
            name = "decoder_sparse_step" if step > 1 else "mlp_only_layers"
            raise fields.error(name, f"layers {dense} have no experts; here only the first ones can lack them")
        return len(dense)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.num_experts == 0:
            raise cannot("num_experts", 0, "it is made of experts")
        return {
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_ffn_size or model.ffn_size,
            "norm_topk_prob": model.router_normalize,
            "intermediate_size": model.ffn_size,
            "mlp_only_layers": list(range(min(model.dense_layers, model.num_layers))),
            "decoder_sparse_step": 1,
        }
