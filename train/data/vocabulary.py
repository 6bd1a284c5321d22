"""Tokenizers: loading one, training a byte-level BPE, finding the end-of-document token.

Owns how the `tokenizers` library is set up; it is imported only when something is called. Output is a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .text import Part, Tally, documents, part_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOD_TOKEN = "<|endoftext|>"
_KNOWN_EOD = (EOD_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_SAMPLED_PARTS = 256


def load_tokenizer(path: Path) -> Tokenizer:
    """From a tokenizer.json; text that looks like a special token is encoded as plain text. Raises ValueError."""
    from tokenizers import Tokenizer

    if not path.is_file():
        raise ValueError(f"--tokenizer {path}: no such file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"--tokenizer {path}: not a tokenizer.json of the tokenizers library ({error})") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest token id."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def eod_id(tokenizer: Tokenizer, token: str | None) -> int:
    """Id of the end-of-document token: the one named, else the first of the usual names. Raises ValueError."""
    for name in [token] if token else _KNOWN_EOD:
        found = tokenizer.token_to_id(name)
        if found is not None:
            return int(found)
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    raise ValueError(
        f"no end-of-document token {token or 'among ' + ', '.join(_KNOWN_EOD)} in the tokenizer: name one "
        f"with --eod-token (its special tokens: {', '.join(special[:20]) or 'none'})"
    )


def train_tokenizer(parts: Sequence[Part], json_key: str, size: int, budget: int, eod: str, path: Path) -> None:
    """Train a byte-level BPE of up to `size` tokens on at most `budget` bytes of the text, and save it as path.

    The same files give the same bytes. Raises ValueError for a size below 257 (256 bytes and the end of document).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < 257:
        raise ValueError(f"--train-vocab {size}: expected at least 257 (256 bytes and {eod})")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[eod],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(parts, json_key, budget), trainer)
    tokenizer.save(str(path), pretty=True)


def _sample(parts: Sequence[Part], json_key: str, budget: int) -> Iterator[str]:
    """The beginnings of parts spread evenly over the data, each in proportion to its size; all of it if it fits."""
    count = min(len(parts), _SAMPLED_PARTS)
    chosen = [parts[k * len(parts) // count] for k in range(count)]
    if part_bytes(parts) <= budget:
        chosen = list(parts)
    total = part_bytes(chosen)
    for part in chosen:
        left = max(1, budget * part_bytes([part]) // max(total, 1))
        for text in documents(part, json_key, Tally()):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break
