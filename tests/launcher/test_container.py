"""How agents get into containers: the whole srun line for each runtime, mounts, and what of the environment goes in.

The lines are held against public documentation, since neither pyxis nor apptainer can be had here: pyxis' wiki "Usage"
and its args.c, apptainer's manual of `apptainer exec` and "Bind Paths and Mounts".
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stoker.conf.load import to_plain
from stoker.conf.schema import ClusterConfig, Config, ContainerConfig, ContainerRuntime, DataConfig, DataSource
from stoker.launcher.container import derived_mounts, entry, environment_inside
from stoker.launcher.launch_agents import launch_agents, srun_command
from stoker.launcher.run.layout import RunDir

RUN = "/lustre/me/runs/llama-1"
SRUN = [
    "srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--wait=0",
    "--kill-on-bad-exit=0", "--mpi=none", "--input=none", "--overlap", "--cpu-bind=none", "--export=ALL",
]  # fmt: skip
AGENT = [f"{RUN}/bootstrap.py", "stoker.launcher.agent", RUN]
DEAF = ["sh", "-c", 'trap "" HUP INT TERM USR1 USR2; exec "$@"', "sh"]


def config(runtime: str = "none", stage: bool = False, gpus: int = 8, **container: Any) -> dict[str, Any]:
    return to_plain(
        Config(
            data=DataConfig(
                sources=[DataSource("/data/web/train"), DataSource("/data/web/code/train"), DataSource("/proj/b/c")],
                tokenizer="/proj/tok/tokenizer.json",
            ),
            cluster=ClusterConfig(nodes=2, cpus_per_task=16, gpus_per_node=gpus, stage_env=stage),
            container=ContainerConfig(runtime=ContainerRuntime(runtime), **container),
        )
    )


def line(plain: dict[str, Any]) -> list[str]:
    inside = entry(plain, RUN, "/venv/bin/python", local="/scratch", apptainer="apptainer")
    return srun_command(RunDir(Path(RUN)), plain, inside)


def test_line_without_a_container() -> None:
    assert line(config()) == [*SRUN, "/venv/bin/python", *AGENT]


def test_line_with_a_staged_environment() -> None:
    bootstrap, *rest = AGENT
    assert line(config(stage=True)) == [*SRUN, "/venv/bin/python", bootstrap, "--staged", *rest]


@pytest.mark.parametrize(
    ("storage", "extra"), [("/big/ckpts", ["/big/ckpts", "/nvme"]), ("s3://bucket/runs", ["/nvme"]), (None, ["/nvme"])]
)
def test_where_checkpoints_lie_is_mounted(storage: str | None, extra: list[str]) -> None:
    plain = config("pyxis")
    plain["checkpoint"] |= {"storage": storage, "local": "/nvme"}
    found = [m.source for m in derived_mounts(plain, RUN, "/scratch")]
    assert found == sorted(["/data/web", RUN, "/proj/b", "/proj/tok", "/scratch", *extra])


def test_line_for_pyxis() -> None:
    plain = config(
        "pyxis", image="/images/torch.sqsh", mounts=["/opt/site:/opt/site:ro"], options=["--container-writable"]
    )
    mounts = (
        f"/data/web:/data/web,{RUN}:{RUN},/proj/b:/proj/b,/proj/tok:/proj/tok,/scratch:/scratch,/opt/site:/opt/site:ro"
    )
    assert line(plain) == [
        *SRUN,
        "--container-image=/images/torch.sqsh",
        f"--container-mounts={mounts}",
        f"--container-workdir={RUN}",
        "--no-container-remap-root",
        "--container-writable",
        "python3",
        *AGENT,
    ]


def test_pyxis_takes_an_option_only_once() -> None:
    plain = config("pyxis", image="nvcr.io#nvidia/pytorch:26.10-py3", options=["--container-remap-root"])
    assert [w for w in line(plain) if "remap-root" in w] == ["--container-remap-root"]


def test_line_for_apptainer() -> None:
    plain = config(
        "apptainer", image="/images/torch.sif", mounts=["/opt/site:/site:ro"], python="/opt/conda/bin/python"
    )
    binds = ["/data/web", RUN, "/proj/b", "/proj/tok", "/scratch"]
    assert line(plain) == [
        *SRUN,
        *DEAF,
        *("apptainer", "exec", "--nv"),
        *(word for path in binds for word in ("--bind", f"{path}:{path}")),
        *("--bind", "/opt/site:/site:ro"),
        "/images/torch.sif",
        "/opt/conda/bin/python",
        *AGENT,
    ]


@pytest.mark.parametrize(("gpus", "options", "expected"), [(0, [], []), (8, ["--rocm"], ["--rocm"]), (8, [], ["--nv"])])
def test_apptainer_gets_the_gpus_that_were_asked_for(gpus: int, options: list[str], expected: list[str]) -> None:
    words = line(config("apptainer", gpus=gpus, image="docker://x/y", options=options))
    assert [w for w in words if w in ("--nv", "--rocm")] == expected
    assert words[-4:] == ["docker://x/y", "python3", *AGENT][-4:]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["bwrap", "--ro-bind", "{image}", "/", "--bind", "{source}", "{target}", "--dev", "/dev"],
            "bwrap --ro-bind /img / --bind /data/web /data/web --bind R R --bind /proj/b /proj/b "
            "--bind /proj/tok /proj/tok --bind /scratch /scratch --bind /opt /site --dev /dev",
        ),
        (
            ["podman-hpc", "run", "--rm", "-v", "{source}:{target}", "--env-host", "{image}"],
            "podman-hpc run --rm -v /data/web:/data/web -v R:R -v /proj/b:/proj/b -v /proj/tok:/proj/tok "
            "-v /scratch:/scratch -v /opt:/site --env-host /img",
        ),
        (
            ["run", "--rm", "--volume={source}:{target}", "{image}"],
            "run --rm --volume=/data/web:/data/web --volume=R:R --volume=/proj/b:/proj/b "
            "--volume=/proj/tok:/proj/tok --volume=/scratch:/scratch --volume=/opt:/site /img",
        ),
    ],
)  # fmt: skip
def test_line_for_a_command_repeats_the_words_of_a_mount(words: list[str], expected: str) -> None:
    plain = config("command", command=words, image="/img", mounts=["/opt:/site"])
    assert line(plain) == [*SRUN, *DEAF, *expected.replace("R", RUN).split(), "python3", *AGENT]


def test_data_behind_links_is_mounted_where_it_is_and_where_it_is_named(tmp_path: Path) -> None:
    for folder in ("real", "named"):
        (tmp_path / folder).mkdir()
    for end in (".bin", ".idx"):
        (tmp_path / "real" / f"x{end}").touch()
        (tmp_path / "named" / f"x{end}").symlink_to(tmp_path / "real" / f"x{end}")
    plain = to_plain(Config(data=DataConfig(sources=[DataSource(str(tmp_path / "named/x"))])))
    plain["container"] |= {"runtime": "command", "command": ["{source}{target}"]}
    words = entry(plain, "/run", "p", "/scratch", "").words
    assert [w for w in words if str(tmp_path) in w] == [2 * f"{tmp_path}/named", 2 * f"{tmp_path}/real"]


def test_initial_weights_in_the_hub_s_cache_are_mounted_with_what_they_link_to(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots/1f", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "5a").touch()
    (snapshot / "config.json").symlink_to(blobs / "5a")
    plain = config("command", command=["{source}{target}"])
    plain["model"]["init_from"] = f"hf:{snapshot}"
    words = entry(plain, "/run", "p", "/scratch", "").words
    assert [w for w in words if str(tmp_path) in w] == [2 * str(blobs), 2 * str(snapshot)]


def test_signals_reach_the_agent_and_not_the_runtime_around_it(tmp_path: Path) -> None:
    """Ignored by what is started in between, and handled by who installs a handler."""
    program = "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); os.kill(os.getpid(), 15)"
    plain = config("command", command=["sh", "-c", 'kill -TERM $$; "$@"; exit $?', "sh"])
    words = entry(plain, RUN, "p", "/scratch", "").words
    assert subprocess.run([*words, sys.executable, "-c", program], check=False).returncode == 7


def test_what_points_into_the_hosts_python_stays_outside() -> None:
    host = {
        "PATH": "/venv/bin:/usr/local/bin:/usr/bin:/py/bin", "HOME": "/home/me", "PYTHONPATH": "/home/me/lib",
        "PYTHONHOME": "/py", "VIRTUAL_ENV": "/venv", "LD_LIBRARY_PATH": "/cuda/lib", "LD_PRELOAD": "x.so",
        "STOKER_TOKEN": "t", "SLURMD_NODENAME": "n1", "CONDA_PREFIX": "/conda", "WANDB_API_KEY": "k",
    }  # fmt: skip
    assert environment_inside(host, [], ["/py"]) == {
        "PATH": "/usr/local/bin:/usr/bin", "HOME": "/home/me", "STOKER_TOKEN": "t", "SLURMD_NODENAME": "n1",
        "WANDB_API_KEY": "k", "PYTHONNOUSERSITE": "1",
    }  # fmt: skip
    chosen = environment_inside(host, ["LD_LIBRARY_PATH", "PATH"], ["/py"])
    assert (chosen["LD_LIBRARY_PATH"], chosen["PATH"]) == ("/cuda/lib", host["PATH"]), "cluster.env is meant"


def test_the_agents_environment_is_made_for_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def pretend(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        started.append((command, env))
        return SimpleNamespace(stderr=None)

    monkeypatch.setattr(subprocess, "Popen", pretend)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("STOKER_LOCAL_DIR", str(tmp_path))
    run = RunDir(Path(RUN))
    for runtime, container in (("none", {}), ("apptainer", {"image": "/x.sif"})):
        launch_agents(run, run.attempt(1), config(runtime, **container), "h:1", "secret", "7")
    (plain, plain_env), (inside, inside_env) = started
    assert plain_env["PYTHONPATH"] == "/mine"
    assert "STOKER_INSIDE" not in plain_env
    assert "PYTHONPATH" not in inside_env
    assert (inside_env["STOKER_INSIDE"], inside_env["STOKER_LOCAL_DIR"]) == ("apptainer", str(tmp_path))
    assert f"{tmp_path}:{tmp_path}" in inside
    assert inside_env["STOKER_TOKEN"] == "secret"
    assert "secret" not in " ".join(plain + inside)
