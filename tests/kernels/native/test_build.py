"""Building kernels: from the cache, at once, killed, without a compiler, with an error; on a source of a few lines."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stoker.kernels.native import cache as caches
from stoker.kernels.native import ready
from stoker.kernels.native.build import BuildError, Target, build
from stoker.kernels.native.toolchain import NoCompilerError, find_toolchain

ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
KERNEL = f"#ifndef STOKER_EMULATION\n__global__ void fill(float* p) {{ p[threadIdx.x] = 1.0f; }}\n#endif\n{ANSWER}"


def have_nvcc() -> bool:
    try:
        find_toolchain()
    except NoCompilerError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not have_nvcc(), reason="no nvcc")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "tiny.cu").write_text(KERNEL)
    (folder / "tiny.cuh").write_text("// of the hash\n")
    return folder


def for_cpu(sources: Path) -> Target:
    return Target(emulated=True, sources=sources)


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


@needs_nvcc
def test_nvcc_builds_one_object_that_loads_without_a_driver(sources: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    path = build(Target((90,), sources=sources), tmp_path / "cache", lines.append)
    assert ctypes.CDLL(str(path)).answer() == 42
    linked = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in linked
    assert lines[0].startswith("compiling 1 files of kernels for sm_90 (nvcc release ")
    assert "Compiling entry function" in path.with_name(caches.LOG).read_text()
    built = caches.read(path.parent)
    assert built is not None
    assert (built.architectures, built.ptx, built.emulated, built.abi) == ((90,), 90, False, "2.11")
    assert entries(tmp_path / "cache") == [built.name]
    # Asked for again, nothing is compiled; for another architecture it is another object.
    lines.clear()
    assert build(Target((90,), sources=sources), tmp_path / "cache", lines.append) == path
    assert lines == []


@needs_nvcc
def test_architectures_that_nvcc_does_not_know_are_refused(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^architectures 99: .*nvcc has .*90, .*; choose of these"):
        build(Target((99,), sources=sources), tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_every_change_of_the_sources_makes_another_object(sources: Path, tmp_path: Path) -> None:
    first = build(for_cpu(sources), tmp_path / "cache")
    (sources / "tiny.cuh").write_text("// changed\n")
    assert build(for_cpu(sources), tmp_path / "cache") != first
    (sources / "tiny.cuh").write_text("// of the hash\n")
    assert build(for_cpu(sources), tmp_path / "cache") == first


def test_an_object_is_found_without_any_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    made = tmp_path / "cache"
    put(made, "a" * 32, sources, (80, 90))
    put(made, "b" * 32, sources, (100,))
    assert [b.name for b in caches.find(90, sources, [made])] == ["a" * 32]
    assert [b.name for b in caches.find(89, sources, [made])] == ["a" * 32]  # by machine code of 8.0
    assert [b.name for b in caches.find(75, sources, [made])] == []
    assert {b.name for b in caches.find(120, sources, [made])} == {"a" * 32, "b" * 32}  # by PTX
    (sources / "tiny.cu").write_text(KERNEL + "// changed\n")
    assert caches.find(90, sources, [made]) == []


def put(cache: Path, name: str, sources: Path, architectures: tuple[int, ...], emulated: bool = False) -> Path:
    """An object as `build` leaves it, whose content nobody reads."""
    plan = caches.Built(
        name,
        caches.digest_of(sources),
        caches.unit_names(sources),
        architectures,
        max(architectures),
        emulated,
        "nvcc release 13.0, V13.0.88",
        "2.11",
        4,
        time.time(),
    )
    with caches.workshop(cache) as work:
        (work / caches.LIBRARY).write_bytes(b"\x7fELF")
        return caches.publish(work, plan)


def test_a_damaged_object_is_built_again_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = build(for_cpu(sources), cache)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert caches.read(path.parent) is None
    assert build(for_cpu(sources), cache) == path
    flipped = bytearray(path.read_bytes())
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    lines: list[str] = []
    assert build(for_cpu(sources), cache, lines.append) == path
    assert lines[0] == f"{path.parent} is damaged, and is built anew"
    assert ctypes.CDLL(str(path)).answer() == 42
    assert entries(cache) == [path.parent.name]


BUILD = """
import sys
from pathlib import Path
from stoker.kernels.native.build import Target, build
print(build(Target(emulated=True, sources=Path(sys.argv[1])), Path(sys.argv[2])), flush=True)
"""


def builder(sources: Path, cache: Path, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(sources), str(cache)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=os.environ | environ)


def test_two_builds_at_once_both_succeed_and_leave_one_object(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    both = [builder(sources, cache) for _ in range(2)]
    paths = [process.communicate(timeout=120)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert paths[0] == paths[1] != ""
    assert entries(cache) == [Path(paths[0]).parent.name]


def slow_compiler(folder: Path) -> Path:
    """Says its version at once, and compiles for minutes."""
    script = folder / "slow-c++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo slow 1.0 && exit\necho $$ > "$SLOW_PID"\nexec sleep 300\n'
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_a_build_that_is_killed_leaves_no_object(sources: Path, tmp_path: Path, number: signal.Signals) -> None:
    cache, pid = tmp_path / "cache", tmp_path / "pid"
    process = builder(sources, cache, CXX=str(slow_compiler(tmp_path)), SLOW_PID=str(pid))
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    compiler = int(pid.read_text())
    if number is signal.SIGINT:
        assert entries(cache) == []
        with pytest.raises(ProcessLookupError):
            os.kill(compiler, 0)
    else:
        # Nobody could tidy up; what is left is no object, and goes away with a later build.
        os.kill(compiler, signal.SIGKILL)
        (left,) = entries(cache)
        assert left.startswith(".tmp-")
        assert caches.built_in(cache) == []
        os.utime(cache / left, (1, 1))
    path = build(for_cpu(sources), cache)
    assert entries(cache) == [path.parent.name]


def test_a_compilers_error_is_shown_with_its_place_and_the_whole_log_kept(sources: Path, tmp_path: Path) -> None:
    (sources / "broken.cu").write_text("int f() { return undeclared; }\n")
    with pytest.raises(BuildError) as error:
        build(for_cpu(sources), tmp_path / "cache")
    first, second = str(error.value).splitlines()
    assert first.startswith(f"broken.cu: {sources}/broken.cu:1:")
    assert "undeclared" in first
    log = Path(second.removeprefix("the whole log: "))
    assert "undeclared" in log.read_text()
    assert entries(tmp_path / "cache") == [log.name]
    (sources / "broken.cu").unlink()
    assert ctypes.CDLL(str(build(for_cpu(sources), tmp_path / "cache"))).answer() == 42


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("exit 3", "the compiler ended with exit code 3: without a word"),
        ("echo no licence >&2; exit 3", "the compiler ended with exit code 3: no licence"),
        ("kill -9 $$", "the compiler was killed by signal 9 (out of memory?): without a word"),
    ],
)
def test_a_compiler_that_just_ends_is_told_how_and_once_for_all_files(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, words: str
) -> None:
    compiler = tmp_path / "c++"
    # All at once: after the first failure no further file is begun.
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo bad 1.0 && exit\nsleep 0.3\n{end}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    (sources / "other.cu").write_text(KERNEL)
    with pytest.raises(BuildError) as error:
        build(for_cpu(sources), tmp_path / "cache")
    first, second = str(error.value).splitlines()
    assert first == f"other.cu, tiny.cu: {words}"
    assert second.startswith("the whole log: ")


def test_a_compilers_error_is_told_though_its_log_cannot_be_kept(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: object, **__: object) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (sources / "tiny.cu").write_text("int f() { return undeclared; }\n")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BuildError) as error:
        build(for_cpu(sources), tmp_path / "cache")
    first, second = str(error.value).splitlines()
    assert "'undeclared' was not declared" in first
    assert second.startswith(f"the whole log cannot be kept: {tmp_path}/cache/failed-")
    assert second.endswith(": No space left on device; STOKER_KERNELS_CACHE=DIRECTORY names another place")
    assert entries(tmp_path / "cache") == []


@needs_nvcc
def test_nvccs_error_is_shown_with_its_place(sources: Path, tmp_path: Path) -> None:
    (sources / "tiny.cu").write_text("__global__ void f() {\n    undeclared();\n}\n")
    with pytest.raises(BuildError, match=r'^tiny\.cu: .*tiny\.cu\(2\): identifier "undeclared" is undefined\n'):
        build(Target((90,), sources=sources), tmp_path / "cache")


def test_without_nvcc_it_is_said_where_it_was_looked_for_and_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.kernels.native.toolchain._nvccs", lambda environ: iter(()))
    with pytest.raises(NoCompilerError) as error:
        find_toolchain()
    text = str(error.value)
    assert text.startswith("no nvcc in $CUDA_HOME/bin, on the PATH, in /usr/local/cuda/bin, or among ")
    for way in ("`stoker kernels build`", "pip install 'stoker[cuda]'", "kernels=reference"):
        assert way in text


def test_without_a_host_compiler_it_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(NoCompilerError, match=r"^no C\+\+ compiler \(\$CXX, "):
        find_toolchain(environ={"PATH": str(tmp_path)})


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_variable_that_names_no_toolkit_is_refused_and_not_passed_over(tmp_path: Path, variable: str) -> None:
    def refusal(value: Path) -> str:
        with pytest.raises(ValueError, match=rf"^{variable}={value}: ") as error:
            find_toolchain(environ={variable: str(value), "PATH": os.environ["PATH"]})
        return str(error.value)

    assert refusal(Path("/nowhere")) == (
        f"{variable}=/nowhere: there is no such directory; expected the directory of a CUDA toolkit; correct "
        f"{variable}, or unset it, and nvcc is looked for on the PATH, in /usr/local/cuda and among this Python's "
        "packages"
    )
    assert f": there is no {tmp_path}/bin/nvcc; expected" in refusal(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(0o644)
    assert f": {tmp_path}/bin/nvcc is not executable; expected" in refusal(tmp_path)


@pytest.mark.parametrize("variable", ["NVCC_CCBIN", "CXX"])
@pytest.mark.parametrize("value", ["/nowhere", "ccache g++"])
def test_a_variable_that_names_no_host_compiler_is_refused_and_not_passed_over(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"^{variable}={re.escape(value)}: no program of that name; ") as error:
        find_toolchain(environ={variable: value, "PATH": os.environ["PATH"]})
    assert str(error.value).endswith(
        "; expected the C++ compiler, by its path or by its name on the PATH and without arguments; correct "
        f"{variable}, or unset it"
    )


def test_the_host_compiler_may_be_named_by_its_directory_as_nvcc_takes_it(tmp_path: Path) -> None:
    gxx = shutil.which("g++")
    assert gxx is not None
    (tmp_path / "g++").symlink_to(gxx)
    found = find_toolchain(True, environ={"NVCC_CCBIN": str(tmp_path), "PATH": os.environ["PATH"]})
    assert found.host == tmp_path / "g++"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (
            "echo libstdc++.so.6: cannot open >&2; exit 127",
            "exit code 127: libstdc++.so.6: cannot open; it does not run",
        ),
        ("exit 3", "exit code 3: no words; it does not run"),
        ("echo something else", "is no nvcc: its --version names no release"),
    ],
)
def test_an_nvcc_that_does_not_run_is_named_with_its_words(tmp_path: Path, script: str, problem: str) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    with pytest.raises(ValueError, match=rf"^{nvcc}.*: {re.escape(problem)}") as error:
        find_toolchain(environ={"CUDA_HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    assert not isinstance(error.value, NoCompilerError)  # which the choice of kernels would tell as "not built"


def test_a_cuda_home_comes_first(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.9, V12.9.1\n")
    nvcc.chmod(0o755)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    found = find_toolchain(environ={"CUDA_HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    assert (found.nvcc, found.include) == (nvcc, tmp_path / "include")
    assert found.version.startswith("nvcc release 12.9, V12.9.1; ")
    assert found.compresses()


def test_pypis_nvcc_is_found_among_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "nvidia" / "cu13"
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (wheel / name).parent.mkdir(parents=True)
        (wheel / name).write_text("#!/bin/sh\necho Cuda compilation tools, release 13.5, V13.5.3\n")
        (wheel / name).chmod(0o755)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    own = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith("/usr/local") and own(path, mode))
    found = find_toolchain(environ={"PATH": "/usr/bin:/bin"})
    assert (found.nvcc, found.include) == (wheel / "bin" / "nvcc", wheel / "include")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(caches.CACHE, str(tmp_path / "node"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "node"


def test_what_is_not_built_is_said_with_what_helps(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.kernels.native.library.loaded", lambda: None)
    text = ready.lacks(90) or ""
    assert text.startswith("not built: nothing in ")
    assert str(empty_cache) in text
    assert "kernels=reference" in text
    put(empty_cache, "a" * 32, caches.CSRC, (100,))
    assert (ready.lacks(90) or "").startswith("not built for sm_90: only for sm_100 in ")
    assert "cannot be loaded" in (ready.lacks(100) or "")


def test_a_driver_that_is_older_than_the_compiler_is_named(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.kernels.native.library.loaded", lambda: None)
    put(empty_cache, "a" * 32, caches.CSRC, (90,))
    monkeypatch.setattr(ready, "driver_version", lambda: 12)
    assert "is of nvcc 13, this driver is of CUDA 12: build with a toolkit of 12.x; what" in (ready.lacks(90) or "")
    monkeypatch.setattr(ready, "driver_version", lambda: 13)
    assert "cannot be loaded" in (ready.lacks(90) or "")


def test_at_first_use_a_device_gets_its_own_architecture_or_the_newest_before_it(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(ready, "build", lambda target, say: asked.append(target.architectures))
    monkeypatch.setattr(ready, "find_toolchain", lambda: type("T", (), {"known": lambda self: (80, 90, 100)})())
    assert ready.build_if_missing(90) is None
    assert ready.build_if_missing(103) is None
    assert ready.build_if_missing(90, [80, 90]) is None
    assert asked == [(90,), (100,), (80, 90)]
    put(empty_cache, "a" * 32, caches.CSRC, (90,))
    assert ready.build_if_missing(90) is None
    assert len(asked) == 3


def test_a_build_that_fails_at_first_use_is_a_reason_and_a_missing_compiler_is_left_to_the_choice(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(target: Target, say: object) -> Path:
        raise BuildError("x.cu: x.cu:1: bad")

    def absent() -> object:
        raise NoCompilerError("no nvcc")

    monkeypatch.setattr(ready, "build", broken)
    monkeypatch.setattr(ready, "find_toolchain", lambda: type("T", (), {"known": lambda self: (90,)})())
    assert ready.build_if_missing(90) == "the kernels could not be built: x.cu: x.cu:1: bad"
    monkeypatch.setattr(ready, "find_toolchain", absent)
    assert ready.build_if_missing(90) is None


def test_the_driver_says_of_which_cuda_it_is(tmp_path: Path) -> None:
    # A library in the driver's place: the real one comes with a GPU only.
    source = tmp_path / "driver.c"
    source.write_text("int cuDriverGetVersion(int* version) { *version = 12080; return 0; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    ask = "from stoker.kernels.native.ready import driver_version; print(driver_version())"
    environ = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ask], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "12\n"
