"""What the import rules promise: the contract catches each kind of breach, quick commands load only our own modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("conf", "launcher", "launcher/run", "train", "kernels")


def lint_imports(root: Path, tree: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Judge a made-up package of the given files by the repository's own contract."""
    package = root / "stoker"
    for name in PACKAGES:
        (package / name).mkdir(parents=True, exist_ok=True)
    for name in ("", *PACKAGES):
        (package / name / "__init__.py").touch()
    for name, text in tree.items():
        (package / name).write_text(text, encoding="utf-8")
    # PYTHONPATH comes before the editable install.
    environment = dict(os.environ, PYTHONPATH=str(root))
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def contract(repository: Path, tmp_path: Path) -> Path:
    shutil.copy(repository / "pyproject.toml", tmp_path)
    (tmp_path / "tools").mkdir()
    shutil.copy(repository / "tools" / "import_contracts.py", tmp_path / "tools")
    return tmp_path


ALLOWED = {
    "launcher/launch.py": "import hydra\nimport submitit\nfrom ..conf import schema\nfrom .run import layout\n",
    "launcher/run/layout.py": "import json\n",
    "launcher/run/files.py": "from . import layout\n",
    "launcher/supervise.py": "from . import policy\nfrom .run import layout\n",
    "launcher/policy.py": "import enum\n",
    "launcher/track.py": "import wandb\n",
    "conf/schema.py": "import omegaconf\n",
    "train/loop.py": "import torch\nfrom ..conf import schema\nfrom ..kernels import ops\nfrom ..launcher import run",
    "kernels/ops.py": "import torch\n",
}

BREACHES = {
    "kernels to conf": (
        {"kernels/ops.py": "from ..conf import schema\n"},
        "stoker.kernels.ops imports stoker.conf.schema",
    ),
    "conf to launcher": (
        {"conf/schema.py": "from ..launcher import policy\n"},
        "stoker.conf.schema imports stoker.launcher.policy",
    ),
    "launcher to train": (
        {"launcher/launch.py": "from ..train import loop\n"},
        "stoker.launcher.launch imports stoker.train.loop",
    ),
    "run to its own launcher": (
        {"launcher/run/layout.py": "from .. import policy\n"},
        "stoker.launcher.run.layout imports stoker.launcher.policy",
    ),
    "train to the launcher outside run": (
        {"train/loop.py": "from ..launcher import policy\n"},
        "stoker.train.loop imports stoker.launcher.policy",
    ),
    "torch in the launcher": ({"launcher/launch.py": "import torch\n"}, "launcher and conf never import torch BROKEN"),
    "torch in conf, inside a function": (
        {"conf/schema.py": "def f():\n    import torch\n"},
        "launcher and conf never import torch BROKEN",
    ),
    "a third party reached from the supervisor": (
        {"launcher/policy.py": "import yaml\n"},
        "stoker.launcher.supervise -> stoker.launcher.policy -> yaml",
    ),
    "a third party in the package above the supervisor": (
        {"launcher/__init__.py": "import attr\n"},
        "stoker.launcher.supervise -> stoker.launcher -> attr",
    ),
    "omegaconf reached from cancel": (
        {"launcher/cancel.py": "from .freeze import f\n", "launcher/freeze.py": "import omegaconf\nf = 1\n"},
        "stoker.launcher.cancel -> stoker.launcher.freeze -> omegaconf",
    ),
    "wandb outside track": ({"train/loop.py": "import wandb\n"}, "Only launcher.track imports wandb BROKEN"),
}


def test_allowed_imports_pass(contract: Path) -> None:
    done = lint_imports(contract, ALLOWED)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("breach", BREACHES)
def test_contract_names_a_breach(contract: Path, breach: str) -> None:
    change, message = BREACHES[breach]
    done = lint_imports(contract, ALLOWED | change)
    assert done.returncode == 1, done.stdout
    assert message in " ".join(done.stdout.split())


def test_conf_holds_no_python_subpackage(repository: Path) -> None:
    # Hydra would list it as a configuration group.
    assert list((repository / "conf").rglob("*/__init__.py")) == []


THIRD_PARTY_AFTER = """
import sys
before = set(sys.modules)
sys.argv = ["stoker", *{arguments!r}]
try:
    {statement}
except SystemExit:
    pass
ours = {{"stoker"}}
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
third = sorted(loaded - ours - sys.stdlib_module_names)
sys.stderr.write("\\n" + " ".join(third))
"""


def third_party_modules(statement: str, arguments: list[str], cwd: Path) -> list[str]:
    code = THIRD_PARTY_AFTER.format(statement=statement, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr.split("\n")[-1].split()


@pytest.mark.parametrize("module", ["stoker", "stoker.launcher", "stoker.launcher.run"])
def test_importing_a_package_loads_no_third_party_module(module: str, tmp_path: Path) -> None:
    assert third_party_modules(f"import {module}", [], tmp_path) == []


@pytest.mark.parametrize("arguments", [["--help"], ["status"], ["status", "--help"]], ids=" ".join)
def test_quick_commands_load_no_third_party_module(arguments: list[str], tmp_path: Path, repository: Path) -> None:
    if not (repository / "launcher" / "cli.py").exists():
        pytest.skip("launcher/cli.py does not exist yet")
    assert third_party_modules("from stoker.launcher.cli import main; sys.exit(main())", arguments, tmp_path) == []
