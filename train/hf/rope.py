"""Rotary frequencies in config.json: base, and how they are stretched to longer contexts.

Owns: `rope_theta` with `rope_scaling` (all versions of transformers read these, and they are what is written), and
`rope_parameters`, which newer ones write. The frequencies themselves are model/rotary.py's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...conf.schema import ModelConfig, RopeScaling
from .fields import Fields, Settings, cannot, is_close

_SCALING = (
    "rope_scaling",
    "rope_factor",
    "rope_original_length",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_beta_fast",
    "rope_beta_slow",
)
_KINDS = {"linear": RopeScaling.linear, "llama3": RopeScaling.llama3, "yarn": RopeScaling.yarn}


@dataclass(frozen=True)
class Rope:
    """One kind of frequencies for all layers. `default_theta`: the base where config.json leaves it out."""

    default_theta: float = 10000.0

    settings: tuple[str, ...] = ("rope_theta", *_SCALING)

    def read(self, fields: Fields) -> Settings:
        parameters = _parameters(fields, "rope_parameters")
        scaling = _parameters(fields, "rope_scaling")
        if any(isinstance(value, dict) for value in (parameters or {}).values()):
            raise fields.error("rope_parameters", "frequencies per kind of layer; this family has one kind here")
        theta = fields.value("rope_theta", float, self.default_theta)
        return _read(fields, scaling or parameters or {}, "rope_scaling" if scaling else "rope_parameters", theta)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"rope_theta": model.rope_theta, "rope_scaling": _written(model)}


@dataclass(frozen=True)
class RopePair:
    """Gemma 3's: layers with a window have a base of their own, and are never stretched."""

    settings: tuple[str, ...] = ("rope_theta", "rope_theta_local", *_SCALING)

    def read(self, fields: Fields) -> Settings:
        nested = _parameters(fields, "rope_parameters") or {}
        full, local = nested.get("full_attention") or {}, nested.get("sliding_attention") or {}
        if nested.keys() - {"full_attention", "sliding_attention"}:
            raise fields.error("rope_parameters", "expected full_attention and sliding_attention")
        scaling = _parameters(fields, "rope_scaling")
        theta = fields.value("rope_theta", float, 1e6)
        theta_local = fields.value("rope_local_base_freq", float, 1e4)
        found = _read(fields, {**full, **(scaling or {})}, "rope_scaling" if scaling else "rope_parameters", theta)
        other = _read(fields, local, "rope_parameters", theta_local)
        if "rope_scaling" in other:
            raise fields.error("rope_parameters", "sliding_attention is stretched; here only full_attention can be")
        return {**found, "rope_theta_local": other["rope_theta"]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        local = model.rope_theta_local
        if local is None and model.sliding_window and model.rope_scaling is not RopeScaling.none:
            raise cannot("rope_theta_local", None, "its layers with a window have a base of their own; set it")
        if not model.sliding_window:
            local = local or 1e4
        return {
            "rope_theta": model.rope_theta,
            "rope_local_base_freq": model.rope_theta if local is None else local,
            "rope_scaling": _written(model),
        }


def _parameters(fields: Fields, name: str) -> dict[str, Any] | None:
    found = fields.get(name)
    if found is not None and not isinstance(found, dict):
        raise fields.error(name, "expected an object")
    return found


def _read(fields: Fields, parameters: dict[str, Any], name: str, theta: float) -> Settings:
    """The settings of one kind of layer. `name`: of the field, for messages; theta: unless `parameters` have one."""
    inner = Fields(parameters, f"{fields.where}: {name}")
    theta = inner.value("rope_theta", float, theta)
    kind = inner.get("rope_type") or inner.get("type") or "default"
    inner.read.add("type")
    if kind not in ("default", *_KINDS):
        expected = ", ".join(["default", *_KINDS])
        raise ValueError(f"{inner.where}: rope_type = {kind!r}: there is none such here; expected one of {expected}")
    if inner.value("partial_rotary_factor", float, 1.0) != 1.0 or fields.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"{inner.where}: partial_rotary_factor: here all features of a head turn; expected 1.0")
    if kind == "default":
        return {"rope_theta": theta}
    found: Settings = {"rope_theta": theta, "rope_scaling": _KINDS[kind], "rope_factor": inner.value("factor", float)}
    if kind != "linear":
        length = fields.raw.get("max_position_embeddings")  # not owned: it may stay as it is when others change
        found["rope_original_length"] = inner.value("original_max_position_embeddings", int, length)
    if kind == "llama3":
        found["rope_low_freq_factor"] = inner.value("low_freq_factor", float)
        found["rope_high_freq_factor"] = inner.value("high_freq_factor", float)
    if kind == "yarn":
        found["rope_beta_fast"] = inner.value("beta_fast", float, 32.0)
        found["rope_beta_slow"] = inner.value("beta_slow", float, 1.0)
        _check_yarn(inner, found["rope_factor"])
    unknown = sorted(parameters.keys() - inner.read - {"finetuned", "original_max_position_embeddings"})
    if unknown:
        raise ValueError(f"{inner.where}: {unknown[0]} = {parameters[unknown[0]]!r}: has no setting here")
    return found


def _check_yarn(inner: Fields, factor: float) -> None:
    """What makes cosines and sines larger is the paper's here, and the ends of the ramp are rounded."""
    usual = 0.1 * math.log(max(factor, 1.0)) + 1.0
    if not is_close(inner.value("attention_factor", float, usual), usual):
        raise inner.error("attention_factor", f"expected 0.1 ln(factor) + 1 = {usual}")
    for name in ("mscale", "mscale_all_dim"):
        if inner.get(name):
            raise inner.error(name, "has no setting here")
    if not inner.value("truncate", bool, True):
        raise inner.error("truncate", "expected true")


def _written(model: ModelConfig) -> dict[str, Any] | None:
    kind = model.rope_scaling
    if kind is RopeScaling.none:
        return None
    written: dict[str, Any] = {"rope_type": kind.value, "factor": model.rope_factor}
    if kind is not RopeScaling.linear:
        written["original_max_position_embeddings"] = model.rope_original_length
    if kind is RopeScaling.llama3:
        written["low_freq_factor"] = model.rope_low_freq_factor
        written["high_freq_factor"] = model.rope_high_freq_factor
    if kind is RopeScaling.yarn:
        written |= {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow}
    return written
