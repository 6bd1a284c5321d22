"""`python -m stoker.kernels`: what is built and what this machine has, and arguments that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.kernels.__main__ import main
from stoker.kernels.native import cache as caches


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(caches.CACHE, str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path


def test_what_is_built_is_listed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, digest in (("a" * 32, caches.digest_of()), ("b" * 32, "of another version")):
        sources = (digest, caches.unit_names())
        with caches.workshop(cache) as work:
            (work / caches.LIBRARY).write_bytes(b"\x7fELF")
            caches.publish(work, caches.Built(name, *sources, (90, 100), 100, False, "nvcc", "2.11", 4, 2e9))
    assert main(["list"]) == 0
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert first.endswith(f"sm_90, sm_100 + PTX        0.0  yes               {cache / ('a' * 32)}")
    assert second.endswith(f"no                {cache / ('b' * 32)}")


def test_what_this_machine_has_is_shown_op_by_op(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "rmsnorm               reference  yes" in lines
    assert "rmsnorm               native     runs on cuda, this run is on cpu" in lines


@pytest.mark.parametrize("given", ["9.0", "70", "90,x", ""])
def test_a_bad_architecture_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["build", "--arch", given])
    assert f"{given!r}; expected compute capabilities from 8.0 on, times ten, as 80,90" in capsys.readouterr().err


def test_without_a_compiler_a_build_fails_in_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stoker.kernels.native.toolchain._nvccs", lambda environ: iter(()))
    assert main(["build"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stoker kernels: error: no nvcc in $CUDA_HOME/bin, ")


def test_a_cache_that_cannot_be_written_is_named_with_its_field(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = cache / "file"
    in_the_way.touch()
    monkeypatch.setenv(caches.CACHE, str(in_the_way))
    assert main(["build", "--arch", "90"]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == (
        f"stoker kernels: error: {in_the_way}: File exists; the kernels' cache is {in_the_way}; "
        "STOKER_KERNELS_CACHE=DIRECTORY names another that can be written"
    )
