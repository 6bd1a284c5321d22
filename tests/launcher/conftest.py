"""Run directories, token files and stand-ins for Slurm's commands, for the tests of the launching side."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from stoker.launcher.run.layout import RunDir

GOLDEN = Path(__file__).with_name("golden")

# The least that a configuration needs to pass its checks, besides data.
PLAIN = {"train": {"steps": 10}, "cluster": {"kind": "slurm", "sbatch": {}, "nodes": 1}}


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """Prefix of a token file that the checks take for real: an index of one document, 4,096 tokens of two bytes."""
    prefix = tmp_path / "corpus"
    index = struct.pack("<9sQBQQiqqq", b"MMIDIDX\0\0", 1, 8, 1, 2, 4096, 0, 0, 1)
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(bytes(2 * 4096))
    return str(prefix)


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """`golden("least.sbatch", text)`: byte for byte what that file below golden/ holds.

    After a wanted change: `STOKER_WRITE_GOLDEN=1 .venv/bin/python -m pytest tests/launcher -k golden`; read the diff.
    """

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("STOKER_WRITE_GOLDEN") == "1":
            path.write_bytes(text.encode())
        assert text.encode() == path.read_bytes()

    return compare


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunDir]:
    """A frozen run without code: `make_run("name", script="#!/bin/bash...")`."""

    def make(name: str = "run", script: str = "#!/bin/bash\nexit 0\n", kind: str = "slurm") -> RunDir:
        run = RunDir(tmp_path / "runs" / name)
        for folder in (run.submissions, run.attempts, run.checkpoints, run.job_logs):
            folder.mkdir(parents=True)
        run.run.write_text(json.dumps({"id": name, "name": name}))
        plain = PLAIN | {"cluster": {**PLAIN["cluster"], "kind": kind}}
        run.config_json.write_text(json.dumps(plain))
        run.script.write_text(script)
        return run

    return make


class FakeSlurm:
    """Programs of Slurm's names, written as shell text, first (or alone) on the PATH."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def program(self, name: str, body: str) -> None:
        path = self.directory / name
        path.write_text(f'#!/bin/bash\necho {name} "$@" >> {self.directory}/calls\n{body}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def calls(self, name: str) -> list[str]:
        """Arguments of each call of a program so far."""
        calls = self.directory / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [line.partition(" ")[2] for line in lines if line.split(" ")[0] == name]


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """No Slurm at all on the PATH, until a test writes its programs."""
    fake = FakeSlurm(tmp_path / "bin")
    for tool in ("bash", "git", "cat", "sleep", "touch", "dirname", "env", "grep", "rm", "mkdir", "python3"):
        found = shutil.which(tool)
        if found:
            os.symlink(found, fake.directory / tool)
    monkeypatch.setenv("PATH", str(fake.directory))
    return fake


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """Root directory with the /sys and /proc of a machine in sysfs/NAME.txt; `changes`: path below the root -> content.

    A line `[DIRECTORY]` is followed by files of it, `path = content`, and symbolic links, `path -> target`.
    """

    def unpack(name: str, changes: dict[str, str] | None = None) -> Path:
        root = here = Path(tempfile.mkdtemp(dir=tmp_path))
        for line in (Path(__file__).parent / "sysfs" / f"{name}.txt").read_text().splitlines():
            if line.startswith("["):
                here = root / line[2:-1]
            elif line and not line.startswith("#"):
                path, sign, content = line.split(" ", 2)
                (here / path).parent.mkdir(parents=True, exist_ok=True)
                if sign == "->":
                    (here / path).symlink_to(content)
                else:
                    (here / path).write_text(content.replace("\\n", "\n").replace("\\t", "\t") + "\n")
        for path, content in (changes or {}).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content + "\n")
        return root

    return unpack
