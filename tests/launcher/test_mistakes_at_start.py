"""What `stoker run` shows of a mistake that only the workers can see: one sentence per node, and no traceback."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.outcome import Outcome


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    # Loaded by path: tests are not a package.
    path = Path(__file__).parents[1] / "train" / "harness.py"
    spec = importlib.util.spec_from_file_location("harness_for_mistakes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path: Path, harness: ModuleType) -> Callable[..., tuple[int, str, Outcome]]:
    """`stoker run` with these settings: exit code, what it printed, the outcome of its only attempt."""
    harness.make_data(tmp_path / "text")

    def go(*overrides: str) -> tuple[int, str, Outcome]:
        command = [sys.executable, "-m", "stoker.launcher.cli", "run", "cluster=local", f"run_root={tmp_path}/runs"]
        command += ["model=tiny", "model.vocab_size=64", "data=custom", f"data.sources.0.prefix={tmp_path}/text"]
        command += ["data.seq_len=32", "train.steps=2", "train.global_batch=8", "train.micro_batch=2"]
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": path}
        done = subprocess.run(
            [*command, *overrides], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
        )
        (directory,) = (tmp_path / "runs").glob("*-*")
        outcome = Outcome.read(RunDir(directory).attempt(1))
        assert outcome is not None, done.stdout.decode()
        return done.returncode, done.stdout.decode(), outcome

    return go


def errors(text: str) -> list[tuple[str, str]]:
    """(node, sentence) of the lines by which the nodes' logs tell one."""
    found = [re.match(r"\[1 (\S+)\] \[\d\] stoker: error: (.*)", line) for line in text.splitlines()]
    return sorted((m[1], m[2]) for m in found if m)


def test_kernels_that_cannot_be_had_are_told_once_on_every_node(run: Callable[..., tuple[int, str, Outcome]]) -> None:
    code, text, outcome = run("cluster.nodes=2", "cluster.procs_per_node=2", "kernels=native", "kernels.rope=reference")
    assert (code, outcome.cause.value, outcome.exit_code) == (2, "bad_config", 2)
    assert outcome.reason.startswith("kernels=native: rmsnorm, layernorm, swiglu, ")
    assert outcome.reason.endswith(": runs on cuda, this run is on cpu; choose reference, or set kernels.strict=false")
    assert outcome.traceback is None
    assert {sentence for _, sentence in errors(text)} == {outcome.reason}
    nodes = [node for node, _ in errors(text)]
    assert len(nodes) == len(set(nodes)) >= 1  # the other node's workers may have been killed before they said it
    assert "Traceback" not in text


def test_data_that_is_gone_by_the_start_is_told_in_a_sentence(
    run: Callable[..., tuple[int, str, Outcome]], tmp_path: Path
) -> None:
    # Imported by the worker, after the launcher has looked.
    remove = f"import pathlib\npathlib.Path({str(tmp_path / 'text.idx')!r}).unlink(missing_ok=True)\n"
    (tmp_path / "gone_by_now.py").write_text(remove)
    code, text, outcome = run("plugins=[gone_by_now]")
    reason = f"{tmp_path}/text.idx: no such file (data prefix '{tmp_path}/text' needs both .bin and .idx)"
    assert (code, outcome.cause.value, outcome.reason) == (2, "bad_config", reason)
    assert errors(text) == [("local0", reason)]
    assert "Traceback" not in text


def test_a_defect_keeps_its_traceback(run: Callable[..., tuple[int, str, Outcome]], tmp_path: Path) -> None:
    (tmp_path / "defective.py").write_text("import nothing_of_that_name\n")
    code, text, outcome = run("plugins=[defective]", "resilience.max_restarts=0")
    assert (code, outcome.cause.value) == (1, "crash")
    assert errors(text) == []
    assert text.count("[0] Traceback") == 1
    assert outcome.traceback is not None
    assert "defective.py" in outcome.traceback
