"""Batch scripts for typical sites: golden/sites/experiment/NAME.yaml and what becomes of it, golden/sites/NAME.sbatch.

After a wanted change, with the diff to be read:
    STOKER_WRITE_GOLDEN=1 .venv/bin/python -m pytest tests/launcher/test_golden_sites.py

That Slurm takes them is shown by tests/slurm/test_sbatch.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from stoker.conf.checks import check
from stoker.conf.compose import compose
from stoker.launcher.prepare import interpreter
from stoker.launcher.render import render, script_of

SITES = Path(__file__).with_name("golden") / "sites"
NAMES = sorted(path.stem for path in (SITES / "experiment").iterdir())


def test_there_are_twelve_sites_and_no_script_of_another() -> None:
    assert len(NAMES) >= 12
    assert sorted(path.stem for path in SITES.glob("*.sbatch")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_site_s_script_is_golden(name: str, golden: Callable[[str, str], None]) -> None:
    config = compose([f"experiment={name}", "train.global_batch=384"], SITES).config
    assert [p for p in check(config, files=False) if p.severity == "error" and not p.field.startswith("data.")] == []
    root = Path(config.run_root)
    directory = (root if root.parts[1] == "shared" else Path("/shared/runs")) / f"{config.name}-1"
    config.cluster.python = config.cluster.python or (None if config.cluster.conda else "/opt/venv/bin/python")
    text = render(script_of(config, directory, "261130-104733-x7q2", "0.1.0", interpreter(config, Path("/"))))
    golden(f"sites/{name}.sbatch", text)
    done = subprocess.run(["bash", "-n", SITES / f"{name}.sbatch"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
