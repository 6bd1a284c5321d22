"""config.json field by field: typed access that remembers what was read, and the aspects that families are made of.

Owns: `Aspect`, which turns a few fields of a config.json into settings of ours and back, and the plain ones among them.
Rotary frequencies are rope.py's, attention windows and experts layers.py's; which family has which is families.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol, TypeVar

from ...conf.schema import ModelConfig
from ..params import head_dim

Settings = dict[str, Any]  # of ModelConfig, by field
T = TypeVar("T", int, float, bool, str)
_LARGEST = 2**53  # whole numbers up to it are the same as floating-point ones
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


class Fields:
    """A config.json, or an object inside one. `read` are the names that were asked for."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where, self.read = raw, where, set[str]()

    def get(self, name: str) -> Any:
        """The value as it stands there; None if it is not."""
        self.read.add(name)
        return self.raw.get(name)

    def value(self, name: str, kind: type[T], default: T | None = None) -> T:
        """A value of this type; `default` where there is none, or null.

        Raises:
            ValueError: it is missing and has no default, or is of another type.
        """
        found = self.get(name)
        if found is None:
            if default is None:
                raise ValueError(f"{self.where}: {name} is missing")
            return default
        is_number = kind is float and type(found) is int
        if type(found) is not kind and not is_number:
            raise self.error(name, f"expected {_WORDS[kind]}")
        if kind in (int, float) and not abs(found) <= _LARGEST:  # NaN is not either
            raise self.error(name, "no number that a model has")
        return kind(found)

    def error(self, name: str, message: str) -> ValueError:
        """For a value that cannot be taken over."""
        return ValueError(f"{self.where}: {name} = {show(self.raw.get(name))}: {message}")


def show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Aspect(Protocol):
    """Some settings of ours and the fields that say the same in a config.json."""

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings of ModelConfig that it speaks for."""

    def read(self, fields: Fields) -> Settings:
        """Raises ValueError: there is no setting of ours for a value; names field and value."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Raises ValueError: the family has no field for a setting; names setting and value."""


def cannot(setting: str, value: Any, message: str) -> ValueError:
    """A setting that the family has no field for."""
    return ValueError(f"model.{setting} = {show(getattr(value, 'value', value))}: {message}")


@dataclass(frozen=True)
class Field:
    """One setting under another name."""

    ours: str
    theirs: str
    kind: type = int
    default: Any = None  # what a config.json means that leaves it out; None: it must be there

    @property
    def settings(self) -> tuple[str, ...]:
        return (self.ours,)

    def read(self, fields: Fields) -> Settings:
        return {self.ours: fields.value(self.theirs, self.kind, self.default)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.theirs: getattr(model, self.ours)}


@dataclass(frozen=True)
class Only:
    """A field for which there is one value alone that we can compute with, or a few names of the same."""

    theirs: str
    values: tuple[Any, ...]  # the first is what is written
    default: Any = None  # what a config.json means that leaves it out; None: the first value

    settings: tuple[str, ...] = ()

    def read(self, fields: Fields) -> Settings:
        found = fields.get(self.theirs)
        default = self.values[0] if self.default is None else self.default
        if (default if found is None else found) not in self.values:
            expected = " or ".join(map(show, self.values))
            raise fields.error(self.theirs, f"there is no such model here; expected {expected}")
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.theirs: self.values[0]}


@dataclass(frozen=True)
class Cap:
    """A soft cap: 0 here, null there, for none."""

    ours: str
    theirs: str
    default: float | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        return (self.ours,)

    def read(self, fields: Fields) -> Settings:
        if self.theirs in fields.raw and fields.get(self.theirs) is None:
            return {self.ours: 0.0}
        return {self.ours: fields.value(self.theirs, float, self.default or 0.0)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.theirs: getattr(model, self.ours) or None}


@dataclass(frozen=True)
class Heads:
    """Attention heads. `default`: what `head_dim` means where it is left out; None: hidden_size / heads.

    must_divide: transformers refuses a hidden_size that is no multiple of the heads, whatever head_dim says.
    """

    default: int | None = None
    default_kv: int | None = None  # None: as many as query heads
    must_divide: bool = False

    settings: tuple[str, ...] = ("num_heads", "num_kv_heads", "head_dim", "hidden_size")

    def read(self, fields: Fields) -> Settings:
        heads, hidden = fields.value("num_attention_heads", int), fields.value("hidden_size", int)
        if heads < 1:
            raise fields.error("num_attention_heads", "expected at least 1")
        kv_heads = fields.value("num_key_value_heads", int, self.default_kv or heads)
        width = fields.value("head_dim", int, self.default or hidden // heads)
        plain = heads * width == hidden
        return {
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": None if plain else width,
            "hidden_size": hidden,
        }

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if self.must_divide and model.hidden_size % model.num_heads:
            raise cannot("hidden_size", model.hidden_size, f"expected a multiple of model.num_heads={model.num_heads}")
        return {
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": head_dim(model),
            "hidden_size": model.hidden_size,
        }


@dataclass(frozen=True)
class Biases:
    """Llama's: those of attention and of the feed-forward layer. Ours: of queries, keys and values, and all others."""

    settings: tuple[str, ...] = ("qkv_bias", "linear_bias")

    def read(self, fields: Fields) -> Settings:
        attention, mlp = fields.value("attention_bias", bool, False), fields.value("mlp_bias", bool, False)
        if attention is not mlp:
            raise fields.error(
                "attention_bias", f"with mlp_bias = {mlp}: here all projections of the blocks have biases, or none"
            )
        return {"qkv_bias": attention, "linear_bias": mlp}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.qkv_bias is not model.linear_bias:
            raise cannot("qkv_bias", model.qkv_bias, f"expected as model.linear_bias={model.linear_bias}")
        return {"attention_bias": model.qkv_bias, "mlp_bias": model.linear_bias}


@dataclass(frozen=True)
class GemmaScales:
    """Of the embedding (the square root of hidden_size) and of the scores (a whole number to the power of -1/2)."""

    settings: tuple[str, ...] = ("embedding_scale", "attention_scale")

    def read(self, fields: Fields) -> Settings:
        scalar = fields.value("query_pre_attn_scalar", float, 256.0)
        if scalar <= 0:
            raise fields.error("query_pre_attn_scalar", "expected a positive number")
        return {"embedding_scale": sqrt(fields.value("hidden_size", int)), "attention_scale": scalar**-0.5}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        expected = sqrt(model.hidden_size)
        if not is_close(model.embedding_scale, expected):
            raise cannot("embedding_scale", model.embedding_scale, f"expected sqrt(hidden_size) = {expected}")
        scale = head_dim(model) ** -0.5 if model.attention_scale is None else model.attention_scale
        scalar = round(scale**-2) if scale > 0 else 0
        if scalar < 1 or not is_close(scale, scalar**-0.5):
            raise cannot("attention_scale", scale, "expected a whole number to the power of -1/2")
        return {"query_pre_attn_scalar": scalar}


def is_close(a: float, b: float) -> bool:
    """Equal but for the rounding of what was written as a decimal number."""
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
