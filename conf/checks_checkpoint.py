"""Rules for checkpoints: when, where, and which are kept; and for the weights that a run begins with.

Owns: what can be said from the settings, and whether initial weights are there. Whether a place can be written is for
launcher and writers to see, whether the weights are those of this model for the trainer, before its first step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from .problems import Problem
from .schema import Config, Continuation

_LEAST_STAGING = 16  # MB: two halves of two checksum blocks
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s?#]*)?")


def checkpoint_rules(config: Config) -> Iterator[Problem]:
    """All rules of this file."""
    yield from _policy(config)
    yield from _places(config)
    yield from _initial_weights(config)


def _policy(config: Config) -> Iterator[Problem]:
    c = config.checkpoint
    if c.interval == 0 and c.minutes == 0 and config.resilience.continuation is Continuation.requeue:
        message = "with resilience.continuation=requeue: a stop without warning starts again at step 0; set an interval"
        yield Problem("checkpoint.interval", "0", message, "warning")
    if 0 < c.staging_mb < _LEAST_STAGING:
        message = f"expected at least {_LEAST_STAGING}, or 0 for two whole copies where they fit"
        yield Problem("checkpoint.staging_mb", str(c.staging_mb), message)
    if c.keep_best and config.train.eval_interval == 0:
        message = "which are best is known from validation; set train.eval_interval and data.validation_tokens"
        yield Problem("checkpoint.keep_best", str(c.keep_best), message)
    if c.stripes < -1:
        yield Problem("checkpoint.stripes", str(c.stripes), "expected a count, -1 for all targets, 0 for by size")


def _places(config: Config) -> Iterator[Problem]:
    storage, local = config.checkpoint.storage, config.checkpoint.local
    if storage is not None and not _BUCKET.fullmatch(storage) and not PurePosixPath(storage).is_absolute():
        yield Problem("checkpoint.storage", storage, "expected an absolute path, or s3://BUCKET/PREFIX")
    if local is not None and not PurePosixPath(local).is_absolute():
        yield Problem("checkpoint.local", local, "expected an absolute path: a directory on each node's own disk")


def _initial_weights(config: Config) -> Iterator[Problem]:
    chosen = config.model.init_from
    if chosen is not None and not chosen.removeprefix("hf:").strip():
        yield Problem("model.init_from", f"'{chosen}'", "expected hf:DIR, or the directory of a checkpoint")


def initial_files(config: Config) -> Iterator[Problem]:
    """The same for the files of the weights that a run begins with: they are there, and of a model of these sizes."""
    chosen = config.model.init_from or ""
    is_foreign = chosen.startswith("hf:")
    path, expected = Path(chosen.removeprefix("hf:")), "config.json" if is_foreign else "manifest.json"
    if not chosen.removeprefix("hf:").strip():
        return
    if not path.is_dir():
        yield Problem("model.init_from", chosen, "no such directory; expected hf:DIR, or the directory of a checkpoint")
    elif not (path / expected).is_file():
        yield Problem("model.init_from", chosen, f"no {expected} in it{_hint(path, is_foreign)}")
    elif is_foreign and (hint := _hint(path, is_foreign)) and not any((path / name).exists() for name in _WEIGHTS):
        yield Problem("model.init_from", chosen, f"no {_WEIGHTS[0]} in it{hint}")
    else:
        for name, there in _sizes(path / expected).items():
            here = getattr(config.model, name)
            if here != there:
                yield Problem(f"model.{name}", str(here), f"the weights of model.init_from={chosen} have {there}")


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def _hint(path: Path, is_foreign: bool) -> str:
    """What else the directory is. A run and an imported checkpoint have a config.json too."""
    if (path / "run.json").is_file():
        return f"; of a run name one checkpoint: {path}/checkpoints/step-..."
    if is_foreign and (path / "manifest.json").is_file():
        return f"; a checkpoint of stoker's is named without hf: {path}"
    if not is_foreign and (path / "config.json").is_file():
        return f"; for weights of Hugging Face write hf:{path}"
    return ""


_SIZES = {  # by the names that a config.json may have for them
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
}


def _sizes(path: Path) -> dict[str, int]:
    """Of a model, as far as its config.json or manifest.json can be read; the trainer reads them properly."""
    try:
        raw = json.loads(path.read_bytes())
        state = raw.get("state", {})
        known = state.get("model") or {k.removeprefix("model."): v for k, v in state.get("settings", {}).items()}
    except (OSError, ValueError, AttributeError):
        return {}
    values = {name: [known.get(name), *(raw.get(n) for n in theirs)] for name, theirs in _SIZES.items()}
    return {name: v for name, found in values.items() for v in found if type(v) is int}
