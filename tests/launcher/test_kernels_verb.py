"""`stoker kernels`: handed over here or in the container; what is built goes into a run's code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stoker.conf.compose import compose
from stoker.launcher import code, kernels, prepare
from stoker.launcher.run import bootstrap

CSRC = Path(code.__file__).parents[1] / "kernels" / "csrc"


def stoker(cache: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stoker.launcher.cli", "kernels", *arguments],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)} | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


def put(cache: Path, name: str, architectures: list[int], content: bytes = b"\x7fELF") -> Path:
    """An object of the kernels' own sources as a build leaves it: only the launcher's side is looked at here."""
    probe = "import sys; sys.path.insert(0, sys.argv[1]); import cache; print(cache.digest_of())"
    command = [sys.executable, "-c", probe, str(CSRC.parent / "native")]
    digest = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    entry = cache / "stoker" / "kernels" / name
    entry.mkdir(parents=True)
    (entry / "libstoker.so").write_bytes(content)
    manifest = {
        "sources": digest,
        "files": sorted(p.name for p in CSRC.glob("*.cu")),
        "architectures": architectures,
        "ptx": max(architectures),
        "emulated": False,
        "compiler": "nvcc",
        "abi": "2.11",
        "bytes": len(content),
        "built": 1.0,
    }
    (entry / "build.json").write_text(json.dumps(manifest))
    return entry


def test_built_kernels_and_measurements_travel_with_a_runs_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = put(tmp_path, "a" * 32, [90])
    old = put(tmp_path, "b" * 32, [80])
    manifest = json.loads((old / "build.json").read_text())
    (old / "build.json").write_text(json.dumps(manifest | {"sources": "of another version"}))
    (entry.parent / "measured-nvidia-h100.json").write_text("{}")
    (entry.parent / ".tmp-x").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("STOKER_KERNELS_CACHE", raising=False)
    snapshot = code.collect(tmp_path)
    built = {name: path for name, path in snapshot.files.items() if name.startswith("code/stoker/kernels/built/")}
    assert built == {
        f"code/stoker/kernels/built/{entry.name}/libstoker.so": entry / "libstoker.so",
        f"code/stoker/kernels/built/{entry.name}/build.json": entry / "build.json",
        "code/stoker/kernels/built/measured-nvidia-h100.json": entry.parent / "measured-nvidia-h100.json",
    }


@pytest.mark.parametrize(
    ("overrides", "is_warned"),
    [
        (["cluster.gpus_per_node=8"], True),
        (["cluster.gpus_per_node=8", "kernels=reference"], False),
        (["cluster.gpus_per_node=8", "task.cmd=[train.sh]"], False),
        ([], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_launch_onto_gpus_without_built_kernels_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], is_warned: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("STOKER_KERNELS_CACHE", raising=False)
    config = compose(overrides).config
    warnings = prepare._kernels(config, code.collect(tmp_path))
    assert [text.startswith("kernels: none are built here to go along") for text in warnings] == [True] * is_warned
    put(tmp_path, "a" * 32, [90])
    assert prepare._kernels(config, code.collect(tmp_path)) == []


LOAD = """
from stoker.kernels.native import library, ready
assert ready.lacks(90) is None, ready.lacks(90)
print(library.loaded())
"""


def test_unpacked_elsewhere_the_object_is_loaded_without_cache_or_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, made = tmp_path / "any.cc", tmp_path / "any.so"
    source.write_text("int any() { return 0; }")
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", made], check=True)
    put(tmp_path / "cache", "a" * 32, [90], made.read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code.pack(code.collect(tmp_path), tmp_path / "code.tar.gz")
    bootstrap.extract(tmp_path / "code.tar.gz", tmp_path)
    env = {"PYTHONPATH": str(tmp_path / "code"), "PATH": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path / "empty")}
    done = subprocess.run([sys.executable, "-c", LOAD], env=env, capture_output=True, text=True, timeout=120)
    library = tmp_path / "code/stoker/kernels/built" / ("a" * 32) / "libstoker.so"
    assert done.stdout.strip() == str(library), done.stderr


def test_in_a_container_it_runs_from_a_copy_of_the_sources_with_the_containers_python(tmp_path: Path) -> None:
    """`env` stands for the runtime: it takes words and starts a program."""
    shown = tmp_path / "shown"
    inner = tmp_path / "python"
    inner.write_text(
        f'#!/bin/sh\necho "$IN_CONTAINER" "$PYTHONPATH" "$@" > {shown}\nls "$PYTHONPATH/stoker" >> {shown}\n'
        f'exec {sys.executable} "$@"\n'
    )
    inner.chmod(0o755)
    container = ["container.runtime=command", "container.command=[env,IN_CONTAINER=1]", f"container.python={inner}"]
    done = stoker(tmp_path, "list", *container)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nothing is built: ")
    first, *listing = shown.read_text().splitlines()
    inside, path, *words = first.split()
    assert (inside, words) == ("1", ["-m", "stoker.kernels", "list"])
    assert Path(path).parent == tmp_path / "stoker" / "kernels"
    assert listing == ["__init__.py", "kernels"]
    assert list((tmp_path / "stoker" / "kernels").iterdir()) == []


def test_pyxis_is_entered_by_a_step_of_its_own(tmp_path: Path) -> None:
    image = tmp_path / "torch.sqsh"
    overrides = ["container.runtime=pyxis", f"container.image={image}", "cluster.partition=gpu", "cluster.account=me"]
    plain = compose(overrides).plain
    command, env = kernels.line(plain, Path("/c"), Path("/c/copy"), ["build", "--arch=90"], {"PYTHONPATH": "/host"})
    assert command == [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        "--partition=gpu",
        "--account=me",
        f"--container-image={image}",
        "--container-mounts=/c:/c",
        "--container-workdir=/c",
        "--no-container-remap-root",
        "python3",
        "-m",
        "stoker.kernels",
        "build",
        "--arch=90",
    ]
    assert env["PYTHONPATH"] == "/c/copy"
    assert env["STOKER_KERNELS_CACHE"] == "/c"


def test_configured_architectures_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(kernels, "_become", lambda command: became.append(command) or sys.exit(0))
    for given in (["build"], ["build", "--arch", "80"]):
        with pytest.raises(SystemExit):
            kernels.main([*given, "kernels.architectures=[90,100]"])
    assert [command[2:] for command in became] == [
        ["stoker.kernels", "build", "--arch=90,100"],
        ["stoker.kernels", "build", "--arch", "80"],
    ]


def test_a_mistake_in_the_configuration_is_told_by_its_field(tmp_path: Path) -> None:
    done = stoker(tmp_path, "build", "kernels.architectures=[75]")
    assert done.returncode == 2
    assert done.stderr == (
        "stoker kernels: error: kernels.architectures=[75]: expected compute capabilities from 8.0 on, times ten, as "
        "[80,90,100]\n"
    )


def test_bench_kernels_times_an_op_and_names_what_it_does_not_know(tmp_path: Path) -> None:
    def bench(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stoker.launcher.cli", "bench", *words]
        environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)

    done = bench("kernels", "gelu", "--rounds", "1", "--no-compile")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split()[:5] == ["gelu", "24", "x", "96", "reference"]
    assert "gelo: no such op, did you mean gelu? known: rmsnorm, " in bench("kernels", "gelo").stderr
    assert "there is: stoker bench kernels" in bench("disks").stderr
    assert bench().returncode == 2
