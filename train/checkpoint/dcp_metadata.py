"""A program: reads the .metadata of a torch DCP checkpoint, prints it as JSON. For dcp.py, in a process of its own.

That file is a pickle, which names what is called to make its objects. Only DCP's metadata classes are known here, each
as an inert stand-in; any other name ends this program. Standard library alone: run with `python -I -S`.
Format: torch/distributed/checkpoint/metadata.py and filesystem.py, version 1.0.0.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
from collections import OrderedDict
from typing import Any

_MEMORY = 16 * 1024**3  # bytes of address space; a 1,024-rank checkpoint's metadata takes less than 1 GiB
_SECONDS = 600  # of CPU time
_FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_OTHERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")


class Record:
    """Stands for an object of any of the known classes: keeps its state."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        if not isinstance(self.state, dict) or name not in self.state:
            raise ValueError(f"{type(self).__name__} without {name}")
        return self.state[name]

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


class Tensor(Record):
    pass


class Bytes(Record):
    pass


class Metadata(Record):
    pass


def _join(*parts: object) -> str:
    return "/".join(map(str, parts))


_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
KNOWN: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): Metadata,
    (_METADATA, "TensorStorageMetadata"): Tensor,
    (_METADATA, "BytesStorageMetadata"): Bytes,
    **{(_METADATA, n): Record for n in ("ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta")},
    (_METADATA, "_MEM_FORMAT_ENCODING"): int,
    (_FILES, "_StorageInfo"): Record,
    (_FILES, "_StoragePrefix"): Record,
    ("torch", "Size"): tuple,
    **{("torch", name): name for name in (*_FLOATS, *_OTHERS)},
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): OrderedDict,
    # Where it was saved: one part after the other, of a path that nobody opens.
    **{(module, kind): _join for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "PurePosixPath")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"names {module}.{name}, which is none of DCP's metadata classes")
        return KNOWN[module, name]


def read(path: str) -> dict[str, Any]:
    """{"tensors": {name: {dtype, shape, chunks: [{start, shape, file, at, size}]}}, "others": names of what is none}.

    Raises:
        ValueError, pickle.UnpicklingError, ...: it is no metadata of DCP.
    """
    with open(path, "rb") as f:
        metadata = _Unpickler(f).load()
    if not isinstance(metadata, Metadata):
        raise ValueError("not a Metadata")
    stored: dict[tuple[str, tuple[int, ...]], Record] = {}
    for index, info in metadata["storage_data"].items():
        stored[index["fqn"], tuple(index.get("offset") or ())] = info
    tensors, others = {}, []
    for name, entry in metadata["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise ValueError(f"a name that is none: {name!r}")
        if not isinstance(entry, Tensor):
            others.append(name)
            continue
        chunks = [_chunk(name, c, stored) for c in entry["chunks"]]
        tensors[name] = {"dtype": entry["properties"].state[0], "shape": entry["size"], "chunks": chunks}
    return {"tensors": tensors, "others": others}


def _chunk(name: str, chunk: Record, stored: dict[tuple[str, tuple[int, ...]], Record]) -> dict[str, Any]:
    info = stored[name, tuple(chunk["offsets"])]
    if info.get("transform_descriptors"):
        raise ValueError(f"{name} is stored by {', '.join(info['transform_descriptors'])}, an extension of DCP")
    place = {"file": info["relative_path"], "at": info["offset"], "size": info["length"]}
    return {"start": chunk["offsets"], "shape": chunk["sizes"], **place}


def main() -> int:
    for what, most in (
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_CPU, _SECONDS),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    try:
        print(json.dumps(read(sys.argv[1])))
    except Exception as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
