"""A Python environment in one archive: packed once beside the runs, unpacked on a node, and run from there."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from stoker.launcher import code, stage
from stoker.launcher.errors import UserError
from stoker.launcher.run import bootstrap

PROBE = """
import json, os, subprocess, sys
import inner, outer
child = subprocess.run([sys.executable, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True).stdout
print(json.dumps({"prefix": sys.prefix, "inner": inner.__file__, "outer": outer.__file__, "child": child.strip(),
                  "argv": sys.argv[1:], "staged": json.loads(os.environ.get("STOKER_STAGED", "null")),
                  "path": os.environ["PATH"].split(":")[0], "code": os.environ.get("STOKER_CODE")}))
"""


class Site(NamedTuple):
    venv: Path
    root: Path  # run_root
    run: Path
    node: Path  # a node's local directory


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A small virtual environment with a package, an editable one and links; and a run that looks about."""
    venv, run, node = tmp_path / "my env", tmp_path / "runs" / "a run", tmp_path / "node"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python3*/site-packages")
    (packages / "inner").mkdir()
    (packages / "inner" / "__init__.py").write_text("")
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "outer.py").write_text("")
    (packages / "outer.pth").write_text(f"{tmp_path / 'clone'}\n")
    (venv / "absolute").symlink_to(packages / "inner")
    (venv / "leaving").symlink_to("../clone")
    run.mkdir(parents=True)
    node.mkdir()
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "init.py").write_text("")
    files = {"code/stoker/__init__.py": tmp_path / "init.py", "code/stoker/probe.py": tmp_path / "probe.py"}
    packed = code.pack(code.Snapshot(files, ("code",), (), None), run / "code.tar.gz")
    (run / "run.json").write_text(json.dumps({"code": {"sha256": packed.sha256, "pythonpath": ["code"]}}))
    shutil.copy(bootstrap.__file__, run / "bootstrap.py")
    return Site(venv, tmp_path / "runs", run, node)


def packed(site: Site) -> stage.Environment:
    environment = stage.plan(str(site.venv / "bin/python"), site.root)
    stage.ensure(environment)
    return environment


def start(site: Site, archive: Path) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {bootstrap.LOCAL_DIR: str(site.node), bootstrap.ENV_ARCHIVE: str(archive)}
    command = [str(site.venv / "bin/python"), str(site.run / "bootstrap.py"), "--staged", "stoker.probe", "a b"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def seen(process: subprocess.Popen[str]) -> dict[str, object]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return dict(json.loads(out))


def test_processes_run_from_the_unpacked_environment_and_find_what_lies_outside(site: Site) -> None:
    environment = packed(site)
    found = seen(start(site, environment.archive))
    directory = site.node / f"stoker-{os.getuid()}" / f"env-{environment.archive.stem}"
    assert found["prefix"] == found["child"] == str(directory)
    assert str(found["inner"]).startswith(f"{directory}/lib/")
    assert found["outer"] == str(site.root.parent / "clone" / "outer.py"), "the editable installation still works"
    assert environment.elsewhere == (str(site.root.parent / "clone"),), "and a launch says that it is not staged"
    assert found["argv"] == ["a b"]
    assert found["path"] == f"{directory}/bin"
    assert found["staged"] == {"directory": str(directory), "seconds": found["staged"]["seconds"]}  # type: ignore[index]
    assert os.readlink(directory / "absolute") == os.path.relpath(next(directory.glob("lib/*/*/inner")), directory)
    assert os.readlink(directory / "leaving") == str(site.root.parent / "clone")


def test_later_and_simultaneous_starts_share_one_copy(site: Site) -> None:
    archive = packed(site).archive
    places = {str(seen(p)["prefix"]) for p in [start(site, archive) for _ in range(4)]}
    (place,) = places
    inode = Path(place).stat().st_ino
    assert seen(start(site, archive))["prefix"] == place
    assert Path(place).stat().st_ino == inode
    names = sorted(p.name for p in (site.node / f"stoker-{os.getuid()}").iterdir())
    assert len(names) == 2, "code and environment, and nothing half-unpacked"


def test_a_copy_with_files_missing_is_replaced(site: Site) -> None:
    archive = packed(site).archive
    first = seen(start(site, archive))
    Path(str(first["inner"])).unlink()
    assert seen(start(site, archive))["prefix"] == f"{first['prefix']}.1"


@pytest.mark.parametrize("fault", ["room", "base", "archive", "damage"])
def test_where_it_cannot_be_staged_the_shared_environment_serves(
    site: Site, fault: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if fault == "base":  # of an environment whose interpreter nodes do not have
        for link in site.venv.glob("bin/python*"):
            link.unlink()
        (site.venv / "bin/python").symlink_to("/nowhere/python3")
        monkeypatch.setattr(stage, "_prefix", lambda _: site.venv)
    archive = packed(site).archive
    if fault == "archive":
        archive.unlink()
    if fault == "damage":
        data = bytearray(archive.read_bytes())
        data[data.index(b"home = ")] ^= 1
        archive.write_bytes(data)
    if fault == "room":
        monkeypatch.setattr(bootstrap, "_free", lambda _: 1000)
    monkeypatch.setenv(bootstrap.LOCAL_DIR, str(site.node))
    monkeypatch.setenv(bootstrap.STAGED, "")
    bootstrap.enter_environment(archive, ["stoker.probe"])
    reason = json.loads(os.environ[bootstrap.STAGED])["reason"]
    words = {"room": "GB free", "base": "/nowhere/python3 does not run", "archive": "No such file", "damage": "damaged"}
    assert words[fault] in reason
    assert "going on with the shared Python environment" in capfd.readouterr().err


def test_an_archive_is_made_once_and_anew_when_the_environment_changes(site: Site) -> None:
    first = packed(site).archive
    before = first.stat().st_ino
    assert packed(site).archive == first
    assert first.stat().st_ino == before
    (module,) = site.venv.glob("lib/*/*/inner/__init__.py")
    module.write_text("x = 1\n")
    assert packed(site).archive != first
    assert sorted(first.parent.glob("[!.]*")) == sorted([first, packed(site).archive]), "no temporary file stays"


def test_a_failed_packing_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage, "_pack", full)
    with pytest.raises(UserError, match=r"cannot be packed: .*No space left"):
        packed(site)
    assert [p.name for p in (site.root / stage.FOLDER).iterdir()] == [".gitignore"]


def test_an_archive_in_the_users_project_is_not_frozen_with_the_next_run(site: Site) -> None:
    project = site.root.parent
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    archive = packed(site).archive
    assert archive.is_relative_to(project)
    assert not [name for name in code.collect(project).files if stage.FOLDER in name]


def test_what_cannot_be_staged_is_refused(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(prefix: str, base: str) -> str:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\necho '{json.dumps([prefix, base, ''])}'\n")
        python.chmod(0o755)
        with pytest.raises(UserError) as e:
            stage.plan(str(python), site.root)
        return str(e.value)

    assert "set cluster.python to the interpreter of a virtual or conda environment" in refused("/usr", "/usr")
    assert "builds upon the Python in /tmp/py, which only this machine has" in refused(str(site.venv), "/tmp/py")
    monkeypatch.setattr(stage, "LIMIT", 100)
    assert "expected at most 0 GB\nthe largest directories: " in refused(str(site.venv), "/opt")
    with pytest.raises(UserError, match="does not run here"):
        stage.plan("/nowhere/python", site.root)


def test_no_room_beside_the_runs_is_told_before_anything_is_made(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="GB free, and the packed environment takes"):
        stage.plan(str(site.venv / "bin/python"), site.root)
    assert not (site.root / stage.FOLDER).exists()


def test_what_nobody_uses_is_swept_and_what_is_in_use_stays(site: Site) -> None:
    archive = packed(site).archive
    base = site.node / f"stoker-{os.getuid()}"
    for name in ("unused", "used", "recent"):
        (base / name).mkdir(parents=True)
        (base / name / bootstrap.MANIFEST).write_text("{}")
    for name in ("unused", "used"):
        os.utime(base / name / bootstrap.MANIFEST, (1, 1))
    with open(base / "used" / bootstrap.MANIFEST) as f:
        fcntl.flock(f, fcntl.LOCK_SH)
        os.utime(base / "used" / bootstrap.MANIFEST, (1, 1))
        seen(start(site, archive))
        assert {p.name for p in base.iterdir()} >= {"used", "recent"}
        assert not (base / "unused").exists()


def test_a_running_process_holds_what_it_runs_from(site: Site) -> None:
    (site.root.parent / "probe.py").write_text("print('up', flush=True)\nimport time; time.sleep(60)")
    shutil.rmtree(site.run)
    site.run.mkdir()
    files = {f"code/stoker/{n}.py": site.root.parent / f"{m}.py" for n, m in (("__init__", "init"), ("probe", "probe"))}
    made = code.pack(code.Snapshot(files, ("code",), (), None), site.run / "code.tar.gz")
    (site.run / "run.json").write_text(json.dumps({"code": {"sha256": made.sha256, "pythonpath": ["code"]}}))
    shutil.copy(bootstrap.__file__, site.run / "bootstrap.py")
    process = start(site, packed(site).archive)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    base = site.node / f"stoker-{os.getuid()}"
    bootstrap._sweep(base, -1.0)
    assert len(list(base.iterdir())) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while list(base.iterdir()) and time.monotonic() < deadline:
        bootstrap._sweep(base, -1.0)
    assert list(base.iterdir()) == []
