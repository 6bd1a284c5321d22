"""Opening a run's data: from settings to a training loader and validation batches, everything checked.

Owns how the parts of this folder are put together, and what of the settings belongs to a run's identity (fingerprints).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .dataset import Batch, Source, TokenDataset, TokenRange
from .fingerprint import Fingerprint, check_unchanged, fingerprint
from .indexed import IndexedTokens
from .loader import Loader, Share, Validation
from .meta import DataMeta, check_tokenizer, meta_path, read_meta
from .sampling import Blend, WindowOrder


@dataclass(frozen=True)
class DataSpec:
    """One data set of the mixture, as configured under data.sources."""

    prefix: str  # of PREFIX.bin and PREFIX.idx
    weight: float = 1.0  # any scale; samples are drawn in these proportions
    name: str | None = None  # key of its sampling order; default: base name of prefix


@dataclass(frozen=True)
class TrainingData:
    """An opened run's data. State to keep: train.consumed_samples and fingerprints."""

    train: Loader
    validation: Validation | None
    fingerprints: list[Fingerprint]  # one per data set, plain JSON values
    windows: int  # samples of sequence_length in the training part, all data sets together
    files: tuple[IndexedTokens, ...]

    def close(self) -> None:
        """End the reading thread and close the files."""
        self.train.close()
        for file in self.files:
            file.close()

    def __enter__(self) -> TrainingData:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def build_data(
    sources: Sequence[DataSpec],
    *,
    sequence_length: int,
    global_batch: int,
    micro_batch: int,
    seed: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    consumed_samples: int = 0,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    validation_tokens: int = 0,
    validation_samples: int | None = None,
    mask_documents: bool = False,
    reset_positions: bool = False,
    shuffle_block: int = 1,
    prefetch: int = 4,
    pin_memory: bool | None = None,
    stored_fingerprints: Sequence[Mapping[str, object]] | None = None,
    cut: Callable[[Batch], Batch] | None = None,
) -> TrainingData:
    """Open the data sets for one data-parallel rank, in time and memory independent of their size.

    consumed_samples: where to go on (a multiple of the global batch, unless that was changed). validation_tokens: kept
    back from the end of each data set; validation_samples: at most so many samples, None for all. stored_fingerprints:
    those of the checkpoint that is resumed. cut: what each batch is passed through.
    Raises ValueError or FileNotFoundError with the field or file, what was found and what was expected.
    """
    if sequence_length < 1 or validation_tokens < 0:
        raise ValueError(
            f"data.seq_len = {sequence_length}, data.validation_tokens = {validation_tokens}: expected >= 1 and >= 0"
        )
    specs = _named(sources)
    share = Share(global_batch, micro_batch, dp_rank, dp_size)
    _check_metas([spec.prefix for spec in specs], vocab_size, tokenizer)
    files = _open([spec.prefix for spec in specs])
    try:
        parts = [_split(file, validation_tokens, sequence_length) for file in files]
        trained = [_source(spec, part[0], seed, shuffle_block) for spec, part in zip(specs, parts, strict=True)]
        prints = _identities(specs, trained, seed)
        if stored_fingerprints is not None:
            check_unchanged(stored_fingerprints, prints)
        blend = Blend.of([spec.weight for spec in specs], seed) if len(specs) > 1 else None
        train = TokenDataset(trained, blend, vocab_size, mask_documents, reset_positions, cut)
        validation = None
        if validation_tokens:
            held = replace(train, sources=[Source(part[1], None) for part in parts], blend=None)
            samples = held.windows if validation_samples is None else min(validation_samples, held.windows)
            validation = Validation(held, samples, micro_batch, dp_rank, dp_size)
        loader = Loader(train, share, consumed_samples=consumed_samples, prefetch=prefetch, pin_memory=pin_memory)
    except BaseException:
        _close(files)
        raise
    return TrainingData(loader, validation, prints, train.windows, tuple(files))


def _named(sources: Sequence[DataSpec]) -> list[DataSpec]:
    """With names filled in; they must differ, being the keys of the sampling orders."""
    if not sources or not all(spec.prefix for spec in sources):
        raise ValueError(
            "data.sources: no data set, or one without a prefix: give data.sources[0].prefix=PATH (no suffix)"
        )
    specs = [replace(spec, name=spec.name or Path(spec.prefix).name) for spec in sources]
    names = [spec.name for spec in specs]
    for j, name in enumerate(names):
        if name in names[:j]:
            raise ValueError(
                f"data.sources[{j}].name = {name!r} is taken by data.sources[{names.index(name)}]: set another"
            )
    return specs


def _check_metas(prefixes: Sequence[str], vocab_size: int | None, tokenizer: Path | None) -> None:
    """Data sets that say how they were made must agree with each other, with the model and with the tokenizer."""
    first: tuple[str, DataMeta] | None = None
    for prefix in prefixes:
        meta = read_meta(prefix)
        if meta is None and tokenizer is not None:
            raise ValueError(
                f"data.tokenizer = {tokenizer}, but {meta_path(prefix)} does not exist: nothing says which tokenizer "
                "made the data; leave data.tokenizer out, or tokenise with `stoker data tokenize`"
            )
        if meta is None:
            continue
        if vocab_size is not None:
            check_tokenizer(prefix, meta, vocab_size, tokenizer)
        if first is not None and first[1].tokenizer_sha256 != meta.tokenizer_sha256:
            raise ValueError(
                f"data.sources: {first[0]} and {prefix} were made by different tokenizers "
                f"(vocab_size {first[1].vocab_size} and {meta.vocab_size}): tokenise them with the same one"
            )
        first = first or (prefix, meta)


def _open(prefixes: Sequence[str]) -> list[IndexedTokens]:
    files: list[IndexedTokens] = []
    try:
        for prefix in prefixes:
            files.append(IndexedTokens(prefix))
    except BaseException:
        _close(files)
        raise
    return files


def _close(files: Sequence[IndexedTokens]) -> None:
    for file in files:
        file.close()


def _split(file: IndexedTokens, validation_tokens: int, sequence_length: int) -> tuple[TokenRange, TokenRange]:
    """Training and validation part: the last tokens, cut at the last document start that leaves at least that many."""
    cut = file.tokens
    if validation_tokens:
        cut = file.last_start_up_to(max(0, file.tokens - validation_tokens))
    parts = TokenRange(file, 0, cut, sequence_length), TokenRange(file, cut, file.tokens, sequence_length)
    for part, name in zip(parts, ("training", "validation"), strict=True):
        if part.windows < 1 and (validation_tokens or name == "training"):
            raise ValueError(
                f"{file.prefix}: {file.tokens} tokens in {file.documents} documents leave {part.stop - part.start} for "
                f"{name}, a sample takes {sequence_length + 1} (data.seq_len + 1): change data.validation_tokens = "
                f"{validation_tokens} (cut at a document boundary) or data.seq_len, or add data"
            )
    return parts


def _source(spec: DataSpec, tokens: TokenRange, seed: int, shuffle_block: int) -> Source:
    if shuffle_block < 1:
        raise ValueError(f"data.shuffle_block = {shuffle_block}: expected at least 1")
    return Source(tokens, WindowOrder(tokens.windows, seed, str(spec.name), min(shuffle_block, tokens.windows)))


def _identities(specs: Sequence[DataSpec], sources: Sequence[Source], seed: int) -> list[Fingerprint]:
    """All that decides which tokens sample i is: a run can be continued only where this is the same."""
    total = sum(spec.weight for spec in specs)
    return [
        {
            "name": str(spec.name),
            "seed": seed,
            "sequence_length": source.tokens.sequence_length,
            "training_tokens": source.tokens.stop,
            "shuffle_block": source.order.run if source.order else 1,
            "share": round(spec.weight / total, 12) if total else 0.0,
            **fingerprint(spec.prefix),
        }
        for spec, source in zip(specs, sources, strict=True)
    ]
