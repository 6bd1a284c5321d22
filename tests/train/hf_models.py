"""What tests of the road to and from Hugging Face share: models with weights, and transformers' side of them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from stoker.conf.schema import ModelConfig
from stoker.kernels import select
from stoker.train.box import Box
from stoker.train.checkpoint.weights import Weight, write_weights
from stoker.train.data.dataset import Batch
from stoker.train.grid import single
from stoker.train.hf.exporting import Options, export_hf
from stoker.train.hf.importing import plain
from stoker.train.hf.weights import open_hf
from stoker.train.init import initialize
from stoker.train.model import Decoder, whole_model
from stoker.train.params import decoder_table
from torch import Tensor

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


def build(config: ModelConfig) -> Decoder:
    """With norms and biases away from their initial values, so that a missing or swapped one shows."""
    model, table = whole_model(config, select()), decoder_table(config)
    initialize(model, table, single(), seed=3)
    torch.manual_seed(5)
    with torch.no_grad():
        for facts in table.owned():
            if facts.init_std == 0.0:
                table.local(model, facts.name).add_(torch.empty(facts.shape).uniform_(-0.4, 0.4))
    return model


def save(model: Decoder, config: ModelConfig, directory: Path) -> Path:
    """A weights-only checkpoint."""
    table = decoder_table(config)
    tensors = {f.name: table.local(model, f.name).detach() for f in table.owned()}
    weights = [Weight(f"model/{n}", t.dtype, tuple(t.shape), lambda t=t: [t]) for n, t in tensors.items()]
    write_weights(directory, weights, plain(config))
    return directory


def exported(model: Decoder, config: ModelConfig, directory: Path) -> Any:
    """transformers' model of an export, in which it missed nothing and found nothing that it does not know."""
    save(model, config, directory / "checkpoint")
    export_hf(directory / "checkpoint", directory / "hf", Options())
    return from_pretrained(directory / "hf")


def from_pretrained(directory: Path, **options: Any) -> Any:
    quiet = io.StringIO()
    with contextlib.redirect_stderr(quiet):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            directory, output_loading_info=True, attn_implementation="eager", **options
        )
    assert not any(found.values()), found
    # What is scattered over threads otherwise has other roundings.
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model.eval()


def whole_weights(directory: Path) -> dict[str, Tensor]:
    """All weights of a Hugging Face directory by our names."""
    source = open_hf(directory)
    found = {}
    for name, shape in source.shapes.items():
        found[name] = torch.empty(shape, dtype=source.dtype(name))
        source.fill(name, Box.whole(shape), found[name])
    source.close()
    return found


def filled(config: ModelConfig, weights: dict[str, Tensor]) -> Decoder:
    """Our model with these weights."""
    model, table = whole_model(config, select()), decoder_table(config)
    assert set(weights) == {f.name for f in table.owned()}
    with torch.no_grad():
        for name, weight in weights.items():
            table.local(model, name).copy_(weight)
    return model


def batch_of(tokens: Tensor) -> Batch:
    rows, length = tokens.shape
    return Batch(tokens, tokens, torch.arange(length).repeat(rows, 1), None, torch.arange(rows))


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


def same_tensors(a: Path, b: Path) -> Sequence[str]:
    """Names by which two directories' safetensors files differ, bit by bit."""
    from safetensors.torch import load_file

    whole = [{}, {}]
    for tensors, directory in zip(whole, (a, b), strict=True):
        for file in sorted(directory.glob("*.safetensors")):
            tensors |= load_file(file)
    first, second = whole
    changed = [n for n in first.keys() & second.keys() if not torch.equal(first[n], second[n])]
    other = [n for n in first.keys() & second.keys() if first[n].dtype != second[n].dtype]
    return sorted({*(first.keys() ^ second.keys()), *changed, *other})
