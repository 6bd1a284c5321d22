"""The part of the batch script that sets up the environment, run by bash with a site's `module` and conda made up.

The made-up ones behave as documented: Environment Modules (an old one returns 0 whatever happens), Lmod, and conda's
`shell.bash hook`.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from stoker.conf.schema import ClusterConfig, Config
from stoker.launcher.render import render, script_of

STUB = """#!/usr/bin/python3
import json, os, sys
with open(os.environ["SEEN"], "w") as f:
    json.dump(dict(os.environ), f)
"""
MODULE = """
module() {
    case $1 in
        purge) LOADEDMODULES= ;;
        load)
            case $2 in
                gone*) echo "ERROR: Unable to locate a modulefile for '$2'" >&2; return GONE ;;
                *) export LOADEDMODULES="${LOADEDMODULES:+$LOADEDMODULES:}$2/1.0" ;;
            esac ;;
    esac
}
"""
CONDA = """#!/bin/sh
# `conda shell.bash hook` prints the function that `conda init` would have put into the profile.
cat <<'HOOK'
conda() {
    [ "$2" = train ] || { echo "EnvironmentNameNotFound: $2" >&2; return 1; }
    export CONDA_DEFAULT_ENV=$2 CONDA_PREFIX=/envs/$2
}
HOOK
"""


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def run(tmp_path: Path, cluster: ClusterConfig, **env: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """The script's end, and the environment of the interpreter if it came to that."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    file = tmp_path / "submit.sbatch"
    python = cluster.python or program(tmp_path / "stub", STUB)
    file.write_text(render(script_of(Config(cluster=cluster), run_dir, "x-1", "0.1.0", python)))
    seen = tmp_path / "seen"
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SEEN": str(seen)}
    done = subprocess.run(["bash", str(file)], env=clean | env, capture_output=True, text=True, check=False)
    return done, json.loads(seen.read_text()) if seen.exists() else {}


def site(tmp_path: Path, code_of_failure: int = 1) -> str:
    """A MODULESHOME."""
    program(tmp_path / "site modules/init/bash", MODULE.replace("GONE", str(code_of_failure)))
    return str(tmp_path / "site modules")


def test_modules_are_purged_and_loaded_in_a_shell_that_has_none(tmp_path: Path) -> None:
    cluster = ClusterConfig(modules=["cuda/12.8", "it's$HOME"])
    done, seen = run(tmp_path, cluster, MODULESHOME=site(tmp_path), LOADEDMODULES="left/over")
    assert done.returncode == 0, done.stderr
    assert seen["LOADEDMODULES"] == "cuda/12.8/1.0:it's$HOME/1.0"


@pytest.mark.parametrize(("code", "words"), [(1, "failed (exit code 1)"), (0, "loaded nothing")])
def test_a_module_that_does_not_load_ends_the_job(tmp_path: Path, code: int, words: str) -> None:
    done, seen = run(tmp_path, ClusterConfig(modules=["cuda", "gone/1"]), MODULESHOME=site(tmp_path, code))
    assert done.returncode == 1
    assert f"cluster.modules: module load gone/1 {words}" in done.stderr
    assert seen == {}


def test_no_module_command_is_told(tmp_path: Path) -> None:
    done, _ = run(tmp_path, ClusterConfig(modules=["cuda"]))
    assert done.returncode == 1
    assert "cluster.modules: no module command here; source its set-up in cluster.setup" in done.stderr


def test_a_loaded_module_is_there_for_set_up(tmp_path: Path) -> None:
    cluster = ClusterConfig(modules=["cuda"], setup=["export SEEN_BY_SETUP=$LOADEDMODULES"])
    assert run(tmp_path, cluster, MODULESHOME=site(tmp_path))[1]["SEEN_BY_SETUP"] == "cuda/1.0"


def test_conda_is_activated_without_conda_init(tmp_path: Path) -> None:
    conda = program(tmp_path / "c onda", CONDA)
    done, seen = run(tmp_path, ClusterConfig(conda="train"), CONDA_EXE=conda)
    assert done.returncode == 0, done.stderr
    assert seen["CONDA_PREFIX"] == "/envs/train"


def test_a_conda_environment_that_is_not_there_ends_the_job(tmp_path: Path) -> None:
    conda = program(tmp_path / "conda", CONDA)
    done, seen = run(tmp_path, ClusterConfig(conda="it's gone"), CONDA_EXE=conda)
    assert (done.returncode, seen) == (1, {})
    assert "cluster.conda: no environment it's gone can be activated here" in done.stderr


def test_a_prefix_needs_no_conda_and_its_python_is_used(tmp_path: Path) -> None:
    prefix = tmp_path / "my env"
    (prefix / "conda-meta").mkdir(parents=True)
    program(prefix / "bin/python", STUB)
    program(prefix / "etc/conda/activate.d/x.sh", "export FROM_PACKAGE=1\n")
    done, seen = run(tmp_path, ClusterConfig(conda=str(prefix), python="python"))
    assert done.returncode == 0, done.stderr
    assert seen["FROM_PACKAGE"] == "1"
    assert seen["CONDA_PREFIX"] == str(prefix)
    assert seen["PATH"].startswith(f"{prefix}/bin:")


@pytest.mark.parametrize(("modules", "kept"), [([], True), (["cuda"], False)])
def test_the_submitting_shells_python_path_does_not_reach_another_environment(
    tmp_path: Path, modules: list[str], kept: bool
) -> None:
    env = {"PYTHONPATH": "/mine", "MODULESHOME": site(tmp_path)}
    _, seen = run(tmp_path, ClusterConfig(modules=modules), **env)
    assert ("PYTHONPATH" in seen) is kept


def test_node_local_directory_reaches_the_job(tmp_path: Path) -> None:
    _, seen = run(tmp_path, ClusterConfig(local_dir="/local/$SLURM_JOB_ID"))
    assert seen["STOKER_LOCAL_DIR"] == "/local/$SLURM_JOB_ID", "the nodes put the variables in"
