"""PREFIX.meta.json: where tokens came from; and whether data, tokenizer and model belong together.

Owns that file's fields and the check. Data made elsewhere has no such file; its token ids are checked when read.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class DataMeta:
    vocab_size: int  # token ids are below it
    eod: int  # token id at the end of each document
    tokenizer_sha256: str  # of the tokenizer.json, hex
    dtype: str  # numpy's name
    documents: int
    tokens: int
    stoker_version: str
    job: str  # digest of inputs and options, to know the same work again


def meta_path(prefix: str | Path) -> Path:
    return Path(f"{os.fspath(prefix)}.meta.json")


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_meta(prefix: str | Path, meta: DataMeta) -> None:
    """Atomically, through a temporary name in the same directory."""
    write_text(meta_path(prefix), json.dumps(asdict(meta), indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_meta(prefix: str | Path) -> DataMeta | None:
    """None if there is no such file. Raises ValueError for one that does not hold the fields."""
    path = meta_path(prefix)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}): remove it, or make the data again") from None
    wrong = [f.name for f in fields(DataMeta) if type(found.get(f.name)).__name__ != f.type] if found else []
    if not isinstance(found, dict) or wrong:
        raise ValueError(f"{path}: missing or wrong {', '.join(wrong) or 'fields'}: remove it, or make the data again")
    return DataMeta(**{f.name: found[f.name] for f in fields(DataMeta)})


def check_tokenizer(prefix: str | Path, meta: DataMeta, vocab_size: int, tokenizer: Path | None = None) -> None:
    """Raise ValueError unless the data's vocabulary suits model.vocab_size and, if given, the tokenizer made the data.

    A model may have more rows than the tokenizer has tokens (padding to a round number): up to 1,024 or an eighth more.
    """
    padded = meta.vocab_size + max(1024, meta.vocab_size // 8)
    if not meta.vocab_size <= vocab_size <= padded:
        raise ValueError(
            f"model.vocab_size = {vocab_size}, but {meta_path(prefix)} says vocab_size {meta.vocab_size} for this "
            f"data.sources prefix: expected {meta.vocab_size} (padding up to {padded} is taken); set model.vocab_size, "
            "or tokenise the data with the model's tokenizer"
        )
    if tokenizer is None:
        return
    if not tokenizer.is_file():
        raise ValueError(f"data.tokenizer = {tokenizer}: no such file")
    digest = file_sha256(tokenizer)
    if digest != meta.tokenizer_sha256:
        raise ValueError(
            f"data.tokenizer = {tokenizer} (sha256 {digest[:12]}...) did not make the data of prefix {prefix} "
            f"(sha256 {meta.tokenizer_sha256[:12]}...): name the tokenizer saved beside the data, or tokenise again"
        )
