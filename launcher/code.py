"""The snapshot of the code that a run works with: which files go into code.tar.gz, and writing it.

Owns: collecting and packing. Inside: `code/stoker`, the imported package; `code/user`, the git project around the
current directory, if another. Unpacking is run/bootstrap.py's. The same files give the same bytes, so the archive's
SHA-256 names its content.

Built kernels go along as code/stoker/kernels/built, so that nodes need no compiler; kernels/native/cache.py says which.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .errors import UserError, environment_error
from .run.bootstrap import MANIFEST, digest

LIMIT = 200 * 1000 * 1000  # bytes, unpacked
_BUILT = "code/stoker/kernels/built"  # objects of the native kernels
_GIT_TIMEOUT = 120  # seconds
_BACKUPS = ("*~", "*.swp", ".#*", "#*#", "*.pyc", "*.pyo")
# Never frozen, tracked or not. Whole names, so that a module called id_map.py is no key.
_KEYS = (
    ".env*", "*.pem", "*.key", "*.p12", "*.pfx", ".netrc", "_netrc", ".pypirc", ".git-credentials", ".htpasswd",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
)  # fmt: skip
_KEY_FOLDERS = {".ssh", ".aws", ".gnupg", ".kube"}


@dataclass(frozen=True)
class Snapshot:
    """What goes into the archive."""

    files: dict[str, Path]  # name in the archive -> file
    pythonpath: tuple[str, ...]  # directories of the archive that belong on the path, in order
    left_out: tuple[str, ...]  # files of the user's project that look like keys
    project: Path | None  # root of the user's project, None if there is none besides stoker itself
    cwd: str | None = None  # the current directory's place in the archive, None if it is in no such project

    @property
    def has_kernels(self) -> bool:
        """Whether built kernels go along."""
        return any(name.startswith(f"{_BUILT}/") and name.endswith(".so") for name in self.files)


@dataclass(frozen=True)
class Packed:
    sha256: str
    bytes: int
    files: int


def package_root() -> Path:
    """Directory of the imported `stoker` package: a clone, or site-packages/stoker."""
    return Path(__file__).resolve().parent.parent


def collect(cwd: Path) -> Snapshot:
    """Choose the files for a launch from `cwd`.

    Raises:
        UserError: they are over LIMIT together (the largest are named), or git cannot list them.
    """
    package = package_root()
    files = {f"code/stoker/{p.relative_to(package).as_posix()}": p for p in _package_files(package)}
    files |= {f"{_BUILT}/{name}": path for name, path in built_kernels(package).items()}
    pythonpath = ["code"]
    project = git_root(cwd)
    if project == package:
        project = None
    left_out: list[str] = []
    if project is not None:
        for name in _project_files(project, package):
            if _is_key(name):
                left_out.append(name)
            else:
                files[f"code/user/{name}"] = project / name
        pythonpath.append("code/user")
        if (project / "src").is_dir():
            pythonpath.append("code/user/src")
    _refuse_if_large(files)
    inside = None if project is None else PurePosixPath("code/user", cwd.resolve().relative_to(project)).as_posix()
    return Snapshot(dict(sorted(files.items())), tuple(pythonpath), tuple(left_out), project, inside)


def pack(snapshot: Snapshot, path: Path) -> Packed:
    """Write the archive to `path`: sorted, without times or owners.

    Raises:
        OSError: `path` cannot be written, or a file cannot be read.
    """
    manifest: dict[str, tuple[int, int]] = {}
    members: list[tuple[tarfile.TarInfo, bytes]] = []
    for name, file in snapshot.files.items():
        info, data = _member(name, file)
        members.append((info, data))
        if info.isfile():
            manifest[name] = (len(data), zlib.crc32(data))
    head = json.dumps(manifest, separators=(",", ":")).encode()
    members.insert(0, (_info(MANIFEST, len(head)), head))
    with (
        open(path, "xb") as raw,
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for info, data in members:
            tar.addfile(info, io.BytesIO(data) if info.isfile() else None)
    return Packed(digest(path), path.stat().st_size, len(snapshot.files))


def _member(name: str, file: Path) -> tuple[tarfile.TarInfo, bytes]:
    if file.is_symlink():
        info = _info(name, 0)
        info.type = tarfile.SYMTYPE
        info.linkname = _link_target(name, file)
        return info, b""
    data = file.read_bytes()  # whole, so that size, checksum and content agree even while somebody edits
    return _info(name, len(data), executable=os.access(file, os.X_OK)), data


def _link_target(name: str, file: Path) -> str:
    """A link inside the project stays as it is; one that leads out of it is made absolute, since it moves."""
    target = os.readlink(file)
    depth = len(PurePosixPath(name).parts) - 3  # below code/user
    inside = os.path.normpath(os.path.join("/".join("d" * depth), target))
    if os.path.isabs(target) or not inside.startswith(".."):
        return target
    return os.path.abspath(file.parent / target)


def _info(name: str, size: int, executable: bool = False) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o755 if executable else 0o644
    return info


def _package_files(root: Path) -> Iterator[Path]:
    """The package's own files, from a wheel or a clone: modules of the root, and its subpackages whole."""
    for path in sorted(root.iterdir()):
        if path.is_file() and (path.suffix == ".py" or path.name == "py.typed"):
            yield path
        elif path.is_dir() and (path / "__init__.py").is_file():
            yield from _walk(path)


def built_kernels(package: Path) -> dict[str, Path]:
    """Objects in the caches that were built of the package's own sources: name -> file."""
    # By its path: the launcher imports no kernels, which would load torch.
    command = [sys.executable, "-I", "-S", str(package / "kernels" / "native" / "cache.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT, check=True)
    return {name: Path(path) for name, path in json.loads(done.stdout).items()}


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__" or _fits(path.name, _BACKUPS + _KEYS):
            continue
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file():
            yield path


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_key(name: str) -> bool:
    *folders, base = PurePosixPath(name).parts
    return _fits(base, _KEYS) or not _KEY_FOLDERS.isdisjoint(folders)


def _project_files(root: Path, package: Path) -> Iterator[str]:
    """Tracked, modified, and untracked-but-not-ignored files, relative to `root`; no run directories, no stoker."""
    is_run: dict[PurePosixPath, bool] = {}
    for name in _listed(root):
        path = root / name
        if package in path.parents or not (path.is_file() or path.is_symlink()):
            continue  # stoker itself is there already; a deleted file is still in git's index
        if not any(_is_run_dir(root, parent, is_run) for parent in PurePosixPath(name).parents):
            yield name


def _is_run_dir(root: Path, folder: PurePosixPath, known: dict[PurePosixPath, bool]) -> bool:
    """Runs often lie below the project and are not always ignored by git; their checkpoints are no code."""
    if folder not in known:
        here = root / folder
        known[folder] = folder.name.startswith(".tmp-") or all(
            (here / f).exists() for f in ("run.json", "submit.sbatch")
        )
    return known[folder]


def _listed(root: Path) -> list[str]:
    names = set(_git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")) - {""}
    found: set[str] = set()
    for name in names:
        # A submodule, or another clone inside: git names only the folder.
        folder = root / name
        if folder.is_dir() and not folder.is_symlink():
            inner = git_root(folder)
            if inner == folder.resolve():
                found.update(f"{name.rstrip('/')}/{n}" for n in _listed(inner))
        else:
            found.add(name)
    return sorted(found)


def git_root(folder: Path) -> Path | None:
    """Root of the git work tree around `folder`, None if there is none or no git.

    Raises:
        UserError: git refuses to look (a work tree of somebody else's); its own words are passed on.
    """
    try:
        top = _git(folder, "rev-parse", "--show-toplevel").strip("\n")
    except FileNotFoundError:
        return None
    except subprocess.CalledProcessError as e:
        if "dubious ownership" in e.stderr:
            raise UserError(f"{folder}: {e.stderr.strip()}") from e
        return None
    return Path(top).resolve() if top else None


def git_state(root: Path, runs: Path | None = None) -> dict[str, str | bool | None] | None:
    """Commit, branch and whether the work tree differs from it; None without a git work tree. Never the remote: its
    address may hold a password. `runs`: where run directories lie; being there, they are no difference."""
    if git_root(root) is None:
        return None
    try:
        sha = _git(root, "rev-parse", "HEAD").strip()
    except subprocess.CalledProcessError:
        sha = ""  # no commit yet
    branch = _git(root, "rev-parse", "--abbrev-ref", "HEAD").strip() if sha else ""
    changed = [line for line in _git(root, "status", "--porcelain", "-z").split("\0") if line]
    dirty = not all(runs and line.startswith("??") and (root / line[3:]).is_relative_to(runs) for line in changed)
    return {"root": str(root), "sha": sha or None, "branch": branch or None, "dirty": dirty}


def _git(folder: Path, *arguments: str) -> str:
    # GIT_DIR and its like, set inside a git hook, would point every call at one repository.
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"LC_ALL": "C.UTF-8"}
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, env=env, timeout=_GIT_TIMEOUT, check=True)
    except subprocess.TimeoutExpired as e:
        text = (
            f"{folder}: git did not answer within {_GIT_TIMEOUT} s; is it a very large work tree? Launch from another"
        )
        raise environment_error(text) from e
    except subprocess.CalledProcessError as e:
        e.stderr = os.fsdecode(e.stderr)
        raise
    return os.fsdecode(done.stdout)


def _refuse_if_large(files: dict[str, Path]) -> None:
    sizes = {name: file.lstat().st_size for name, file in files.items()}
    total = sum(sizes.values())
    if total <= LIMIT:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    listing = ", ".join(f"{files[name]} ({sizes[name] / 1e6:.0f} MB)" for name in largest)
    raise UserError(
        f"the code snapshot would be {total / 1e6:.0f} MB; expected at most {LIMIT / 1e6:.0f} MB\n"
        f"the largest files: {listing}\n"
        "every file that git does not ignore is frozen with the run: add data and outputs to .gitignore"
    )
