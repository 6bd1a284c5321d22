"""The number in a shard's name, and writing a small file of a checkpoint.

Owns: that. Does not own: the order of files (persist_job.py), or how storage takes them (train/storage).
"""

from __future__ import annotations

from ...launcher.run.manifest import shard_name
from ..storage.base import Target


def shard_number(name: str) -> int:
    """Of a shard's file."""
    number = int(name.removeprefix("shard-").removesuffix(".safetensors"))
    assert shard_name(number) == name, name
    return number


def write_small(target: Target, name: str, data: bytes) -> None:
    """Create the file `name` of a checkpoint under preparation, on stable storage when this returns. Raises OSError."""
    sink = target.create(name, len(data))
    try:
        sink.write(memoryview(data))
        sink.finish()
    except BaseException:
        sink.abort()
        raise
