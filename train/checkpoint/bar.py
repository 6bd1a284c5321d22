"""What the tools' command lines share: a progress bar on stderr, and words for types and sizes."""

from __future__ import annotations

import argparse
import re
from types import TracebackType

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def dtype_of(text: str) -> torch.dtype:
    """For argparse."""
    short = re.sub(r"^(b?)float", r"\1f" if text.startswith("b") else "fp", text)
    if short not in _DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(_DTYPES)}")
    return _DTYPES[short]


def bytes_of(text: str) -> int:
    """5GB, 500MB, ...: powers of ten, as transformers counts them. For argparse."""
    m = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", text.upper())
    if m is None or int(m[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size like 5GB or 500MB")
    return int(m[1]) * _UNITS[m[2]]


class Bar:
    """On a terminal only. `advance(count, total)`: so many bytes more, of all."""

    def __init__(self, title: str) -> None:
        self._bar = tqdm(desc=title, unit="B", unit_scale=True, disable=None)

    def advance(self, count: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(count)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()
