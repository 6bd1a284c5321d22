"""Runs a module of the frozen code: `python RUN_DIR/bootstrap.py MODULE ARGUMENTS...`

Copied into every run directory and started from there, on each node, by the batch script and by srun. Unpacks
code.tar.gz beside it into a node-local directory named by its content, puts that first on the path (for child
processes too), and becomes MODULE. Standard library only, and it imports nothing of ours: the frozen code is what it
is about to find.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import signal
import stat
import sys
import tempfile
import time
import zlib
from pathlib import Path

# The first member of the archive: {path: [bytes, crc32]} of all others.
MANIFEST = "manifest.json"
_STALE = 24 * 3600  # seconds after which a half-unpacked directory is nobody's any more


class BootstrapError(Exception):
    """The frozen code cannot be used; says which file and what to do."""


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    h = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            h.update(block)
    return h.hexdigest()


def private_base(parent: Path) -> Path:
    """`parent/stoker-UID`, ours and closed to others; a fresh private directory if somebody else took the name.

    Raises:
        OSError: `parent` cannot be written.
    """
    base = parent / f"stoker-{os.getuid()}"
    try:
        base.mkdir(mode=0o700)
    except FileExistsError:
        found = base.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            # In a shared /tmp anybody can make this name; code in it would run as us.
            return Path(tempfile.mkdtemp(prefix=f"{base.name}-", dir=parent))
        if found.st_mode & 0o077:
            base.chmod(0o700)
    return base


def is_intact(directory: Path) -> bool:
    """Whether everything the manifest lists is there, unchanged (tmp cleaners take files away one by one)."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        for name, (size, crc) in manifest.items():
            path = directory / name
            if path.is_symlink():
                continue
            if path.stat().st_size != size or zlib.crc32(path.read_bytes()) != crc:
                return False
    except (OSError, ValueError):
        return False
    return True


def extract(archive: Path, directory: Path) -> None:
    """Unpack; refuses members that would leave `directory`."""
    import tarfile  # only when there is something to unpack: this runs on every node at every start

    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            parts = Path(member.name).parts
            if member.name.startswith("/") or ".." in parts or not (member.isfile() or member.issym()):
                raise BootstrapError(f"{archive}: unexpected member {member.name!r}; freeze the run again")
            target = directory / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if member.issym():
                target.symlink_to(member.linkname)
                continue
            source = tar.extractfile(member)
            assert source is not None
            with source, open(target, "xb") as out:
                shutil.copyfileobj(source, out)
            if member.mode & 0o100:
                target.chmod(0o755)


def unpack(archive: Path, parent: Path) -> Path:
    """The directory below `parent` that holds the archive's content, unpacked now or by somebody before.

    Safe against any number of processes at once: each unpacks into a directory of its own and renames it. A directory
    found damaged is left alone, since another process may be running from it; the next number is used instead.

    Raises:
        OSError: `parent` cannot be written, or is full.
    """
    base = private_base(parent)
    name = digest(archive)[:32]
    for number in range(1000):
        directory = base / (name if number == 0 else f"{name}.{number}")
        if directory.exists():
            if is_intact(directory):
                return directory
            continue
        _remove_stale(base)
        tmp = Path(tempfile.mkdtemp(prefix=".tmp-", dir=base))
        try:
            extract(archive, tmp)
            os.rename(tmp, directory)
        except FileExistsError:
            pass  # somebody was quicker
        except OSError:
            # Renaming onto a directory that is not empty: ENOTEMPTY or EEXIST, by file system.
            if not directory.exists():
                raise
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
        if is_intact(directory):
            return directory
    raise BootstrapError(f"{base}: no intact copy of {archive} could be made; look into that directory")


def _remove_stale(base: Path) -> None:
    for tmp in base.glob(".tmp-*"):
        try:
            if time.time() - tmp.lstat().st_mtime > _STALE:
                shutil.rmtree(tmp, ignore_errors=True)
        except OSError:
            continue


def frozen_code(run_dir: Path) -> list[str]:
    """Unpack the run's code; returns what belongs in front of the path.

    Raises:
        BootstrapError: the archive is missing, changed since the run was frozen, or fits nowhere.
    """
    archive = run_dir / "code.tar.gz"
    try:
        record = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["code"]
        found = digest(archive)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise BootstrapError(f"{run_dir}: cannot read the frozen code ({type(e).__name__}: {e})") from e
    if found != record["sha256"]:
        raise BootstrapError(f"{archive}: changed since the run was frozen; launch a new run, or restore the file")
    parents = [Path(os.environ.get("STOKER_CODE_DIR") or tempfile.gettempdir()), run_dir]
    for parent in parents:
        try:
            directory = unpack(archive, parent)
        except OSError as e:
            print(f"stoker: cannot unpack the code below {parent} ({e.strerror or e})", file=sys.stderr)
            continue
        return [str(directory / entry) for entry in record["pythonpath"]]
    raise BootstrapError(f"{archive}: could not be unpacked; set STOKER_CODE_DIR to a writable directory")


def main(argv: list[str]) -> None:
    if not argv:
        raise BootstrapError("usage: python RUN_DIR/bootstrap.py MODULE [ARGUMENTS...]")
    # Slurm warns only once: a signal that comes while we unpack is kept for the module.
    signal.signal(signal.SIGUSR1, lambda *_: os.environ.update(STOKER_WARNED="1"))
    here = Path(__file__).resolve().parent
    entries = frozen_code(here)
    # `python -m` in a child looks into the current directory first: a clone may lie there, but not in a run directory.
    os.chdir(here)
    # The interpreter put this file's directory first, where checkpoints/ and attempts/ would pass for packages.
    sys.path[:] = entries + [p for p in sys.path if p and Path(p).resolve() != here]
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entries + ([inherited] if inherited else []))
    module, *arguments = argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BootstrapError as error:
        sys.exit(f"stoker: error: {error}")
