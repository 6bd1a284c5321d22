"""How the agents get into a container: the words before their interpreter, the bind mounts, and the environment.

Owns: one pure function per runtime. Supervisor and Slurm's commands stay on the host; agent, zygote and workers are
inside. Runs on the batch host, so standard library only. Sources: pyxis' wiki "Usage" and args.c; apptainer's user
guide, "Bind Paths and Mounts" and "Environment and Metadata".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..conf.mounts import Mount, parse_mount

# A runtime's own process would die of a signal to all processes of the task, and take the agent with it, before the
# agent has told. Ignored signals stay so over exec; the agent installs its handlers all the same.
DEAF = ("sh", "-c", 'trap "" HUP INT TERM USR1 USR2; exec "$@"', "sh")
# What belongs to the host's interpreter or libraries and would mislead those inside.
_HOST_ONLY = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONSTARTUP", "PYTHONPYCACHEPREFIX", "PYTHONEXECUTABLE",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE", "CONDA_PYTHON_EXE", "CONDA_SHLVL",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "STOKER_CODE",
)  # fmt: skip
_GPU_OPTIONS = ("--nv", "--nvccli", "--rocm")


@dataclass(frozen=True)
class Entry:
    """How to get in: `srun OPTIONS WORDS PYTHON ...`."""

    options: tuple[str, ...]
    words: tuple[str, ...]
    python: str


def entry(config: Mapping[str, Any], run_dir: str, python: str, local: str, apptainer: str) -> Entry:
    """For `container.runtime`; without one, the host's `python` as it is.

    Args:
        local: node-local directory that agents use.
        apptainer: the program: apptainer, or singularity where it is still called so.
    """
    container = config["container"]
    runtime = container["runtime"]
    if runtime == "none":
        return Entry((), (), python)
    mounts = [*derived_mounts(config, run_dir, local), *map(parse_mount, container["mounts"])]
    if runtime == "pyxis":
        return Entry(_pyxis(container, mounts, run_dir), (), container["python"])
    if runtime == "apptainer":
        words = _apptainer(container, mounts, apptainer, has_gpus=config["cluster"]["gpus_per_node"] > 0)
    else:
        words = _command(container, mounts)
    return Entry((), (*DEAF, *words), container["python"])


def derived_mounts(config: Mapping[str, Any], run_dir: str, local: str) -> list[Mount]:
    """Run directory, node-local directories, where checkpoints lie if elsewhere, and where data, tokenizer and initial
    weights lie (behind links too), at the same paths.

    What lies below another of them needs no mount of its own.
    """
    data = config["data"]
    files = [f"{source['prefix']}{end}" for source in data["sources"] if source["prefix"] for end in (".bin", ".idx")]
    files += [data["tokenizer"]] if data["tokenizer"] else []
    chosen = (config["model"].get("init_from") or "").removeprefix("hf:")
    # In the cache of Hugging Face's hub all files of a model are links into one other directory.
    files += [os.path.join(chosen, "config.json")] if chosen else []
    folders = [os.path.dirname(path) for file in files for path in (file, os.path.realpath(file))]
    checkpoint = config["checkpoint"]
    folders += [p for p in (checkpoint.get("storage"), checkpoint.get("local")) if p and p.startswith("/")]
    wanted = sorted({os.path.normpath(path) for path in (run_dir, local, *folders)})
    kept: list[str] = []
    for path in wanted:  # sorted: what is above comes first
        if not any(path.startswith(f"{above}/") for above in kept):
            kept.append(path)
    return [Mount(path, path) for path in kept]


def _pyxis(container: Mapping[str, Any], mounts: Iterable[Mount], run_dir: str) -> tuple[str, ...]:
    entries = [f"{m.source}:{m.target}{':ro' * m.read_only}" for m in mounts]
    own = list(container["options"])
    # As another user inside, files of the run and private directories would seem to be somebody else's.
    remap = [] if any(o.endswith("container-remap-root") for o in own) else ["--no-container-remap-root"]
    return (
        f"--container-image={container['image']}",
        f"--container-mounts={','.join(entries)}",
        f"--container-workdir={run_dir}",
        *remap,
        *own,
    )


def _apptainer(container: Mapping[str, Any], mounts: Iterable[Mount], program: str, has_gpus: bool) -> tuple[str, ...]:
    own = list(container["options"])
    gpus = ["--nv"] if has_gpus and not any(o in _GPU_OPTIONS for o in own) else []
    binds = [word for m in mounts for word in ("--bind", f"{m.source}:{m.target}{':ro' * m.read_only}")]
    return (program, "exec", *gpus, *binds, *own, container["image"])


def _command(container: Mapping[str, Any], mounts: Iterable[Mount]) -> tuple[str, ...]:
    """The user's words. A run of words with {source} or {target}, with the option before it, stands once per mount."""
    words = [word.replace("{image}", container["image"] or "") for word in container["command"]]
    listed = list(mounts)
    done: list[str] = []
    k = 0
    while k < len(words):
        start = k
        while k < len(words) and ("{source}" in words[k] or "{target}" in words[k]):
            k += 1
        group = words[start:k]
        if not group:
            done.append(words[k])
            k += 1
            continue
        if done and done[-1].startswith("-") and not group[0].startswith("-"):
            group.insert(0, done.pop())
        for m in listed:
            done += [word.replace("{source}", m.source).replace("{target}", m.target) for word in group]
    return tuple(done)


def environment_inside(environ: Mapping[str, str], chosen: Iterable[str], prefixes: Iterable[str]) -> dict[str, str]:
    """The environment of an agent in a container: without what points into the host's Python and libraries.

    Args:
        chosen: variables that the configuration sets (cluster.env); they are meant.
        prefixes: directories of the host's interpreters, whose programs leave the PATH.
    """
    kept = set(chosen)
    env = {name: value for name, value in environ.items() if name in kept or name not in _HOST_ONLY}
    # The home directory is often mounted, and packages below ~/.local are those of another Python.
    env.setdefault("PYTHONNOUSERSITE", "1")
    roots = [environ[n] for n in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(n)] + list(prefixes)
    if "PATH" in env and "PATH" not in kept:
        inner = {os.path.join(root, "bin") for root in roots if root not in ("/", "/usr", "/usr/local")}
        env["PATH"] = os.pathsep.join(p for p in env["PATH"].split(os.pathsep) if p not in inner)
    return env
