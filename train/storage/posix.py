"""Checkpoints in a directory of any POSIX file system: local, parallel or network.

Owns: names of what is unfinished or going, writing and publishing, atomic removal. A directory with a checkpoint's name
appears and disappears in one rename, so nobody ever sees half of one. Does not own: when these happen, or what a
particular kind of file system likes (filesystem.py, lustre.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ...launcher.run.files import GOING, fsync_dir, give_up, naming
from ...launcher.run.layout import CheckpointName
from ...launcher.run.manifest import InvalidCheckpointError, Manifest, check_sizes, read_manifest
from ...launcher.run.verification import verify
from ..state.source import ByteSource, FileSource
from . import lustre
from .base import LastCheck, nothing
from .direct import NewFile
from .filesystem import FileSystem, check_room, file_system, patiently
from .new_directory import sweep_unfinished


class PosixSink(NewFile):
    """A new file whose name is durable too when it is finished."""

    def finish(self) -> None:
        super().finish()
        fsync_dir(self._path.parent)


class PosixTarget:
    """A directory under a temporary name."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.notes: list[str] = []
        self._folder = Path(spec["folder"])
        self._directory = self._folder / spec["unfinished"]
        self._lustre: lustre.Site | None = None
        self._is_asked = False

    def prepare(self) -> None:
        """Who comes first checks the room: a moment later, others may write already."""
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            fsync_dir(self._folder.parent)
        try:
            self._directory.mkdir()
        except FileExistsError:
            return
        try:
            self._check_room()
        except OSError:
            with contextlib.suppress(OSError):  # somebody writes there already; whoever gives up takes it away
                self._directory.rmdir()
            raise

    def _check_room(self) -> None:
        total, shards = self.spec["total"], self.spec["shards"]
        check_room(self._folder, total, 3 * shards + 5)  # parts of the index too
        if site := self._site():
            lustre.check_targets(self._folder, site.targets, total, shards, self.spec["stripes"])
            try:
                lustre.check_quota(self._folder, total)
            except lustre.LfsError as e:
                self.notes.append(f"{self._folder}: quota not known: {e}")

    @cached_property
    def _kind(self) -> FileSystem:
        return file_system(self._folder)

    def _site(self) -> lustre.Site | None:
        if self._kind is FileSystem.lustre and not self._is_asked:
            self._is_asked = True
            try:
                self._lustre = lustre.ask(self._folder)
            except lustre.LfsError as e:
                self._lustre_is_silent(e)
        return self._lustre

    def _lustre_is_silent(self, error: lustre.LfsError) -> None:
        self._lustre = None
        self.notes.append(
            f"{self._folder}: Lustre's defaults for new files hold, full targets are not avoided: {error}"
        )

    def create(self, file: str, size: int) -> PosixSink:
        path, is_there = self._directory / file, False
        if size >= lustre.LARGE and (site := self._site()):
            try:
                lustre.make_file(path, site, size, self.spec["shards"], self.spec["stripes"])
                is_there = path.exists()
            except lustre.LfsError as e:
                self._lustre_is_silent(e)
        # Around the cache only where that was measured: over a network, writes overlap because of it.
        return PosixSink(path, not self._kind.is_shared, is_there)

    def read(self, file: str) -> bytes:
        path = self._directory / file
        with naming(path):
            return patiently(path.read_bytes, self._kind)

    def delete(self, files: Sequence[str]) -> None:
        for file in files:
            (self._directory / file).unlink(missing_ok=True)  # NFS asks again when an answer was lost

    def publish(self, manifest: Manifest, last_check: LastCheck = nothing) -> None:
        """If a whole checkpoint has that name already, that one stays and this one goes.

        Raises:
            OSError, and what `last_check` raises: it is no checkpoint.
        """
        manifest.write(self._directory)
        try:
            check_sizes(self._directory, manifest)
        except InvalidCheckpointError as e:
            raise OSError(errno.EIO, str(e)) from e
        last_check()
        target = self._folder / str(manifest.name)
        give_name(self._directory, target, is_whole=lambda: _is_whole(target, manifest.run))
        fsync_dir(self._folder)

    def discard(self) -> None:
        remove_directory(self._directory)


class PosixShelf:
    """The folder of a run's checkpoints. `folder` may be a link; it is made when the first checkpoint is prepared.

    `stripes`: of large files on Lustre; -1: all targets, 0: by size. `local`: directory on the node's own disk.
    """

    def __init__(self, folder: Path, stripes: int = 0, local: str | None = None) -> None:
        self.folder, self._stripes, self._local = folder, stripes, local

    def names(self) -> list[CheckpointName]:
        try:
            found = (CheckpointName.parse(name) for name in os.listdir(self.folder))
        except FileNotFoundError as e:
            if (
                self.folder.is_symlink()
            ):  # not "there are none": a file system that is not mounted would start a run anew
                leads = f"leads to {os.readlink(self.folder)}, which is not there"
                raise FileNotFoundError(e.errno, leads, str(self.folder)) from e
            return []
        return sorted((c for c in found if c), reverse=True)

    def manifest(self, name: CheckpointName) -> Manifest:
        return manifest_at(self.folder / str(name))

    def source(self, name: CheckpointName) -> ByteSource:
        return source_at(self.folder / str(name))

    def spec(self, name: CheckpointName, token: str, total: int, shards: int) -> dict[str, Any]:
        return {
            "kind": "posix",
            "folder": str(self.folder),
            "unfinished": name.unfinished(token),
            "token": token,
            "total": total,
            "shards": shards,
            "stripes": self._stripes,
            "local": self._local,
        }

    def remove(self, name: CheckpointName) -> None:
        remove_directory(self.folder / str(name))

    def sweep(self, attempt: int, token: str | None = None) -> None:
        """What is swept is renamed before it is deleted: a writer of such an attempt that was frozen just before its
        rename could otherwise publish a directory that is half deleted. What killed tools left goes too."""
        sweep_unfinished(self.folder)
        with contextlib.suppress(OSError):
            for path in list(self.folder.iterdir()):
                unfinished = CheckpointName.parse_unfinished(path.name)
                with contextlib.suppress(OSError):
                    if path.name.startswith(GOING):
                        _delete(path)
                    elif unfinished and is_stale(*unfinished, attempt, token):
                        remove_directory(path)


def is_stale(of: CheckpointName, its_token: str, attempt: int, token: str | None) -> bool:
    """Whether a preparation belongs to an attempt before this, or to a save of this before that of `token`."""
    if of.attempt != attempt:
        return of.attempt < attempt
    return token is not None and _order(its_token) < _order(token)


def _order(token: str) -> tuple[int, int]:
    generation, _, save = token[1:].partition("-")
    return int(generation), int(save, 16)


def manifest_at(directory: Path) -> Manifest:
    """Manifest and sizes of the checkpoint in `directory`, checked wherever its bytes are; kilobytes are read.

    Raises:
        InvalidCheckpointError: names the file.
    """
    manifest = read_manifest(directory)
    check_sizes(directory, manifest)
    if manifest.location is not None:
        from .objects import check_objects

        check_objects(manifest)
    return manifest


def source_at(directory: Path) -> ByteSource:
    """The bytes of the checkpoint whose manifest lies in `directory`, wherever they are."""
    with contextlib.suppress(InvalidCheckpointError):
        if location := read_manifest(directory).location:
            from .objects import ObjectSource

            return ObjectSource(location)
    return FileSource(directory, may_go_past=not file_system(directory).is_shared)


def remove_directory(directory: Path) -> None:
    """Take a directory away at once, then delete it; whatever cannot be deleted is left to the next `sweep`.

    Raises:
        OSError: it could not be renamed and is still there.
    """
    going = give_up(directory)
    if going is None:
        return
    with contextlib.suppress(OSError):
        _delete(going)


def _delete(going: Path) -> None:
    """Delete a directory that was taken away, and the objects that its manifest names.

    Raises:
        OSError: the object store refuses; the directory stays, to be tried again.
    """
    with contextlib.suppress(InvalidCheckpointError):
        if location := read_manifest(going).location:
            from .objects import delete_all

            delete_all(location)
    shutil.rmtree(going, ignore_errors=True)


def give_name(finished: Path, target: Path, is_whole: Callable[[], bool]) -> None:
    """Rename a finished checkpoint. If one that `is_whole` has that name already, that one stays and this one goes.

    Raises:
        OSError: could not be renamed.
    """
    try:
        os.rename(finished, target)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise OSError(e.errno, e.strerror, str(target)) from e
        if is_whole():
            remove_directory(finished)
        else:
            remove_directory(target)
            os.rename(finished, target)


def _is_whole(directory: Path, run: str) -> bool:
    try:
        return is_ours(directory, verify(directory), run)
    except InvalidCheckpointError:
        return False


def is_ours(directory: Path, found: Manifest, run: str) -> bool:
    """True. A whole checkpoint of another run is in our way, and nobody's to remove.

    Raises:
        OSError: it is another run's.
    """
    if found.run != run:
        raise OSError(errno.EEXIST, f"a checkpoint of another run ({found.run}) has this name", str(directory))
    return True
