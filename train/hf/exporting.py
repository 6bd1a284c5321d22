"""From any checkpoint to a directory that transformers loads: weights, config.json, generation settings, tokenizer.

Owns: what lies in the directory that `stoker checkpoint export --hf` makes, and where each part of it comes from. Does
not own: names and geometry (maps.py), files of tensors (write.py), tokenizer files (tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...conf.load import load
from ...conf.problems import ConfigError
from ...conf.schema import Config, ModelConfig, Positions, RopeScaling
from ...launcher.run.files import write_json
from ...launcher.run.layout import RunDir
from ..box import Box
from ..checkpoint.source import CheckpointWeights, open_weights
from ..checkpoint.weights import Weight
from ..data.meta import read_meta
from ..initial import HF, model_of
from ..params import ParamTable, decoder_table
from ..state.agreement import summary
from ..storage.new_directory import new_directory
from .config import CONFIG, Described, read_config, write_config
from .importing import rows_of
from .maps import Layout, Piece, layout
from .tokenizer import GENERATION, IDS, Tokenizer, copy_files, write_generation
from .write import write_tensors

LENGTH = "seq_len"  # in a manifest's state
_TEXT = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Options:
    """dtype: of the weights; default: that the model was trained in. like: a Hugging Face directory from whose
    config.json everything is taken that has no setting of ours; default: that the weights once came from."""

    dtype: torch.dtype | None = None
    limit: int = 5 * 10**9  # bytes of a file
    tokenizer: Path | None = None
    like: Path | None = None


@dataclass(frozen=True)
class Exported:
    family: str
    parameters: int
    dtype: str
    from_masters: bool  # whether the values are those of the float32 masters
    files: tuple[str, ...]
    tokenizer: str | None  # where it came from


def export_hf(
    checkpoint: Path, out: Path, options: Options, progress: Callable[[int, int], object] = lambda n, m: None
) -> Exported:
    """Make the directory `out`, whole or not at all. progress: as of `import_hf`.

    Raises:
        ValueError: `out` exists, no family has this model, or tokenizer and model do not fit.
        InvalidCheckpointError: the checkpoint is damaged.
        OSError: storage refused.
    """
    weights = open_weights(checkpoint)
    try:
        model = model_of(weights.checkpoint.model)
        if model is None:
            raise ValueError(f"{checkpoint}: does not say what model it is of")
        table = decoder_table(model)
        _check(weights, table, checkpoint)
        run = _run_of(checkpoint)
        family, config, like = _config(model, options, checkpoint, run)
        planned = _planned(weights, layout(table, family.rules), options.dtype)
        dtype = _TEXT[planned[0].dtype]
        tokenizer = _tokenizer(options, checkpoint, run, like)
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype  # newer and older name of the same field
        if tokenizer is not None:
            tokenizer.check(model.vocab_size)
        if like is None:
            config |= dict.fromkeys(IDS) if tokenizer is None else tokenizer.ids()
        if model.positions is Positions.rope:
            length = trained_length(checkpoint, weights.checkpoint.manifest.state)
            config.setdefault("max_position_embeddings", _positions(model, length))
        total = sum(t.nbytes for t in planned)
        with new_directory(out) as unfinished:
            unfinished.mkdir()
            files = write_tensors(unfinished, planned, options.limit, lambda count: progress(count, total))
            write_json(unfinished / CONFIG, config)
            if like is None or not copy_files(like, unfinished, (GENERATION,)):
                write_generation(unfinished, config)
            files += [CONFIG, GENERATION, *([] if tokenizer is None else tokenizer.write(unfinished))]
    finally:
        weights.close()
    source = None if tokenizer is None else str(tokenizer.path)
    return Exported(family.name, table.numel, dtype, weights.has_masters, tuple(files), source)


def trained_length(checkpoint: Path, state: Mapping[str, Any]) -> int | None:
    """Tokens of a sequence that the weights were trained on (data.seq_len), as far as that is known. `state`: the
    manifest's, in which tools that take weights out of their run keep it."""
    run, kept = _run_of(checkpoint), state.get(LENGTH)
    return run.data.seq_len if run is not None else kept if isinstance(kept, int) else None


def copy_companions(checkpoint: Path, directory: Path) -> bool:
    """Into a new checkpoint, for `export_hf`: the tokenizer, and what a Hugging Face model says of itself, from beside
    `checkpoint` or from where its run has them. Whether there was a tokenizer. Raises ValueError, OSError: they are
    damaged, or storage refused."""
    run = _run_of(checkpoint)
    like = next((place for place in _places(checkpoint, run) if _described(place) is not None), None)
    if like is not None:
        copy_files(like, directory, (CONFIG, GENERATION))
    tokenizer = _tokenizer(Options(), checkpoint, run, like)
    return bool(copy_files(checkpoint, directory)) or (tokenizer is not None and bool(tokenizer.write(directory)))


def _check(weights: CheckpointWeights, table: ParamTable, where: Path) -> None:
    expected = {f.name: f.shape for f in table.owned()}
    bias = [name for name in weights.shapes if name.endswith(".router_bias")]
    if bias:
        raise ValueError(f"{where}: {bias[0]}: no family has a bias in the choice of experts (model.balance=bias)")
    wrong = sorted(n for n in {*expected, *weights.shapes} if expected.get(n) != weights.shapes.get(n))
    if wrong:
        raise ValueError(f"{where}: weights are not those of its model settings: {summary(wrong)}")


def _planned(weights: CheckpointWeights, pieces: Layout, dtype: torch.dtype | None) -> list[Weight]:
    planned = []
    for name, parts in pieces.theirs.items():
        kept, shape = dtype or weights.trained_dtype(parts[0].name), pieces.shape(name)
        planned.append(Weight(name, kept, shape, partial(rows_of, partial(_fill, weights, parts), shape, kept)))
    return planned


def _fill(weights: CheckpointWeights, pieces: Sequence[Piece], region: Box, out: Tensor) -> None:
    """A region of one of their tensors."""
    for piece in pieces:
        common = piece.yours.intersect(region)
        if common is not None:
            view = piece.as_ours(out[common.slices_in(region)])
            weights.fill(piece.name, piece.to_ours(common), view)


def _run_of(checkpoint: Path) -> Config | None:
    """The settings of the run whose checkpoint it is; None if it lies elsewhere, or they are of another version."""
    run = RunDir(checkpoint.absolute().parent.parent)
    if not run.run.is_file() or not run.config_json.is_file():
        return None
    try:
        return load(run.config_json)
    except ConfigError:
        return None


def _config(
    model: ModelConfig, options: Options, checkpoint: Path, run: Config | None
) -> tuple[Any, dict[str, Any], Path | None]:
    """Family, config.json, and the directory that it is like."""
    if options.like is not None:
        return *write_config(model, read_config(options.like)), options.like
    for place in _places(checkpoint, run):
        like = _described(place)
        if like is not None:
            try:
                return *write_config(model, like), place
            except ValueError:  # it has become another model since
                continue
    return *write_config(model), None


def _places(checkpoint: Path, run: Config | None) -> list[Path]:
    """Where a Hugging Face model may have left a description: beside the weights, or where the run began."""
    origin = None if run is None else run.model.init_from
    return [checkpoint] if origin is None else [checkpoint, Path(origin.removeprefix(HF))]


def _described(directory: Path) -> Described | None:
    try:
        return read_config(directory)
    except ValueError:
        return None


def _tokenizer(options: Options, checkpoint: Path, run: Config | None, like: Path | None) -> Tokenizer | None:
    """The one that is named, that of the run's settings or data, that beside the weights it began with, or beside the
    checkpoint."""
    if options.tokenizer is not None:
        if not options.tokenizer.exists():
            raise ValueError(f"--tokenizer {options.tokenizer}: no such file or directory")
        return Tokenizer(options.tokenizer)
    prefixes = [] if run is None else [source.prefix for source in run.data.sources]
    eod = next((meta.eod for meta in map(read_meta, prefixes) if meta is not None), None)
    named = [] if run is None or run.data.tokenizer is None else [Path(run.data.tokenizer)]
    for path in [*named, *(Path(f"{prefix}.tokenizer.json") for prefix in prefixes)]:
        if path.is_file():
            return Tokenizer(path, eod)
    beside = [Tokenizer(place) for place in (like, checkpoint) if place is not None]
    return next((t for t in beside if t.file is not None), None)


def _positions(model: ModelConfig, length: int | None) -> int:
    """The longest sequences that it is made for, as far as it is known. length: of `trained_length`."""
    trained = length or 2048
    has_length = model.rope_scaling in (RopeScaling.llama3, RopeScaling.yarn)
    return max(trained, int(model.rope_factor * model.rope_original_length) if has_length else 0)
