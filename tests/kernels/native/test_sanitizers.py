"""What the sanitizers see of kernels on the CPU: each broken access is reported with the line of the kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from emulated_build import built
from sanitized import FOUND, SANITIZERS, UNITS, WANTED, python
from stoker.kernels.native.build import Target
from stoker.kernels.native.cache import CSRC

HERE = Path(__file__).parent

# Each case in a process of its own, forked from one that has loaded the object.
_RUN_CASES = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1])
for word in sys.argv[2:]:
    name, n = word.split(":")
    child = os.fork()
    if child == 0:
        out = (ctypes.c_int * 64)()
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64]
        sys.stderr.write(f"== {word} ==\\n{function(out, int(n)).decode()}\\n")
        sys.stderr.flush()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.stderr.write(f"-- {word} ended with {status}\\n")
    sys.stderr.flush()
"""

# Files of kernels and the tests of their ops, in parts of about the same time: nearly all of it goes into compiling.
PARTS = {
    "norms": ("rmsnorm layernorm", "norms rmsnorm layernorm"),
    "losses": ("cross_entropy linear_cross_entropy", "cross_entropy linear_cross_entropy"),
    "experts": ("router permute fp8", "moe_topk moe_permute quantize_fp8"),
    "optimizer": ("adamw multi_copy rounding", "adamw multi_copy rounding"),
    "pointwise": ("glu rope l2norm", "glu rope l2norm"),
}
SAME_KERNELS_AGAIN = {"cases", "dispatch"}
# The argument with which a case is sound, the one with which it is not, the finding, and where it is.
CASES = {
    "write_past_the_end": (63, 64, "heap-buffer-overflow", "bounds.cu:6"),
    "read_past_static_shared": (
        63,
        64,
        "insufficient space|global-buffer-overflow",
        "bounds.cu:13",
    ),  # the first to see it
    "read_past_dynamic_shared": (63, 64, "heap-buffer-overflow", "bounds.cu:13"),
    "write_past_dynamic_shared": (0, 1, "heap-buffer-overflow", "bounds.cu:34"),
    "misaligned_vector": (0, 1, "misaligned address", "bounds.cu:41"),
}


@pytest.fixture(scope="module")
def runs() -> dict[str, str]:
    """What each case with its argument ("name:n") said."""
    library = built(Target(emulated=True, sanitizers=SANITIZERS, sources=HERE / "broken", only=("bounds.cu",)))
    words = [f"{name}:{n}" for name, (good, bad, _, _) in CASES.items() for n in (good, bad)]
    # Python's own allocator would put small arrays side by side, where nothing guards them.
    done: subprocess.CompletedProcess[str] = python("-c", _RUN_CASES, str(library), *words, PYTHONMALLOC="malloc")
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.findall(r"(?:== \S+ ==\n)?(.*?)-- (\S+) ended with (\d+)\n", done.stderr, re.DOTALL)
    return {word: f"{status}\n{text}" for text, word, status in said}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_access_is_reported_with_its_line(runs: dict[str, str], case: str) -> None:
    good, bad, finding, line = CASES[case]
    assert runs[f"{case}:{good}"] == "0\n\n"
    report = runs[f"{case}:{bad}"]
    assert report.startswith(f"{FOUND}\n")
    assert re.search(finding, report)
    assert line in report


def test_every_kernel_and_test_is_in_one_part() -> None:
    sources, tests = (sorted(" ".join(words).split()) for words in zip(*PARTS.values(), strict=True))
    assert sources == sorted(path.stem for path in CSRC.glob("*.cu"))
    named = {path.stem.removeprefix("test_native_") for path in HERE.glob("test_native_*.py")}
    assert tests == sorted(named - SAME_KERNELS_AGAIN)


@pytest.mark.parametrize("part", PARTS)
def test_the_ops_pass_their_tests_under_the_sanitizers(part: str) -> None:
    sources, tests = (words.split() for words in PARTS[part])
    arguments = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not full"]
    # What goes through torch's compiler repeats the same kernels under minutes of instrumented Python; a tensor of 4 GB
    # has half a GB of the sanitizer's shadow, which is written.
    arguments += ["-k", "not compile and not opcheck and not gradcheck and not past"]
    files = [str(HERE / f"test_native_{test}.py") for test in tests]
    units = tuple(f"{source}.cu" for source in sources)
    built(Target(emulated=True, sanitizers=SANITIZERS, only=units))  # in here the compiler itself would be sanitized
    environ = {WANTED: ",".join(SANITIZERS), UNITS: ",".join(units), "TMPDIR": tempfile.gettempdir()}
    done = python(*arguments, *files, timeout=600, **environ)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert re.search(r"\d+ passed", done.stdout)
