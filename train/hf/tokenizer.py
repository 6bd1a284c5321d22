"""Tokenizer and generation settings beside a model: the files that transformers looks for in its directory.

Owns: which files those are, copying them, and making them from a tokenizer.json alone. Does not own: what the tokens
mean; that tokenizer and weights belong together is the user's to know.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...launcher.run.files import read_json, write_json
from ..data.vocabulary import eod_id, load_tokenizer, vocab_size

TOKENIZER, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
FILES = (
    TOKENIZER,
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Tokenizer:
    """A directory with tokenizer files, or one tokenizer.json under any name. eod: the id that ends documents, if it is
    known from the data that it made."""

    path: Path
    eod: int | None = None

    def check(self, rows: int) -> None:
        """Raises ValueError: there is none, or it has ids beyond the embedding's rows."""
        if self.path.is_dir() and not any((self.path / name).is_file() for name in FILES):
            raise ValueError(f"--tokenizer {self.path}: none of {', '.join(FILES)} in it")
        file = self.file
        if file is not None:
            size = vocab_size(load_tokenizer(file))
            if size > rows:
                raise ValueError(f"--tokenizer {file}: {size} tokens, but the model has model.vocab_size = {rows}")

    @property
    def file(self) -> Path | None:
        """Its tokenizer.json; None if it has only other files."""
        file = self.path / TOKENIZER if self.path.is_dir() else self.path
        return file if file.is_file() or not self.path.is_dir() else None

    def ids(self) -> dict[str, int | None]:
        """Ids for config.json. Documents end with a token and begin with none, as the data has it."""
        end = self.eod
        if end is None and self.file is not None:
            try:
                end = eod_id(load_tokenizer(self.file), self._named_end())
            except ValueError:  # whatever ends its documents has none of the usual names
                end = None
        return {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}

    def _named_end(self) -> str | None:
        """What the settings beside it say."""
        try:
            found = read_json(self.path / SETTINGS).get("eos_token") if self.path.is_dir() else None
        except (OSError, ValueError):
            return None
        return found if isinstance(found, str) else None

    def write(self, directory: Path) -> list[str]:
        """Copy or make the files; their names."""
        beside = self.path if self.path.is_dir() else self.path.parent
        is_complete = self.path.is_dir() or (self.path.name == TOKENIZER and (beside / SETTINGS).is_file())
        if is_complete:
            return copy_files(beside, directory)
        assert self.file is not None
        shutil.copyfile(self.file, directory / TOKENIZER)
        end = self.ids()["eos_token_id"]
        token = None if end is None else load_tokenizer(self.file).id_to_token(end)
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        write_json(directory / SETTINGS, settings | ({} if token is None else {"eos_token": token}))
        return [TOKENIZER, SETTINGS]


def copy_files(source: Path, directory: Path, names: tuple[str, ...] = FILES) -> list[str]:
    """Copy those of `names` that are in `source`; which these were."""
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, directory / name)
    return found


def write_generation(directory: Path, config: dict[str, Any]) -> None:
    """The ids of config.json, where generating looks for them."""
    ids = {name: config[name] for name in IDS if name in config}
    write_json(directory / GENERATION, {"_from_model_config": True, **ids})
