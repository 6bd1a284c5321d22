"""The documentation check reports what is broken, and nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def check_docs(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_docs", repository / "tools" / "check_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_docs"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def problems_of(check_docs: ModuleType, root: Path, text: str) -> list[str]:
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    (root / "docs").mkdir()
    (root / "docs" / "other.md").write_text("# Two words, `code`\n\n## Same\n\n## Same\n")
    (root / "train").mkdir()
    (root / "train" / "loop.py").touch()
    (root / "Makefile").write_text("test: x\n\techo\n")
    (root / "docs" / "page.md").write_text(text)
    return check_docs.problems(root)


GOOD = """
[a](other.md) [b](other.md#two-words-code) [c](other.md#same-1) [d](#here) [e](https://example.org/nothing)
![f](../Makefile)

# Here

`train/loop.py`, `docs/`, `train/*.py`, `make test`, `python -m stoker.train.loop`, `[x](no-link.md)`
and `run/<name>/tests/`

    make test PYTEST_ARGS=-x
"""

BROKEN = {
    "[a](missing.md)": "docs/page.md: link 'missing.md': no such file",
    "[a](other.md#three)": "docs/page.md: link 'other.md#three': no such heading",
    "[a](#there)": "docs/page.md: link '#there': no such heading",
    "[a](../../outside.md)": "docs/page.md: link '../../outside.md' leads out of the repository",
    "`train/lop.py`": "docs/page.md: path 'train/lop.py' does not exist",
    "Do\n\n    make tset\n": "docs/page.md: 'make tset' is not a target of the Makefile",
    "```\npython -m stoker.train.lop\n```\n": "docs/page.md: module 'stoker.train.lop' does not exist",
    "`optim.learning_rat=1`": "docs/page.md: configuration key 'optim.learning_rat' is not in the schema",
    "`optim.learning_rat`": "docs/page.md: configuration key 'optim.learning_rat' is not in the schema",
    "```\nstoker launch +optim.a.b=1\n```\n": "docs/page.md: configuration key 'optim.a.b' is not in the schema",
}


def test_sound_page_has_no_problems(check_docs: ModuleType, tmp_path: Path) -> None:
    assert problems_of(check_docs, tmp_path, GOOD) == []


@pytest.mark.parametrize("text", BROKEN)
def test_problem_is_reported_with_its_page(check_docs: ModuleType, tmp_path: Path, text: str) -> None:
    assert problems_of(check_docs, tmp_path, text) == [BROKEN[text]]


def test_verb_that_is_no_command_is_reported(check_docs: ModuleType, tmp_path: Path) -> None:
    tree = check_docs.Tree(tmp_path, frozenset(), frozenset({"launch"}), None)
    text = "`stoker launch x=1`\n\n    stoker lunch\n    cd x && .venv/bin/stoker lanch\n\nstoker in prose\n"
    assert list(check_docs.unknown_names(tree, text)) == [
        "'stoker lunch' is not a command",
        "'stoker lanch' is not a command",
    ]
