"""The frozen code is what runs, on every node, whatever else lies about."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from stoker.launcher import code
from stoker.launcher.run import bootstrap

PROBE = """
import json, os, subprocess, sys
def where(code):
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return out.strip()
import stoker.lib, mine
child = where("import stoker.lib, mine; print(stoker.lib.__file__); print(mine.__file__)")
print(json.dumps({"stoker": stoker.lib.__file__, "mine": mine.__file__, "argv": sys.argv[1:], "child": child,
                  "name": __name__, "path": sys.path}))
"""


def snapshot(tmp_path: Path, marker: str = "1") -> code.Snapshot:
    source = tmp_path / f"source{marker}"
    files = {
        "code/stoker/__init__.py": "",
        "code/stoker/probe.py": PROBE,
        "code/stoker/lib.py": "",
        "code/stoker/data.txt": marker,
        "code/user/mine.py": "",
    }
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    return code.Snapshot({n: source / n for n in files}, ("code", "code/user"), (), None)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "a run (1) '\u00e9' $x"
    directory.mkdir()
    packed = code.pack(snapshot(tmp_path), directory / "code.tar.gz")
    record = {"code": {"sha256": packed.sha256, "pythonpath": ["code", "code/user"]}}
    (directory / "run.json").write_text(json.dumps(record))
    shutil.copy(bootstrap.__file__, directory / "bootstrap.py")
    return directory


def start(run_dir: Path, tmp: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TMPDIR": str(tmp)}
    command = [sys.executable, str(run_dir / "bootstrap.py"), "stoker.probe", *arguments]
    return subprocess.run(command, env=env, cwd=cwd or run_dir, capture_output=True, text=True, check=False)


def test_module_and_its_children_get_the_frozen_code(run_dir: Path, tmp_path: Path) -> None:
    node = tmp_path / "node"
    node.mkdir()
    # A clone beside: what the current directory holds must not win.
    (tmp_path / "stoker").mkdir()
    (tmp_path / "stoker" / "__init__.py").write_text("raise SystemExit('the live code was imported')")
    done = start(run_dir, node, "--flag", "a b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    base = node / f"stoker-{os.getuid()}"
    (directory,) = base.iterdir()
    assert seen["stoker"] == str(directory / "code/stoker/lib.py")
    assert seen["mine"] == str(directory / "code/user/mine.py")
    assert seen["argv"] == ["--flag", "a b"]
    assert seen["name"] == "__main__"
    assert str(run_dir) not in seen["path"]


def test_children_get_the_frozen_code(run_dir: Path, tmp_path: Path) -> None:
    seen = json.loads(start(run_dir, tmp_path).stdout)
    assert seen["child"].splitlines() == [seen["stoker"], seen["mine"]]


def test_directory_is_closed_to_others(run_dir: Path, tmp_path: Path) -> None:
    os.umask(0o022)
    (tmp_path / f"stoker-{os.getuid()}").mkdir(mode=0o777)
    assert start(run_dir, tmp_path).returncode == 0
    assert (tmp_path / f"stoker-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_name_taken_by_somebody_else_is_not_trusted(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    base = tmp_path / f"stoker-{os.getuid()}"
    base.symlink_to(elsewhere)
    done = start(run_dir, tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(elsewhere.iterdir()) == []
    assert f"{base}-" in json.loads(done.stdout)["stoker"], "a fresh private directory stands in"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make a directory of somebody else's")
def test_directory_of_somebody_else_is_not_trusted(run_dir: Path, tmp_path: Path) -> None:
    base = tmp_path / f"stoker-{os.getuid()}"
    base.mkdir(mode=0o700)
    os.chown(base, 12345, -1)
    assert start(run_dir, tmp_path).returncode == 0
    assert list(base.iterdir()) == []


def test_many_at_once_share_one_copy(run_dir: Path, tmp_path: Path) -> None:
    env = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, str(run_dir / "bootstrap.py"), "stoker.probe"]
    started = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    places = {json.loads(p.communicate()[0])["stoker"] for p in started}
    assert all(p.returncode == 0 for p in started)
    assert len(places) == 1
    assert len(list((tmp_path / f"stoker-{os.getuid()}").iterdir())) == 1, "no half-unpacked directory stays"


def test_half_unpacked_directory_is_not_taken(run_dir: Path, tmp_path: Path) -> None:
    """A process killed while unpacking leaves only a temporary name; it is taken away after a day."""
    base = tmp_path / f"stoker-{os.getuid()}"
    old, fresh = base / ".tmp-old", base / ".tmp-fresh"
    for directory in (old, fresh):
        (directory / "code").mkdir(parents=True)
    os.utime(old, (1, 1))
    assert start(run_dir, tmp_path).returncode == 0
    assert not old.exists()
    assert fresh.exists(), "it may be somebody's who is at it"


@pytest.mark.parametrize("damage", ["missing", "edited", "truncated"])
def test_damaged_copy_is_replaced_without_touching_it(damage: str, run_dir: Path, tmp_path: Path) -> None:
    first = Path(json.loads(start(run_dir, tmp_path).stdout)["stoker"])
    victim = first.parent / "data.txt"
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_text("2" if damage == "edited" else "")
    second = json.loads(start(run_dir, tmp_path).stdout)["stoker"]
    assert second == str(first).replace(str(first.parents[2]), f"{first.parents[2]}.1")
    assert first.exists(), "another process may be running from it"
    assert json.loads(start(run_dir, tmp_path).stdout)["stoker"] == second


def test_full_or_read_only_tmp_falls_back_to_the_run_directory(run_dir: Path, tmp_path: Path) -> None:
    env = os.environ | {"STOKER_LOCAL_DIR": "/proc"}
    command = [sys.executable, str(run_dir / "bootstrap.py"), "stoker.probe"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stoker"].startswith(str(run_dir))
    assert "cannot unpack the code below /proc" in done.stderr


def test_changed_archive_is_refused(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "code.tar.gz").unlink()
    code.pack(snapshot(tmp_path, "other"), run_dir / "code.tar.gz")
    done = start(run_dir, tmp_path)
    assert done.returncode == 71
    assert "changed since the run was frozen" in done.stderr


@pytest.mark.parametrize("name", ["../outside", "/abs", "code/../../outside"])
def test_members_that_leave_the_directory_are_refused(name: str, tmp_path: Path) -> None:
    archive = tmp_path / "bad.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(bootstrap.BootstrapError, match="unexpected member"):
        bootstrap.extract(archive, tmp_path / "out")


def test_bootstrap_imports_nothing_of_ours() -> None:
    text = Path(bootstrap.__file__).read_text()
    assert "from ." not in text
    assert "import stoker" not in text
