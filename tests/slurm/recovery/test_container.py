"""Agents in a root of their own, with another Python and nothing of Slurm; supervisor and Slurm on the host.

bubblewrap stands for the runtime: like apptainer it is a process around the agent, and unlike pyxis it is at hand.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.launcher.run.outcome import Cause

pytestmark = pytest.mark.slurm

PROBE = """
import platform, shutil, sys
tools = [name for name in ("srun", "scontrol", "squeue", "sbatch") if shutil.which(name)]
print(f"inside {sys.executable} {platform.python_version()} tools={tools}", flush=True)
"""


def other_python() -> tuple[str, str, str]:
    """(interpreter, its library, its version): Debian's, if it takes the same compiled packages; else ours, moved."""
    tag = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    binary, library = Path(f"/usr/bin/{tag}"), Path(f"/usr/lib/{tag}")
    if (library / "os.py").is_file() and Path(sys.base_prefix) != Path("/usr"):
        ask = [str(binary), "-c", "import platform; print(platform.python_version())"]
        return str(binary), str(library), subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    return str(Path(sys.executable).resolve()), sysconfig.get_path("stdlib"), platform.python_version()


def root() -> tuple[list[str], str]:
    """Words that enter the root (/usr/bin is not in it), and the version of the Python there."""
    python, library, version = other_python()
    binds = {
        "/usr/lib": "/usr/lib",
        "/usr/lib64": "/usr/lib64",
        "/etc": "/etc",
        "/sys": "/sys",
        python: "/opt/other/bin/python3",
        library: f"/opt/other/lib/{Path(library).name}",
        sysconfig.get_path("purelib"): "/opt/other/packages",
    }
    words = ["bwrap", "--dev-bind", "/dev", "/dev", "--proc", "/proc"]
    words += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"]
    words += [word for source, target in binds.items() for word in ("--ro-bind", source, target)]
    words += ["--setenv", "PYTHONPATH", "/opt/other/packages", "--bind", "{source}", "{target}"]
    return words, version


def test_an_agent_in_a_container_outlives_preemption_and_a_power_cut(
    lab: Any, same: Callable[..., None], tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / "my_probe.py").write_text(PROBE)
    words, version = root()
    command = ",".join(f"'{word}'" for word in words)
    container = ["container.runtime=command", f"container.command=[{command}]"]
    container += ["container.python=/opt/other/bin/python3", "plugins=[my_probe]"]
    run = lab.launch("inside", *container, cwd=project, failpoints="step:pause-150")
    run.wait_step(12)
    lab.cluster.preempt(run.job_id)
    # By then the second attempt works, on nodes of its own, and has steps left.
    run.wait_step(run.wait_outcome(1).step + 3)
    victim = run.nodes()[1]
    lab.cluster.crash(victim)
    assert run.wait_end().cause is Cause.FINISHED, run.story()
    first, second, _ = run.outcomes()
    assert first.cause is Cause.PREEMPTED
    assert first.saved_step == first.step, "the signal reached the agents: all was saved"
    assert second.cause is Cause.NODE_FAILURE
    assert victim not in run.nodes()
    same(run)
    logs = "".join(log.read_text() for log in run.dir.path.glob("attempts/*/logs/*.log"))
    assert f"inside /opt/other/bin/python3 {version} tools=[]" in logs
    assert logs.count("inside ") == logs.count(f"inside /opt/other/bin/python3 {version} tools=[]")
    lab.cluster.restart_node(victim)
