"""Checkpoints in an object store; beside each, a copy of its manifest in the run directory.

    s3://BUCKET/PREFIX/RUN/step-00001000-a0001/g0001-5.shard-00000.safetensors, ..., g0001-5.manifest.json (last)
    RUN/checkpoints/step-00001000-a0001/manifest.json    the same manifest: `location` says where the bytes lie

Nothing can be renamed there, so a token in each object's name tells preparations of one checkpoint apart. The copy is
what makes it a checkpoint: it appears and goes in one rename, and tools see it as any other. Does not own: the calls
(bucket.py).
"""

from __future__ import annotations

import contextlib
import errno
import re
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...launcher.run.files import fsync_dir
from ...launcher.run.layout import CheckpointName
from ...launcher.run.manifest import (
    BLOCK,
    MANIFEST,
    InvalidCheckpointError,
    Manifest,
    check_entries,
    parse_manifest,
    read_manifest,
)
from .base import LastCheck, nothing
from .bucket import Bucket
from .posix import PosixShelf, give_name, is_ours, is_stale, remove_directory

MIB = 2**20
_PART = 32 * MIB  # bytes of one part; a store takes at least 5 MiB, and at most 10,000 parts
_MOST_PARTS = 9_000
_AT_ONCE = 4  # parts on their way per file: one connection brings about 100 MB/s
_FILE = re.compile(r"(g\d{4,}-[0-9a-f]+)\.([^/]+)")  # token and name


class ObjectSink:
    """One new object. Its parts are sent while the next ones come; it is there whole or not at all."""

    def __init__(self, bucket: Bucket, key: str, size: int) -> None:
        self._bucket, self._key = bucket, key
        self._part = max(_PART, -(-size // _MOST_PARTS))
        self._rest = bytearray()
        self._upload: str | None = None
        self._sent: list[dict[str, Any]] = []
        self._count = 0
        self._under_way: deque[Future[dict[str, Any]]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        if size > self._part:
            self._upload = bucket.begin_upload(key)
            self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="parts")

    def write(self, data: memoryview) -> None:
        view, at = data.cast("B"), 0
        while at < len(view):
            count = min(self._part - len(self._rest), len(view) - at)
            self._rest += view[at : at + count]
            at += count
            if self._upload is not None and len(self._rest) == self._part:
                self._send()

    def _send(self) -> None:
        assert self._pool is not None
        self._count += 1
        data, self._rest = bytes(self._rest), bytearray()
        self._under_way.append(
            self._pool.submit(self._bucket.upload_part, self._key, self._upload or "", self._count, data)
        )
        while len(self._under_way) > _AT_ONCE:
            self._sent.append(self._under_way.popleft().result())

    def finish(self) -> None:
        if self._upload is None:
            self._bucket.put(self._key, bytes(self._rest))
            return
        if self._rest:
            self._send()
        while self._under_way:
            self._sent.append(self._under_way.popleft().result())
        self._bucket.end_upload(self._key, self._upload, self._sent)
        self._upload = None
        self._close()

    def abort(self) -> None:
        self._close()
        if self._upload is not None:
            upload, self._upload = self._upload, None
            with contextlib.suppress(OSError):  # a later sweep takes it away
                self._bucket.abort_upload(self._key, upload)

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._under_way.clear()


class ObjectTarget:
    """Objects with one token in their names, and a directory for the manifest's copy."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.notes: list[str] = []
        self._folder = Path(spec["folder"])
        name = CheckpointName.parse(spec["name"])
        assert name is not None, spec
        self._copy = self._folder / name.unfinished(spec["token"])
        self._bucket = Bucket(f"{spec['root']}{spec['name']}/{spec['token']}.")

    def prepare(self) -> None:
        """There is nothing to make, and room is not to be asked for."""

    def create(self, file: str, size: int) -> ObjectSink:
        return ObjectSink(self._bucket, file, size)

    def read(self, file: str) -> bytes:
        return self._bucket.get(file)

    def delete(self, files: Sequence[str]) -> None:
        self._bucket.delete(list(files))

    def publish(self, manifest: Manifest, last_check: LastCheck = nothing) -> None:
        """Manifest into the store, then its copy, which gets its name in one rename."""
        located = replace(manifest, location=self._bucket.address)
        found = self._bucket.sizes()
        for entry in manifest.files:
            if found.get(entry.name) != entry.size:
                text = f"{found.get(entry.name)} bytes, expected {entry.size}"
                raise OSError(errno.EIO, text, self._bucket.url(entry.name))
        self._bucket.put(MANIFEST, located.encode())
        self._folder.mkdir(parents=True, exist_ok=True)
        self._copy.mkdir(exist_ok=True)
        located.write(self._copy)
        last_check()
        target = self._folder / str(manifest.name)
        give_name(self._copy, target, is_whole=lambda: _is_whole(target, manifest.run))
        fsync_dir(self._folder)

    def discard(self) -> None:
        remove_directory(self._copy)
        # A later attempt may have taken it up, if it was whole.
        if not _points_to(self._folder / self.spec["name"], self._bucket.address):
            delete_all(self._bucket.address)


class ObjectSource:
    """Reads ranges of a checkpoint's objects, many at a time: a single request brings about 100 MB/s."""

    piece = 4 * BLOCK
    streams = 8

    def __init__(self, location: str) -> None:
        self._bucket = Bucket(location)

    def where(self, file: str) -> str:
        return self._bucket.url(file)

    def read(self, file: str, at: int, *into: memoryview) -> None:
        size = sum(len(buffer) for buffer in into)
        if size == 0:
            return
        try:
            data = memoryview(self._bucket.get(file, at, at + size))
        except OSError as e:
            raise InvalidCheckpointError(f"{self.where(file)}: {e.strerror}") from e
        if len(data) != size:
            raise InvalidCheckpointError(f"{self.where(file)}: ends at byte {at + len(data)}, more was expected")
        for buffer in into:
            buffer[:] = data[: len(buffer)]
            data = data[len(buffer) :]

    def read_past(self, file: str, at: int, into: memoryview) -> int:
        """There is no cache."""
        return 0

    def close(self) -> None:
        """The connection is this process', not the source's."""


class ObjectShelf(PosixShelf):
    """The run's folder of manifests, and the store behind it. Whole directories in the folder count too: a run may have
    begun with those."""

    def __init__(self, folder: Path, root: str, local: str | None = None) -> None:
        """`root`: s3://BUCKET/PREFIX/RUN/, with the slash."""
        super().__init__(folder, local=local)
        self._root, self._is_known = root, False

    def names(self) -> list[CheckpointName]:
        """Raises OSError also for a store that does not answer: nothing could be saved there."""
        if not self._is_known:
            Bucket(self._root).probe()
            self._is_known = True
        return super().names()

    def spec(self, name: CheckpointName, token: str, total: int, shards: int) -> dict[str, Any]:
        return {
            "kind": "objects",
            "root": self._root,
            "folder": str(self.folder),
            "name": str(name),
            "token": token,
            "local": self._local,
        }

    def sweep(self, attempt: int, token: str | None = None) -> None:
        """Also takes up what was whole in the store, and whose writer died before the copy of its manifest."""
        with contextlib.suppress(OSError):
            bucket = Bucket(self._root)
            for key, upload in bucket.uploads():
                if (found := _parsed(key)) and is_stale(found[0], found[1], attempt, token):
                    bucket.abort_upload(key, upload)
            for group, files in _groups(bucket).items():
                if is_stale(*group, attempt, token):
                    self._settle(bucket, *group, files)
        super().sweep(attempt, token)

    def _settle(self, bucket: Bucket, name: CheckpointName, token: str, files: Sequence[str]) -> None:
        """Delete what a writer left of a checkpoint, unless it is whole."""
        at = f"{name}/{token}."
        copy = self.folder / str(name)
        if _points_to(copy, bucket.url(at)):
            return
        if MANIFEST in files and not copy.exists():
            fresh = self.folder / name.unfinished(token)
            with contextlib.suppress(InvalidCheckpointError):
                manifest = parse_manifest(bucket.get(at + MANIFEST), bucket.url(at + MANIFEST))
                check_objects(manifest)
                fresh.mkdir(parents=True, exist_ok=True)
                manifest.write(fresh)
                give_name(fresh, copy, is_whole=lambda: True)
                return
        # The manifest goes first: without it, nobody takes the rest for a checkpoint.
        bucket.delete(sorted((at + f for f in files), key=lambda key: not key.endswith(MANIFEST)))


def _points_to(copy: Path, location: str) -> bool:
    try:
        return read_manifest(copy).location == location
    except InvalidCheckpointError:
        return False


def _groups(bucket: Bucket) -> dict[tuple[CheckpointName, str], list[str]]:
    """Files by (checkpoint, token)."""
    found: dict[tuple[CheckpointName, str], list[str]] = {}
    for key in bucket.sizes():
        if parsed := _parsed(key):
            name, token, file = parsed
            found.setdefault((name, token), []).append(file)
    return found


def _parsed(key: str) -> tuple[CheckpointName, str, str] | None:
    """(checkpoint, token, file); None for what is not ours."""
    folder, _, rest = key.partition("/")
    name, m = CheckpointName.parse(folder), _FILE.fullmatch(rest)
    return (name, m[1], m[2]) if name is not None and m is not None else None


def check_objects(manifest: Manifest) -> None:
    """As manifest.check_sizes, for a checkpoint in a store.

    Raises:
        InvalidCheckpointError: names the object.
    """
    assert manifest.location is not None
    bucket = Bucket(manifest.location)
    try:
        found = bucket.sizes()
        check_entries(manifest, bucket.url(MANIFEST))
        small = [f for f in manifest.files if f.crc32 is not None]
        for f in manifest.files:
            if found.get(f.name) != f.size:
                raise InvalidCheckpointError(f"{bucket.url(f.name)}: {found.get(f.name)} bytes, expected {f.size}")
        for f, data in zip(small, bucket.get_many([f.name for f in small]), strict=True):
            if zlib.crc32(data) != f.crc32:
                raise InvalidCheckpointError(f"{bucket.url(f.name)}: checksum does not match (changed or damaged)")
    except OSError as e:
        raise InvalidCheckpointError(f"{e.filename}: {e.strerror}") from e


def delete_all(location: str) -> None:
    """Everything whose name begins so, the manifest first. Raises OSError: some may be left."""
    bucket = Bucket(location)
    bucket.delete(sorted(bucket.sizes(), key=lambda key: key != MANIFEST))


def _is_whole(directory: Path, run: str) -> bool:
    try:
        manifest = read_manifest(directory)
        if manifest.location is not None:
            check_objects(manifest)
    except InvalidCheckpointError:
        return False
    return is_ours(directory, manifest, run)
