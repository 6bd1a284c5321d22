"""Which files are frozen with a run, and that the archive depends on nothing but them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from stoker.launcher import code
from stoker.launcher.errors import UserError


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's git project: tracked, modified, untracked, ignored and deleted files, one kind each."""
    root = tmp_path / "my project"
    write(root, {"train.py": "old", "pkg/model.py": "m", "gone.py": "g", ".gitignore": "*.bin\nout/\n"})
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    write(root, {"train.py": "modified", "new.py": "untracked", "data.bin": "ignored", "out/x.py": "ignored"})
    (root / "gone.py").unlink()
    return root


def users(snapshot: code.Snapshot) -> set[str]:
    return {n.removeprefix("code/user/") for n in snapshot.files if n.startswith("code/user/")}


def test_tracked_modified_and_untracked_files_are_frozen(project: Path, tmp_path: Path) -> None:
    snapshot = code.collect(project / "pkg")
    assert users(snapshot) == {"train.py", "pkg/model.py", ".gitignore", "new.py"}
    assert snapshot.project == project
    code.pack(snapshot, tmp_path / "code.tar.gz")
    with tarfile.open(tmp_path / "code.tar.gz") as tar:
        member = tar.extractfile("code/user/train.py")
        assert member is not None
        assert member.read() == b"modified"


def test_keys_are_never_frozen_and_are_named(project: Path) -> None:
    keys = [".env", ".env.local", "id_rsa", "id_ed25519.pub", "certs/a.pem", ".netrc", "cfg/.aws/credentials", "x.key"]
    write(project, dict.fromkeys(keys, "secret") | {"id_map.py": "code", "environment.py": "code"})
    git(project, "add", "-f", ".env", "id_rsa")
    snapshot = code.collect(project)
    assert set(snapshot.left_out) == set(keys)
    assert users(snapshot) >= {"id_map.py", "environment.py"}
    assert users(snapshot).isdisjoint(keys)


def test_run_directories_below_the_project_are_not_frozen(project: Path) -> None:
    write(project, {"runs/a-1/run.json": "{}", "runs/a-1/submit.sbatch": "", "runs/a-1/checkpoints/step/x": "big"})
    write(project, {"runs/.tmp-b/code.tar.gz": "half"})
    assert not any(name.startswith("runs/") for name in users(code.collect(project)))


def test_submodule_is_frozen_with_its_own_rules(project: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    write(inner, {"lib.py": "l", ".gitignore": "*.log"})
    git(tmp_path, "init", "-q", str(inner))
    git(inner, "add", ".")
    git(inner, "commit", "-q", "-m", "inner")
    git(project, "submodule", "add", "-q", str(inner), "third/inner")
    write(project, {"third/inner/new.py": "n", "third/inner/x.log": "ignored"})
    found = users(code.collect(project))
    assert {"third/inner/lib.py", "third/inner/new.py"} <= found
    assert "third/inner/x.log" not in found


def test_too_large_a_snapshot_is_refused_naming_the_largest(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "LIMIT", 3_000_000)
    with open(project / "weights.pt", "wb") as f:
        f.truncate(5_000_000)
    with pytest.raises(UserError, match=r"expected at most 3 MB\n.*weights\.pt \(5 MB\)(.|\n)*\.gitignore"):
        code.collect(project)


def test_outside_a_git_project_only_stoker_is_frozen(tmp_path: Path) -> None:
    write(tmp_path, {"loose.py": "x"})
    snapshot = code.collect(tmp_path)
    assert snapshot.project is None
    assert snapshot.pythonpath == ("code",)
    assert all(name.startswith("code/stoker/") for name in snapshot.files)


def test_without_git_only_stoker_is_frozen(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert code.collect(project).project is None


def test_package_is_frozen_with_data_and_without_the_clone_around_it(repository: Path) -> None:
    snapshot = code.collect(repository)
    names = {n.removeprefix("code/stoker/") for n in snapshot.files}
    assert {"__init__.py", "py.typed", "launcher/supervise.py", "conf/config.yaml"} <= names
    assert "slurm_templates/supervisor.sbatch.j2" in names
    tops = {name.partition("/")[0] for name in names}
    assert tops.isdisjoint({".git", ".venv", "tests", "docs", "benchmarks", "tools", ".dev", "README.md", "Makefile"})
    assert not any(n.endswith(".pyc") or "__pycache__" in n for n in names)
    assert snapshot.project is None, "the clone is stoker itself: it must not go in twice"


def test_stoker_cloned_into_a_project_is_not_doubled(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = project / "third" / "stoker"
    write(package, {"__init__.py": "", "launcher/__init__.py": "", "launcher/x.py": "x"})
    write(package, {"kernels/__init__.py": "", "kernels/native/cache.py": "print('{}')"})
    monkeypatch.setattr(code, "package_root", lambda: package)
    snapshot = code.collect(project)
    assert not any("third/stoker" in name for name in snapshot.files)
    assert "code/stoker/launcher/x.py" in snapshot.files


def test_same_files_give_the_same_bytes(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = code.pack(code.collect(project), tmp_path / "1.tar.gz")
    monkeypatch.setattr(time, "time", lambda: 5e9)
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(project, copy, symlinks=True)
    for path in copy.rglob("*.py"):
        os.utime(path, (1, 1))
    second = code.pack(code.collect(copy), tmp_path / "2.tar.gz")
    assert first.sha256 == second.sha256
    write(copy, {"train.py": "changed"})
    assert code.pack(code.collect(copy), tmp_path / "3.tar.gz").sha256 != first.sha256


def test_links_and_modes_survive(project: Path, tmp_path: Path) -> None:
    write(project, {"run.sh": "#!/bin/sh"})
    (project / "run.sh").chmod(0o755)
    (project / "pkg" / "alias.py").symlink_to("model.py")
    (project / "corpus").symlink_to("../data")
    snapshot = code.collect(project)
    code.pack(snapshot, tmp_path / "c.tar.gz")
    with tarfile.open(tmp_path / "c.tar.gz") as tar:
        members = {m.name: m for m in tar.getmembers()}
    assert members["code/user/run.sh"].mode == 0o755
    assert members["code/user/train.py"].mode == 0o644
    assert members["code/user/pkg/alias.py"].linkname == "model.py"
    assert members["code/user/corpus"].linkname == str(tmp_path / "data"), "it leads out of the project, which moves"


def test_awkward_file_names_survive(project: Path, tmp_path: Path) -> None:
    names = ["a b.py", "quote'\".py", "caf\u00e9.py", "new\nline.py", os.fsdecode(b"latin\xe9.py")]
    write(project, dict.fromkeys(names, "x"))
    snapshot = code.collect(project)
    assert set(names) <= users(snapshot)
    code.pack(snapshot, tmp_path / "c.tar.gz")
    with tarfile.open(tmp_path / "c.tar.gz") as tar:
        assert {f"code/user/{n}" for n in names} <= set(tar.getnames())


def test_git_state_has_no_remote(project: Path) -> None:
    git(project, "remote", "add", "origin", "https://me:hunter2@example.org/x.git")
    state = code.git_state(project)
    assert state is not None
    assert state["dirty"] is True
    assert len(str(state["sha"])) == 40
    assert "hunter2" not in str(state)


def test_run_directories_make_no_work_tree_dirty(project: Path) -> None:
    git(project, "add", "-A")
    git(project, "-c", "user.name=me", "-c", "user.email=me@example.org", "commit", "-qm", "all")
    write(project, {"runs/a-1/run.json": "{}"})

    def is_dirty() -> object:
        state = code.git_state(project, project.resolve() / "runs")
        assert state is not None
        return state["dirty"]

    assert is_dirty() is False
    write(project, {"new.py": ""})
    assert is_dirty() is True


def test_src_layout_is_put_on_the_path(project: Path) -> None:
    write(project, {"src/mine/__init__.py": ""})
    assert code.collect(project).pythonpath == ("code", "code/user", "code/user/src")


def test_snapshot_is_not_bent_by_git_s_own_variables(project: Path, tmp_path: Path) -> None:
    """Inside a git hook GIT_DIR points every git call at one repository."""
    script = f"from stoker.launcher import code; print(code.git_root(__import__('pathlib').Path({str(project)!r})))"
    env = os.environ | {"GIT_DIR": str(tmp_path / "other"), "GIT_WORK_TREE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(project)
