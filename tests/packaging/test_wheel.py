"""The wheel, built from a copy of the tree and installed in an environment of its own, away from the clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("wheel")  # one process builds and installs it once

OUTSIDE_THE_WHEEL = {"tests", "docs", "benchmarks", "tools", "requirements"}


def files_of_the_tree(root: Path) -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [name for name in listing.split("\0") if name and (root / name).is_file()]


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The name has a space and a hyphen: neither may matter.
    copy = tmp_path_factory.mktemp("build") / "my clone-1"
    for name in files_of_the_tree(repository):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", copy / "dist", copy], check=True, cwd=copy)
    (built,) = (copy / "dist").glob("stoker-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; the dependencies come from the development environment by a .pth file.

    .pth files inside a folder that was added by a .pth file are not read, so the editable install stays out of sight.
    """
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    command = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", "--no-compile", wheel], check=True)
    (site_packages(venv) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


def site_packages(venv: Path) -> Path:
    (folder,) = venv.glob("lib/python3*/site-packages")
    return folder


def run_in(venv: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(venv / "bin" / arguments[0]), *arguments[1:]]
    return subprocess.run(command, cwd=venv, env=environment, capture_output=True, text=True, timeout=120)


def test_wheel_holds_exactly_the_packages_and_their_data(repository: Path, wheel: Path) -> None:
    packaged = re.compile(r".*\.(py|yaml|cu|cuh|h|cpp|j2)$|py\.typed$|slurm_templates/.*")
    expected = {
        f"stoker/{name}"
        for name in files_of_the_tree(repository)
        if packaged.match(name)
        and name.split("/")[0] not in OUTSIDE_THE_WHEEL
        and not name.startswith((".", "hydra_plugins/"))
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.startswith("stoker/")} == expected


def test_only_stoker_lands_at_the_top_level(installed: Path) -> None:
    # wheel files only: what the environment came with is the .pth file written above
    names = {entry.name for entry in site_packages(installed).iterdir()} - {"dependencies.pth", "hydra_plugins"}
    assert {re.sub(r"-[0-9.]+(dev\d+)?\.dist-info", ".dist-info", name) for name in names} == {
        "stoker",
        "stoker.dist-info",
    }


def test_stoker_is_imported_from_the_environment_and_not_from_the_clone(installed: Path) -> None:
    code = "import stoker, stoker.conf, stoker.launcher.run, stoker.kernels; print(stoker.__file__)"
    done = run_in(installed, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == site_packages(installed) / "stoker" / "__init__.py"


def test_command_answers_help(repository: Path, installed: Path) -> None:
    if not (repository / "launcher" / "cli.py").exists():
        pytest.skip("launcher/cli.py does not exist yet")
    done = run_in(installed, "stoker", "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: stoker" in done.stdout.lower()


def test_every_folder_with_python_files_is_a_listed_package(repository: Path) -> None:
    configuration = (repository / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(re.findall(r'^\s+"(stoker[\w.]*)",$', configuration, re.MULTILINE))
    folders = {Path(name).parent for name in files_of_the_tree(repository) if name.endswith(".py")}
    ours = {
        folder
        for folder in folders
        if not OUTSIDE_THE_WHEEL & set(folder.parts) and "hydra_plugins" not in folder.parts
    }
    assert {".".join(["stoker", *folder.parts]) for folder in ours} - listed == set()
