"""A whole config.json: to settings of our model, and from them.

Owns: choosing the family, refusing by name what cannot be read or written, comparing with settings that a run has.
Does not own: the families (families.py). Standard library alone reads and writes; transformers is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from ...conf.checks import check, errors
from ...conf.schema import Config, ModelConfig, Norm, Positions, RopeScaling
from ..params import head_dim
from .families import FAMILIES, FUNCTION, Family
from .fields import Fields, is_close, show

CONFIG = "config.json"
# What has no influence on weights and logits, or only tells a program how to run the model.
_HARMLESS = """
    _name_or_path architectures model_type transformers_version torch_dtype dtype use_cache initializer_range
    bos_token_id eos_token_id pad_token_id unk_token_id decoder_start_token_id attention_dropout resid_pdrop
    embd_pdrop attn_pdrop hidden_dropout hidden_act max_position_embeddings max_window_layers pretraining_tp
    output_router_logits router_aux_loss_coef router_jitter_noise task_specific_params summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj n_ctx reorder_and_upcast_attn
    is_encoder_decoder is_decoder return_dict output_attentions output_hidden_states chunk_size_feed_forward
    cache_implementation _sliding_window_pattern id2label label2id problem_type
""".split()  # noqa: SIM905 (a list of words)
_ELSEWHERE = {"vision_config": "vision", "audio_config": "audio", "text_config": "vision or audio"}
# What a run may set otherwise than the files say, to go on with longer contexts; it is reported.
CHANGEABLE = {"sliding_window", "global_every", *(name for name in FUNCTION if name.startswith("rope_"))}


@dataclass(frozen=True)
class Described:
    """What a config.json says. unread: fields that nobody here knows."""

    family: Family
    model: ModelConfig
    raw: Mapping[str, Any]
    owned: frozenset[str]  # the fields that were read
    unread: tuple[str, ...]


def read_config(directory: Path) -> Described:
    """The model of a Hugging Face directory.

    Raises:
        ValueError: no config.json, or a model that cannot be taken over; names file, field and value.
    """
    path = directory / CONFIG
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{directory}: no {CONFIG} in it; expected a model's directory as transformers writes"
        ) from None
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: not JSON ({e})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected an object")
    return parse_config(raw, str(path))


def parse_config(raw: Mapping[str, Any], where: str = CONFIG) -> Described:
    """As `read_config`, of what stands in the file."""
    fields = Fields(raw, where)
    family = _family(fields)
    model = checked(replace(ModelConfig(), **family.read(fields)), where)
    unread = sorted(raw.keys() - fields.read - set(_HARMLESS))
    return Described(family, _without_effect_removed(model), raw, frozenset(fields.read), tuple(unread))


def checked(model: ModelConfig, where: str) -> ModelConfig:
    """The model, if there can be one of these sizes and factors; `where` they come from.

    Raises:
        ValueError: it cannot; names setting and value.
    """
    whole = Config()
    config = replace(whole, model=replace(model, init_from=None), data=replace(whole.data, seq_len=1))
    wrong = [str(p) for p in errors(check(config, files=False)) if p.field.startswith("model.")]
    if wrong:
        raise ValueError(f"{where}: {'; '.join(wrong)}")
    return model


def _family(fields: Fields) -> Family:
    for name, kind in _ELSEWHERE.items():
        if fields.get(name) is not None:
            raise ValueError(f"{fields.where}: {name}: the model has a part for {kind}; only text models are taken")
    quantised = fields.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ValueError(f"{fields.where}: quantization_config: quantised weights ({method}) cannot be trained on")
    if fields.get("auto_map"):
        raise ValueError(f"{fields.where}: auto_map: a model with code of its own, which is not run here")
    named = fields.get("architectures") or []
    kind = fields.get("model_type")
    known = {f.architecture: f for f in FAMILIES.values()}
    if not isinstance(named, list) or len(named) > 1 or (named and named[0] not in [*known]):
        raise fields.error("architectures", f"expected one of {', '.join(known)}")
    family = known[named[0]] if named else next((f for f in FAMILIES.values() if f.model_type == kind), None)
    if family is None or family.model_type != kind:
        expected = family.model_type if named and family else ", ".join(f.model_type for f in FAMILIES.values())
        raise fields.error("model_type", f"expected {expected}")
    return family


def write_config(model: ModelConfig, like: Described | None = None) -> tuple[Family, dict[str, Any]]:
    """The family that has this model, and what its config.json says of it.

    like: another model's; where its family can say it, that is taken, and fields of no importance are kept.

    Raises:
        ValueError: no family has it; names the settings that keep the nearest one from it.
    """
    plain = _without_effect_removed(model)
    candidates = list(FAMILIES.values()) if like is None else [like.family]
    failed: list[tuple[str, str]] = []
    for family in candidates:
        try:
            written = family.write(plain)
        except ValueError as e:
            failed.append((str(e), family.name))
            continue
        kept = {} if like is None else {k: v for k, v in like.raw.items() if k not in like.owned}
        head = {"architectures": [family.architecture], "model_type": family.model_type}
        return family, {**head, **kept, **written}
    problems, name = min(failed, key=lambda f: f[0].count("; "))
    raise ValueError(f"none of Hugging Face's families has this model; nearest is {name}: {problems}")


def differences(ours: ModelConfig, theirs: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Settings by which two models differ in weights or in what they compute: (ours, theirs) by name."""
    a, b = _canonical(ours), _canonical(theirs)
    found = {name: (getattr(a, name), getattr(b, name)) for name in sorted(FUNCTION)}
    return {name: pair for name, pair in found.items() if not _is_same(*pair)}


def settings_text(model: ModelConfig) -> dict[str, Any]:
    """The settings that differ from the defaults, as YAML or an override takes them."""
    plain = ModelConfig()
    found = {name: getattr(model, name) for name in ModelConfig.__dataclass_fields__}
    changed = {name: value for name, value in found.items() if value != getattr(plain, name)}
    return {name: value.value if isinstance(value, Enum) else value for name, value in changed.items()}


def explain(name: str, pair: tuple[Any, Any], where: str) -> str:
    """One difference in words."""
    here, there = (show(value.value if isinstance(value, Enum) else value) for value in pair)
    return f"model.{name} = {here}, but {where} says {there}"


def _is_same(a: Any, b: Any) -> bool:
    return is_close(a, b) if isinstance(a, float) and isinstance(b, float) else bool(a == b)


def _without_effect_removed(model: ModelConfig) -> ModelConfig:
    """Settings that nothing reads are set to their defaults."""
    plain, idle = ModelConfig(), set[str]()
    if model.num_experts == 0 or model.dense_layers >= model.num_layers:
        idle |= {"num_experts", "experts_per_token", "expert_ffn_size", "shared_expert_ffn_size", "dense_layers"}
        idle |= {"router", "router_normalize", "router_scale"}
    if model.positions is Positions.learned:
        idle |= {name for name in FUNCTION if name.startswith("rope_")}
    else:
        idle.add("max_positions")
    if model.sliding_window <= 0:
        idle |= {"sliding_window", "global_every", "rope_theta_local"}
    elif model.global_every > model.num_layers:
        idle.add("global_every")
    if model.rope_scaling is RopeScaling.none:
        idle |= {name for name in FUNCTION if name.startswith("rope_") and "theta" not in name}
    elif model.rope_scaling is RopeScaling.linear:
        idle |= {name for name in FUNCTION if name.startswith("rope_") and "theta" not in name}
        idle -= {"rope_scaling", "rope_factor"}
    if model.head_dim is not None and model.head_dim * model.num_heads == model.hidden_size:
        idle.add("head_dim")
    if model.attention_scale is not None and is_close(model.attention_scale, head_dim(model) ** -0.5):
        idle.add("attention_scale")
    if model.norm is Norm.layernorm:
        idle.add("norm_offset")
    return replace(model, **{name: getattr(plain, name) for name in idle})


def _canonical(model: ModelConfig) -> ModelConfig:
    """Equal for two models that are the same, for comparing alone."""
    model = _without_effect_removed(model)
    if model.num_experts:
        model = replace(model, expert_ffn_size=model.expert_ffn_size or model.ffn_size)
        if model.dense_layers == 0:
            model = replace(model, ffn_size=model.expert_ffn_size)
    if model.rope_theta_local == model.rope_theta and model.rope_scaling is RopeScaling.none:
        model = replace(model, rope_theta_local=None)
    return model
