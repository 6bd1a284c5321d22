"""Rules for the data: how the sources are given, and whether the files suit the model.

Owns: looking at PREFIX.bin, PREFIX.idx and PREFIX.meta.json as far as a launch can in no time. The trainer opens them
properly and checks every token it reads; here the mistakes are found that would otherwise cost a wait in the queue.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .fields import show
from .problems import Problem
from .schema import Config

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the token type, sequences, documents + 1; little endian
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}  # by the code in the header; Megatron-LM's IndexedDataset
_MAKE = "`stoker data tokenize` makes it"


def data_rules(config: Config) -> Iterator[Problem]:
    """Rules that look at no file."""
    sources = config.data.sources
    if not sources:
        yield Problem("data.sources", "[]", f"no data; give data.sources='[{{prefix: PATH}}]', {_MAKE}")
    taken: dict[str, int] = {}
    for position, source in enumerate(sources):
        field = f"data.sources.{position}"
        if not source.prefix:
            yield Problem(f"{field}.prefix", "", f"expected the path of tokenised data, without .bin; {_MAKE}")
        elif source.prefix.endswith((".bin", ".idx")):
            yield Problem(f"{field}.prefix", source.prefix, f"leave out {source.prefix[-4:]}; both files belong to it")
        if source.weight <= 0:
            yield Problem(f"{field}.weight", show(source.weight), "expected a positive number; or leave the source out")
        name = source.name or Path(source.prefix).name
        if name in taken:
            message = f"also the name of data.sources.{taken[name]}; it keys the sampling order, so give another"
            yield Problem(f"{field}.name", name, message)
        taken[name] = position
    if config.data.reset_positions and not config.data.mask_documents:
        message = "documents still attend to each other, at positions that overlap; set data.mask_documents=true too"
        yield Problem("data.reset_positions", "true", message, "warning")


def file_rules(config: Config) -> Iterator[Problem]:
    """Rules that look at the files which the configuration names."""
    given = [
        (f"data.sources.{position}.prefix", source.prefix)
        for position, source in enumerate(config.data.sources)
        if source.prefix and not source.prefix.endswith((".bin", ".idx"))
    ]
    for field, prefix in given:
        yield from _tokens(config, field, prefix)
    yield from _tokenizers(config, given)


def root_rules(config: Config) -> Iterator[Problem]:
    """The same for where runs go."""
    root = Path(config.run_root)
    if config.run_root and root.exists() and not root.is_dir():
        yield Problem("run_root", config.run_root, "is a file; expected a directory, existing or to be made")


def _tokens(config: Config, field: str, prefix: str) -> Iterator[Problem]:
    tokens, idx = Path(prefix + ".bin"), Path(prefix + ".idx")
    try:
        size = tokens.stat().st_size
        with open(idx, "rb") as file:
            header = file.read(_HEADER.size)
    except OSError as e:
        yield Problem(field, prefix, f"{e.filename} cannot be read ({e.strerror}); {_MAKE}")
        return
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        yield Problem(field, prefix, f"{idx} is no index of Megatron's format, or is damaged; {_MAKE}")
        return
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != 1 or code not in _TOKEN_BYTES:
        message = f"{idx} has version {version} and token type {code}; expected version 1 and integers"
        yield Problem(field, prefix, message)
        return
    if damage := _damage(idx, sequences, documents, size, _TOKEN_BYTES[code]):
        yield Problem(field, prefix, f"{idx} {damage}; copy or make the data again")
        return
    held, window = config.data.validation_tokens, config.data.seq_len + 1
    count = size // _TOKEN_BYTES[code]
    if count - held < window:
        rest = f"{count} tokens" + (f" less data.validation_tokens={held}" if held else "")
        ways = ["lower data.validation_tokens"] * (count >= window) + ["shorten the samples", "or add data"]
        message = f"{rest} hold not one sample of data.seq_len + 1 = {window}; {', '.join(ways)}"
        yield Problem(field, prefix, message)


def _damage(idx: Path, sequences: int, documents: int, tokens_size: int, token_bytes: int) -> str | None:
    """What is wrong with an index, as its ends tell: its own size, and where it says that the tokens end."""
    expected = _HEADER.size + 12 * sequences + 8 * documents
    found = idx.stat().st_size
    # Multimodal data have one byte more per sequence.
    if found not in (expected, expected + sequences):
        return f"is truncated or damaged: {found} bytes, but its {sequences} sequences take {expected}"
    if sequences == 0:
        return None
    with open(idx, "rb") as file:
        file.seek(_HEADER.size + 4 * (sequences - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_HEADER.size + 4 * sequences + 8 * (sequences - 1))
        (pointer,) = struct.unpack("<q", file.read(8))
    end = pointer + length * token_bytes
    return (
        None if end == tokens_size else f"says that the tokens end at byte {end}, but the .bin has {tokens_size} bytes"
    )


def largest_vocab_size(tokens: int) -> int:
    """How many rows a model may have for a tokenizer of so many tokens: padded to a round number, not mistaken."""
    return tokens + max(1024, tokens // 8)


def _tokenizers(config: Config, given: list[tuple[str, str]]) -> Iterator[Problem]:
    """Model, data and tokenizer belong together, as far as the data say who made them."""
    digest: str | None = None
    if config.data.tokenizer is not None:
        try:
            digest = hashlib.sha256(Path(config.data.tokenizer).read_bytes()).hexdigest()
        except OSError as e:
            yield Problem("data.tokenizer", config.data.tokenizer, f"cannot be read ({e.strerror})")
    first: tuple[str, str] | None = None
    for field, prefix in given:
        try:
            meta = _meta(prefix)
        except ValueError as e:
            yield Problem(field, prefix, str(e))
            continue
        if meta is None:
            if digest is not None:
                message = "has no .meta.json to say whether data.tokenizer made it; leave data.tokenizer out"
                yield Problem(field, prefix, message)
            continue
        size, made_by = meta
        yield from _vocabulary(config.model.vocab_size, size, prefix)
        if digest is not None and digest != made_by:
            message = f"did not make {prefix} (sha256 {digest[:12]}, there {made_by[:12]}); name the one that did"
            yield Problem("data.tokenizer", config.data.tokenizer, message)
        if first is not None and first[1] != made_by:
            yield Problem(field, prefix, f"was made by another tokenizer than {first[0]}; tokenise both with one")
        first = first or (prefix, made_by)


def _vocabulary(rows: int, tokens: int, prefix: str) -> Iterator[Problem]:
    most = largest_vocab_size(tokens)
    if not tokens <= rows <= most:
        message = f"does not suit {prefix}, whose tokenizer has {tokens}; expected that, or padding up to {most}"
        yield Problem("model.vocab_size", str(rows), message)


def _meta(prefix: str) -> tuple[int, str] | None:
    """(vocabulary, SHA-256 of the tokenizer) as `stoker data tokenize` wrote them, None for data made elsewhere.

    Raises:
        ValueError: the file does not hold them.
    """
    file = Path(prefix + ".meta.json")
    try:
        meta: Any = json.loads(file.read_bytes())
        return int(meta["vocab_size"]), str(meta["tokenizer_sha256"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{file} cannot be read; {_MAKE}") from None
