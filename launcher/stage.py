"""One archive of a Python environment, for nodes to unpack (cluster.stage_env): which files, and writing it.

Owns: choosing and packing. The archive lies beside the runs and is named by what is in the environment, so runs share
it; unpacking it is run/bootstrap.py's. Not compressed: nodes read it in one go, and packing costs little more than a
copy.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .errors import UserError, environment_error
from .run.bootstrap import MANIFEST
from .run.files import fsync_dir, temporary_name

FOLDER = ".envs"  # below run_root
LIMIT = 30 * 1000**3  # bytes
_FORMAT = "1"  # of the archive; part of its name
_SYSTEM = ("/", "/usr", "/usr/local")
_ASK = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.executable]))"


@dataclass(frozen=True)
class Environment:
    """A Python environment that is to be staged."""

    prefix: Path
    archive: Path  # where it is, or will be
    files: int
    bytes: int
    elsewhere: tuple[str, ...]  # directories outside of it that its packages are read from: editable installations


def plan(python: str, run_root: Path) -> Environment:
    """Look at the environment of an interpreter; nothing is written.

    Raises:
        UserError: it cannot be staged, or there is no room beside the runs; says what to do.
    """
    prefix = _prefix(python)
    files = list(_walk(prefix, ""))
    total = sum(found.st_size for _, found in files if stat.S_ISREG(found.st_mode))
    if total > LIMIT:
        raise UserError(
            f"cluster.stage_env=true: {prefix} has {total / 1e9:.1f} GB; expected at most {LIMIT / 1e9:.0f} GB\n"
            f"the largest directories: {_largest(files)}; take them out of the environment, or set it to false"
        )
    archive = run_root / FOLDER / f"{_fingerprint(prefix, files)}.tar"
    if not archive.exists():
        _check_room(run_root, total)
    return Environment(prefix, archive, len(files), total, tuple(_elsewhere(prefix)))


def ensure(environment: Environment) -> None:
    """Pack it, unless that was done before.

    Raises:
        UserError: the archive cannot be written, or a file changed meanwhile.
    """
    archive = environment.archive
    if archive.exists():
        return
    size = f"{environment.files} files, {environment.bytes / 1e9:.1f} GB"
    print(f"packing {environment.prefix} into {archive} ({size}; once)", file=sys.stderr, flush=True)
    tmp = temporary_name(archive)
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        # run_root may lie in the user's project, and every file there that git does not ignore is frozen with a run.
        (archive.parent / ".gitignore").write_text("*\n", encoding="utf-8")
        with open(tmp, "xb") as out:
            _pack(environment.prefix, out)
            out.flush()
            os.fsync(out.fileno())
        os.rename(tmp, archive)
        fsync_dir(archive.parent)
    except (OSError, tarfile.TarError) as e:
        raise environment_error(f"cluster.stage_env=true: {environment.prefix} cannot be packed: {e}") from e
    finally:
        tmp.unlink(missing_ok=True)


def _prefix(python: str) -> Path:
    """The environment's directory; refused where nodes would not find what it builds upon."""
    try:
        done = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=60, check=True)
        prefix, base, _ = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        raise UserError(f"cluster.stage_env=true: {python} does not run here ({e}); its environment is packed") from e
    if prefix in _SYSTEM:
        raise UserError(
            f"cluster.stage_env=true: {python} belongs to no environment of its own (sys.prefix is {prefix}); "
            "set cluster.python to the interpreter of a virtual or conda environment"
        )
    local = {Path(p).resolve() for p in ("/tmp", "/var/tmp", "/dev/shm", tempfile.gettempdir())}
    if prefix != base and not local.isdisjoint(Path(base).resolve().parents):
        raise UserError(
            f"cluster.stage_env=true: {prefix} builds upon the Python in {base}, which only this machine has; "
            "make the environment with a Python that the nodes have too"
        )
    return Path(prefix).resolve()


def _walk(prefix: Path, inside: str) -> Iterator[tuple[str, os.stat_result]]:
    """Files and links below `prefix/inside`, by names relative to `prefix`, sorted."""
    with os.scandir(prefix / inside) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        name = f"{inside}/{entry.name}" if inside else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(prefix, name)
        elif name != MANIFEST and (entry.is_file(follow_symlinks=False) or entry.is_symlink()):  # ours has that name
            yield name, entry.stat(follow_symlinks=False)


def _fingerprint(prefix: Path, files: list[tuple[str, os.stat_result]]) -> str:
    """By names, sizes, times and modes: reading everything would take as long as packing."""
    h = hashlib.sha256(f"{_FORMAT}\0{prefix}\0".encode())
    for name, found in files:
        # The time and size of compiled modules change when somebody imports them; their sources say all.
        if not name.endswith(".pyc"):
            h.update(
                f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_mode}\0".encode("utf-8", "surrogateescape")
            )
    return h.hexdigest()[:32]


def _pack(prefix: Path, out: BinaryIO) -> None:
    manifest: dict[str, tuple[int, int]] = {}
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar:
        for name, found in _walk(prefix, ""):
            info = tarfile.TarInfo(name)
            info.mtime = int(found.st_mtime)
            info.mode = 0o755 if found.st_mode & 0o100 else 0o644
            if stat.S_ISLNK(found.st_mode):
                info.type = tarfile.SYMTYPE
                info.linkname = _link_target(prefix, name)
                tar.addfile(info)
                continue
            # Whole, so that size, checksum and content agree whatever happens to the file meanwhile.
            data = (prefix / name).read_bytes()
            info.size = len(data)
            manifest[name] = (len(data), zlib.crc32(data))
            tar.addfile(info, io.BytesIO(data))
        text = json.dumps(manifest, separators=(",", ":")).encode("utf-8", "surrogateescape")
        info = tarfile.TarInfo(MANIFEST)
        info.size, info.mode = len(text), 0o644
        tar.addfile(info, io.BytesIO(text))


def _link_target(prefix: Path, name: str) -> str:
    """Links inside the environment become relative, those that leave it absolute: it moves."""
    link = prefix / name
    target = os.path.join(link.parent, os.readlink(link))
    target = os.path.normpath(target) if ".." in Path(target).parts else target
    if Path(target).is_relative_to(prefix):
        return os.path.relpath(target, link.parent)
    return target


def _largest(files: list[tuple[str, os.stat_result]]) -> str:
    sizes: dict[str, int] = {}
    for name, found in files:
        folder = "/".join(name.split("/")[:5][:-1]) or name
        sizes[folder] = sizes.get(folder, 0) + found.st_size
    top = sorted(sizes, key=lambda folder: -sizes[folder])[:5]
    return ", ".join(f"{folder} ({sizes[folder] / 1e9:.1f} GB)" for folder in top)


def _check_room(run_root: Path, needed: int) -> None:
    there = next(p for p in (run_root, *run_root.parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free < needed * 1.1:
        raise environment_error(
            f"cluster.stage_env=true: run_root={run_root} has {free / 1e9:.1f} GB free, and the packed environment "
            f"takes {needed / 1e9:.1f} GB; free some, or set cluster.stage_env=false"
        )


def _elsewhere(prefix: Path) -> Iterator[str]:
    """Directories that .pth files and editable installations add; `stoker` itself comes with the run."""
    for site in sorted(prefix.glob("lib/python3*/site-packages")):
        for pth in sorted(site.glob("*.pth")):
            for line in pth.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("/") and not Path(line).is_relative_to(prefix):
                    yield line.rstrip()
        for record in sorted(site.glob("*.dist-info/direct_url.json")):
            try:
                found = json.loads(record.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            is_editable = found.get("dir_info", {}).get("editable", False)
            if is_editable and not record.parent.name.startswith("stoker-"):
                yield str(found.get("url", "")).removeprefix("file://")
