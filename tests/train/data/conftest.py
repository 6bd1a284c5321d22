"""Small token files for the data tests."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from stoker.train.data.indexed_writer import IndexWriter

MakeData = Callable[..., Path]


@pytest.fixture
def make_data(tmp_path: Path) -> MakeData:
    """make_data(name, lengths, dtype, offset): documents of these lengths; token i of the stream is i + offset."""

    def make(name: str = "set", lengths: list[int] | None = None, dtype: str = "uint16", offset: int = 0) -> Path:
        sizes = [7, 30, 3, 60, 100, 1, 49, 150] if lengths is None else lengths
        with IndexWriter(tmp_path / name, dtype) as writer:
            writer.add_documents(np.arange(sum(sizes)) + offset, sizes)
        return tmp_path / name

    return make
