"""Runs a module of the frozen code: `python RUN_DIR/bootstrap.py [--staged] MODULE ARGUMENTS...`

Copied into every run directory and started from there, on each node, by the batch script and by srun. Unpacks
code.tar.gz beside it into a node-local directory named by its content, puts that first on the path (for child
processes too), and becomes MODULE. With --staged it first unpacks the archive of the Python environment the same way
and goes on with the interpreter in there. Standard library only, and it imports nothing of ours: the frozen code is
what it is about to find.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Mapping
from pathlib import Path

# A member of the archive: {path: [bytes, crc32]} of all other files in it.
MANIFEST = "manifest.json"
LOCAL_DIR = "STOKER_LOCAL_DIR"  # cluster.local_dir
ENV_ARCHIVE = "STOKER_ENV_ARCHIVE"  # environment that launcher/stage.py packed
CODE = "STOKER_CODE"  # node-local directory of the frozen code; unset where none could be written
ENV_DIR = "STOKER_ENV_DIR"  # node-local directory of the environment we run from, if it is staged
STAGED = "STOKER_STAGED"  # JSON: what became of the staging, for the agent's events
NO_CODE, BROKE = 71, 70  # exit codes (sysexits'): the code cannot be used here; what ran broke down
_STALE = 24 * 3600  # seconds after which a half-unpacked directory is nobody's any more
_UNUSED = 7 * 24 * 3600  # seconds after which a directory that nobody works in is taken away
_BLOCK = 1 << 20
_held: list[int] = []  # descriptors whose locks say that we work in a directory


class BootstrapError(Exception):
    """The frozen code cannot be used; says which file and what to do."""


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(_BLOCK):
            h.update(block)
    return h.hexdigest()


def local_parents(environ: Mapping[str, str]) -> list[Path]:
    """Where node-local directories may go, best first: the configured one alone, or what the site offers."""
    chosen = environ.get(LOCAL_DIR)
    named = [chosen] if chosen else [environ.get("SLURM_TMPDIR"), environ.get("TMPDIR"), "/tmp"]
    return list(dict.fromkeys(Path(os.path.expandvars(name)) for name in named if name))


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


def is_intact(directory: Path, by_content: bool = True) -> bool:
    """Whether everything the manifest lists is there, unchanged (tmp cleaners take files away one by one).

    by_content: read the files; else sizes are compared, which for an environment is a second instead of many.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        for name, (size, crc) in manifest.items():
            path = directory / name
            found = path.lstat()
            if stat.S_ISLNK(found.st_mode):
                continue
            if found.st_size != size or (by_content and zlib.crc32(path.read_bytes()) != crc):
                return False
    except (OSError, ValueError):
        return False
    return True


def extract(archive: Path, directory: Path) -> None:
    """Unpack from front to back, in large reads; refuses members that would leave `directory`.

    Raises:
        BootstrapError: what came out is not what the manifest says.
    """
    import tarfile  # only when there is something to unpack: this runs on every node at every start

    found: dict[str, list[int]] = {}
    made: set[Path] = set()
    with tarfile.open(archive, "r|*", bufsize=4 * _BLOCK) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if member.name.startswith("/") or ".." in parts or not (member.isfile() or member.issym()):
                raise BootstrapError(f"{archive}: unexpected member {member.name!r}; freeze the run again")
            target = directory / member.name
            if target.parent not in made:
                # A link made before must not lead what comes after it out of here.
                if target.parent.resolve() != directory.resolve() / Path(*parts[:-1]):
                    raise BootstrapError(f"{archive}: {member.name!r} lies behind a link; freeze the run again")
                target.parent.mkdir(parents=True, exist_ok=True)
                made.add(target.parent)
            if member.issym():
                target.symlink_to(member.linkname)
                continue
            source = tar.extractfile(member)
            assert source is not None
            size = crc = 0
            with open(target, "xb", buffering=0) as out:
                while block := source.read(_BLOCK):
                    size, crc = size + len(block), zlib.crc32(block, crc)
                    out.write(block)
            found[member.name] = [size, crc]
            if member.mode & 0o100:
                target.chmod(0o755)
            if member.mtime:  # compiled modules are valid for a source of this age
                os.utime(target, (member.mtime, member.mtime))
    found.pop(MANIFEST, None)
    if found != json.loads((directory / MANIFEST).read_text(encoding="utf-8")):
        raise BootstrapError(f"{archive}: damaged; its files are not those of its manifest")


def unpack(archive: Path, name: str, parent: Path, by_content: bool = True, room: int = 0) -> Path:
    """The directory below `parent` that holds the archive's content, unpacked now or by somebody before.

    Safe against any number of processes at once: each unpacks into a directory of its own and renames it. A directory
    found damaged is left alone, since another process may be running from it; the next number is used instead.

    Args:
        name: of the directory; stands for the content.
        room: bytes that must be free before anything is unpacked.

    Raises:
        OSError: `parent` cannot be written, or is full.
        BootstrapError: the archive is damaged.
    """
    base = private_base(parent)
    for number in range(1000):
        directory = base / (name if number == 0 else f"{name}.{number}")
        if directory.exists():
            if _hold(directory) and is_intact(directory, by_content):
                return directory
            continue
        _sweep(base, _UNUSED)
        if room and _free(base) < room:
            _sweep(base, 0)
            if _free(base) < room:
                raise OSError(errno.ENOSPC, f"{room / 1e9:.1f} GB are needed and {_free(base) / 1e9:.1f} GB free")
        tmp = Path(tempfile.mkdtemp(prefix=".tmp-", dir=base))
        is_mine = False
        try:
            extract(archive, tmp)
            os.rename(tmp, directory)
            is_mine = True
        except OSError:
            # Somebody was quicker. Renaming onto a directory that is not empty: ENOTEMPTY or EEXIST, by file system.
            if not directory.exists():
                raise
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
        if _hold(directory) and (is_mine or is_intact(directory, by_content)):
            return directory
    raise BootstrapError(f"{base}: no intact copy of {archive} could be made; look into that directory")


def _free(base: Path) -> int:
    found = os.statvfs(base)
    return found.f_bavail * found.f_frsize


def _hold(directory: Path) -> bool:
    """Mark a directory as in use, as long as this process or what it becomes lives; False if it is being removed."""
    path = directory / MANIFEST
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(fd)
        is_there = os.stat(path).st_ino == os.fstat(fd).st_ino
    except BlockingIOError:
        is_there = False
    except OSError:
        is_there = path.exists()  # a file system without locks, or read-only: nobody sweeps there either
    if is_there:
        os.set_inheritable(fd, True)
        _held.append(fd)
    else:
        os.close(fd)
    return is_there


def _sweep(base: Path, unused: float) -> None:
    """Take away what was left half-unpacked, and what nobody works in nor used for `unused` seconds."""
    for entry in base.iterdir():
        try:
            if entry.name.startswith(".tmp-"):
                if time.time() - entry.lstat().st_mtime > _STALE:
                    shutil.rmtree(entry, ignore_errors=True)
            elif time.time() - (entry / MANIFEST).stat().st_mtime >= unused:
                _remove(entry)
        except OSError:
            continue


def _remove(directory: Path) -> None:
    """Raises OSError if it is in use (or no locks can be had: then nobody knows)."""
    fd = os.open(directory / MANIFEST, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = Path(tempfile.mkdtemp(prefix=".tmp-", dir=directory.parent))
        os.rename(directory, gone)
        shutil.rmtree(gone, ignore_errors=True)
    finally:
        os.close(fd)


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
    os.environ.pop(CODE, None)
    for parent in [*local_parents(os.environ), run_dir]:
        try:
            directory = unpack(archive, found[:32], parent)
        except OSError as e:
            print(f"stoker: cannot unpack the code below {parent} ({e.strerror or e})", file=sys.stderr)
            continue
        if parent is not run_dir:
            os.environ[CODE] = str(directory)
        return [str(directory / entry) for entry in record["pythonpath"]]
    raise BootstrapError(f"{archive}: could not be unpacked; set cluster.local_dir to a writable directory")


def enter_environment(archive: Path, arguments: list[str]) -> None:
    """Unpack the Python environment and become its interpreter; returns only where that cannot be, with the reason
    in STAGED: the shared environment serves as well, only slower."""
    began = time.monotonic()
    errors: list[str] = []
    for parent in local_parents(os.environ):
        try:
            # A tenth more for what a file system adds to many small files.
            room = int(archive.stat().st_size * 1.1)
            directory = unpack(archive, f"env-{archive.stem}", parent, by_content=False, room=room)
            python = _interpreter(directory)
        except (OSError, BootstrapError) as e:
            errors.append(f"{parent}: {getattr(e, 'strerror', None) or e}")
            continue
        seconds = round(time.monotonic() - began, 1)
        os.environ[STAGED] = json.dumps({"directory": str(directory), "seconds": seconds})
        os.environ[ENV_DIR] = str(directory)
        os.environ["PATH"] = os.pathsep.join([str(directory / "bin"), os.environ.get("PATH", os.defpath)])
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            if name in os.environ:
                os.environ[name] = str(directory)
        os.execv(python, [python, __file__, *arguments])
    reason = "; ".join(errors)
    os.environ[STAGED] = json.dumps({"reason": reason})
    print(f"stoker: warning: going on with the shared Python environment ({reason})", file=sys.stderr)


def _interpreter(directory: Path) -> str:
    """The environment's python; it is started once, to see that its base and its libraries are on this node.

    Raises:
        BootstrapError: it does not run, or finds another environment than this one.
    """
    python = directory / "bin" / "python"
    command = [str(python), "-I", "-c", "import sys, encodings; print(sys.prefix)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BootstrapError(f"{python} -> {os.path.realpath(python)} does not run on this node ({e})") from e
    if done.returncode or Path(done.stdout.strip()).resolve() != directory.resolve():
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise BootstrapError(f"{python} does not work when moved: {said[-1] if said else 'it says nothing'}")
    return str(python)


def main(argv: list[str]) -> None:
    is_staged = argv[:1] == ["--staged"]
    argv = argv[is_staged:]
    if not argv:
        raise BootstrapError("usage: python RUN_DIR/bootstrap.py [--staged] MODULE [ARGUMENTS...]")
    # Slurm warns only once: a signal that comes while we unpack is kept for the module.
    signal.signal(signal.SIGUSR1, lambda *_: os.environ.update(STOKER_WARNED="1"))
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        # Ignored for a container's own processes (launcher/container.py), not for us.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if is_staged and os.environ.get(ENV_ARCHIVE):
        enter_environment(Path(os.environ[ENV_ARCHIVE]), argv)
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
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        # Not 1, which modules return for reasons of their own: the batch script looks after these.
        traceback.print_exc()
        sys.exit(BROKE)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BootstrapError as error:
        print(f"stoker: error: {error}", file=sys.stderr)
        sys.exit(NO_CODE)
