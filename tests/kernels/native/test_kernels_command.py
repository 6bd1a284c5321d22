"""`python -m stoker.kernels`: what is built and what this machine has, and arguments that are refused."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from stoker.kernels.__main__ import _told, main
from stoker.kernels.device import Device
from stoker.kernels.measured import Measured
from stoker.kernels.native import cache as caches
from stoker.kernels.native import ready
from stoker.kernels.ops import OP_NAMES
from stoker.kernels.overview import overview


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


def test_where_nothing_is_built_the_list_says_what_to_do(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("nothing is built: no kernels in ")
    assert line.endswith(f"{cache}, {cache}/user/stoker/kernels; `stoker kernels build` makes them")


@pytest.mark.parametrize("damage", [b"\x7fELG", b"\x7fEL"], ids=["a bit", "cut"])
def test_a_damaged_object_is_told_and_not_taken(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    with caches.workshop(cache) as work:
        (work / caches.LIBRARY).write_bytes(b"\x7fELF")
        intact = caches.sha256_of(work / caches.LIBRARY)
        ours = (caches.digest_of(), caches.unit_names())
        path = caches.publish(work, caches.Built("a" * 32, *ours, (90,), 90, False, "nvcc", "2.11", 4, 2e9, intact))
    path.write_bytes(damage)
    assert main(["list"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line == (f"damaged           nothing takes it; `stoker kernels build` replaces it {path.parent}")
    monkeypatch.setattr("stoker.kernels.native.library.loaded", lambda: None)
    assert ready.lacks(90) is not None
    assert caches.to_freeze() == {}


def test_what_each_op_would_run_with_is_shown_in_one_table(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["show"]) == 0
    first, empty, *rows = capsys.readouterr().out.splitlines()
    assert first == f"on cpu, torch {torch.__version__}; native kernels: not built"
    assert empty == ""
    assert rows[:2] == [
        "op                    auto takes     also here  not here",
        "rmsnorm               reference                 native [1], apex [1]",
    ]
    assert "attention             reference [2]  sdpa       flash [1], varlen [1]" in rows
    assert rows[-3:] == ["", "[1] runs on cuda, this run is on cpu", "[2] no gain from sdpa on cpu"]
    assert len(rows) == 1 + len(OP_NAMES) + 3


def test_on_a_gpu_without_our_kernels_the_table_says_what_would_end_a_run(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, device: cls("cuda", 90, "NVIDIA H100")))
    monkeypatch.setattr("stoker.kernels.native.library.loaded", lambda: None)
    assert main(["show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "swiglu                nothing     reference        native [1]" in lines
    assert any(line.startswith("[1] not built: nothing in ") for line in lines)
    assert lines[-1] == "nothing: kernels=auto ends a run's start; with kernels.strict=false the next best takes over"


def test_a_choice_by_measurement_is_told_with_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.kernels.native.ready.lacks", lambda capability: None)
    h100 = Device("cuda", 90, "NVIDIA H100")
    times = Measured(h100.name, torch.__version__, "", {"rope": {"native": 9.0, "reference": 8.0}})
    rows = {row.op: row for row in overview(h100, times)}
    assert (rows["rope"].takes, rows["rope"].why) == (
        "reference",
        "auto, measured here: reference 8.0 us, native 9.0 us",
    )
    assert (rows["swiglu"].takes, rows["swiglu"].why, rows["swiglu"].available) == (
        "native",
        "",
        ("reference", "native"),
    )


def test_the_same_for_programs(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["device"] == {"type": "cpu", "capability": None, "name": ""}
    assert [row["op"] for row in shown["ops"]] == list(OP_NAMES)
    assert shown["ops"][0] == {
        "op": "rmsnorm",
        "takes": "reference",
        "why": "",
        "available": ["reference"],
        "lacking": {
            "native": "runs on cuda, this run is on cpu",
            "apex": "runs on cuda, this run is on cpu",
        },
    }


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
    advice = f"the kernels' cache is {in_the_way}; STOKER_KERNELS_CACHE=DIRECTORY names another that can be written"
    assert told == f"stoker kernels: error: {in_the_way}: File exists; {advice}"
    read_only = OSError(errno.EROFS, "Read-only file system", str(cache))
    assert _told(read_only) == f"{cache}: Read-only file system; {advice}"
    assert (
        _told(OSError(errno.ENOSPC, "No space left on device", "/report.md")) == "/report.md: No space left on device"
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["report", "--write", "/nowhere/x"], "'/nowhere/x'; /nowhere is no directory that is there"),
        (["report", "--write", "/"], "'/'; expected a file that can be written"),
        (["bench", "--json", "/nowhere/x"], "'/nowhere/x'; /nowhere is no directory that is there"),
        (["bench", "--rounds", "0"], "'0'; expected a whole number from 1 on"),
        (["bench", "--minutes", "-1"], "'-1'; expected a number of minutes above 0"),
        (["bench", "rmsnrm"], "rmsnrm: no such op, did you mean rmsnorm? known: rmsnorm, layernorm, "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_refused_before_the_work(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert problem in capsys.readouterr().err


def test_an_interrupted_measurement_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("stoker.kernels.bench.__main__.main", interrupted)
    assert main(["bench"]) == 130
