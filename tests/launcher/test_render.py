"""The batch script: a golden file, quoting, and what bash makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from stoker.conf.schema import ClusterConfig, ClusterKind, Config, Continuation, GpuRequest, ResilienceConfig
from stoker.launcher.render import option_line, render, script_of

Golden = Callable[[str, str], None]
AWKWARD = 'it\'s "q" $HOME `id` (1) \u00e9 50%j # ; & *'


def script(config: Config, run_dir: Path = Path("/shared/runs/llama-1"), python: str = "/opt/venv/bin/python") -> str:
    return render(script_of(config, run_dir, "261130-104733-x7q2", "0.1.0", python))


def test_everything_golden(golden: Golden) -> None:
    config = Config(
        name="llama",
        resilience=ResilienceConfig(warning=300),
        cluster=ClusterConfig(
            nodes=4,
            procs_per_node=8,
            gpus_per_node=8,
            cpus_per_task=96,
            mem="0",
            time="1-00:00:00",
            partition="h100",
            account="physics",
            qos="long",
            constraint="[rack1|rack2]",
            nodelist="n[1-9]",
            exclude="n7",
            reservation="r",
            exclusive=True,
            comment="a b",
            mail_type="FAIL",
            sbatch={"hold": "", "reboot": "false", "hint": None, "deadline": "now+3 days"},
            setup=["module load cuda/12.8", "source /opt/site.sh"],
            env={"NCCL_IB_HCA": "mlx5", "NOTE": "it's $5"},
            omp_threads=8,
        ),
    )
    golden("everything.sbatch", script(config))


def test_least_golden(golden: Golden) -> None:
    config = Config(cluster=ClusterConfig(), resilience=ResilienceConfig(continuation=Continuation.none))
    golden("least.sbatch", script(config))


def test_local_golden(golden: Golden) -> None:
    config = Config(cluster=ClusterConfig(kind=ClusterKind.local))
    golden("local.sbatch", script(config))


GPUS = {
    "gpus_per_node": ["--gpus-per-node=h100:8", "--gres=nvme:1"],
    "gres": ["--gres=gpu:h100:8,nvme:1"],
    "gpus_per_task": ["--ntasks=2", "--gpus-per-task=h100:8", "--gres=nvme:1"],
}


@pytest.mark.parametrize("request_", GPUS)
def test_gpus_and_other_generic_resources(request_: str) -> None:
    cluster = ClusterConfig(nodes=2, gpus_per_node=8, gpu_type="h100", gpu_request=GpuRequest(request_), gres="nvme:1")
    lines = script(Config(cluster=cluster)).splitlines()
    start = lines.index("#SBATCH --ntasks-per-node=1") + 1
    assert lines[start : lines.index("#SBATCH --nodes=2")] == [f"#SBATCH {option}" for option in GPUS[request_]]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (None, None),
        (False, None),
        (True, "--x"),
        (0, "--x=0"),
        ("n[1-4],n7", "--x=n[1-4],n7"),
        ("a b", '--x="a b"'),
        ('say "hi" \\ #', '--x="say \\"hi\\" \\\\ #"'),
        ("", '--x=""'),
    ],
)
def test_option_lines(value: str | int | bool | None, line: str | None) -> None:
    assert option_line("x", value) == line


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "\x00", "a\x1bb"])
def test_control_characters_never_get_into_a_line(value: str) -> None:
    with pytest.raises(ValueError, match="control character"):
        option_line("x", value)


def test_percent_signs_are_escaped_for_slurm() -> None:
    assert '#SBATCH --output="/a 50%%j/slurm/%j.log"\n' in script(Config(), Path("/a 50%j"))


def test_backslash_in_the_path_is_refused() -> None:
    with pytest.raises(ValueError, match="backslash; move run_root"):
        script(Config(), Path("/a\\b"))


# The stub stands where the interpreter is called and records how.
STUB = """#!/usr/bin/env python3
import json, os, signal, sys, time
if sys.argv[1] == "-c":
    sys.exit()  # whether it works at all
ignored = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
seen = {"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "ignored": ignored}
with open(os.environ["SEEN"], "w") as f:
    json.dump(seen, f)
sys.exit(int(os.environ.get("CODE", "0")))
"""


def stub(folder: Path) -> str:
    path = folder / "my python"
    path.write_text(STUB)
    path.chmod(0o755)
    return str(path)


def run_script(tmp_path: Path, config: Config, *arguments: str, code: int = 0) -> tuple[int, dict[str, object]]:
    run_dir = tmp_path / AWKWARD
    run_dir.mkdir()
    file = tmp_path / "submit.sbatch"
    file.write_text(script(config, run_dir, stub(tmp_path)))
    env = os.environ | {"SEEN": str(tmp_path / "seen"), "CODE": str(code)}
    done = subprocess.run(["bash", str(file), *arguments], env=env, cwd="/", check=False)
    seen = tmp_path / "seen"
    return done.returncode, json.loads(seen.read_text()) if seen.exists() else {}


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 20
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_bash_passes_everything_on_unharmed(tmp_path: Path) -> None:
    config = Config(cluster=ClusterConfig(env={"A": AWKWARD, "lower": "x y"}, setup=["export FROM_SETUP='1 2'"]))
    code, seen = run_script(tmp_path, config, "--local", "a b", code=75)
    assert code == 75
    directory = str(tmp_path / AWKWARD)
    assert seen["argv"] == ["-u", "./bootstrap.py", "stoker.launcher.supervise", directory, "--local", "a b"]
    assert seen["cwd"] == directory
    env = seen["env"]
    assert isinstance(env, dict)
    assert (env["A"], env["lower"], env["FROM_SETUP"], env["OMP_NUM_THREADS"]) == (AWKWARD, "x y", "1 2", "1")


def test_warning_signal_is_ignored_when_python_starts(tmp_path: Path) -> None:
    _, seen = run_script(tmp_path, Config())
    assert seen["ignored"] is True
    assert "STOKER_WARNED" not in seen["env"]  # type: ignore[operator]


def test_warning_during_set_up_is_kept_for_the_supervisor(tmp_path: Path) -> None:
    ready, go_on = tmp_path / "ready", tmp_path / "go-on"
    set_up = f"touch '{ready}'; while ! [ -e '{go_on}' ]; do sleep 0.02; done"
    config = Config(cluster=ClusterConfig(setup=[set_up]))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    file = tmp_path / "submit.sbatch"
    file.write_text(script(config, run_dir, stub(tmp_path)))
    process = subprocess.Popen(["bash", str(file)], env=os.environ | {"SEEN": str(tmp_path / "seen")})
    wait_for(ready)
    process.send_signal(signal.SIGUSR1)
    go_on.touch()
    assert process.wait(timeout=20) == 0
    assert json.loads((tmp_path / "seen").read_text())["env"]["STOKER_WARNED"] == "1"


def test_a_warning_before_the_supervisor_can_hear_it_waits_for_it(tmp_path: Path) -> None:
    """Python starts, from a shared file system for seconds, with USR1 ignored."""
    python, run_dir, file = tmp_path / "python", tmp_path / "run", tmp_path / "submit.sbatch"
    python.write_text(
        "#!/usr/bin/env python3\nimport os, signal, sys, time\n"
        "if sys.argv[1] == '-c': sys.exit()\n"
        "open('deaf', 'w').close(); time.sleep(1)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        "time.sleep(20)\n"
    )
    python.chmod(0o755)
    run_dir.mkdir()
    file.write_text(script(Config(), run_dir, str(python)))
    process = subprocess.Popen(["bash", str(file)])
    wait_for(run_dir / "deaf")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=20) == 75


def test_failing_set_up_ends_the_job_and_says_where(tmp_path: Path) -> None:
    config = Config(cluster=ClusterConfig(setup=["true", "cat /nonexistent/module", "touch after"]))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    file = tmp_path / "submit.sbatch"
    file.write_text(script(config, run_dir, stub(tmp_path)))
    done = subprocess.run(["bash", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cluster.setup failed with exit code 1 at: cat /nonexistent/module" in done.stderr
    assert not (run_dir / "after").exists()
