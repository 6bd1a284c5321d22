"""From `key=value` arguments to a plan that can be frozen: compose, check, ask the live Slurm, collect the code.

Owns: the order of the steps, and that all problems are told at once. Nothing is written here. Imports Hydra, so verbs
import this module only after they have read their arguments.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..conf.checks import check
from ..conf.checks_task import without_effect
from ..conf.compose import Composed, compose
from ..conf.mounts import separators_in
from ..conf.problems import ConfigError, Problem
from ..conf.schema import ClusterKind, Config, ContainerRuntime
from . import code, lints, setup_lines, slurm, stage, storage, task_words
from .errors import UserError
from .freeze import Plan, new_id
from .redact import Redactor
from .render import render, script_of


@dataclass(frozen=True)
class Request:
    """What a person asked for on the command line."""

    overrides: tuple[str, ...]
    config_dir: Path | None
    run_dir: Path | None  # None: <run_root>/<name>-<id>
    command: tuple[str, ...]
    cwd: Path


@dataclass(frozen=True)
class Prepared:
    plan: Plan
    config: Config
    warnings: tuple[str, ...]


def prepare(request: Request, needs_slurm: bool) -> Prepared:
    """Everything that can be found wrong before anything is made.

    Args:
        needs_slurm: the run will be submitted; without sbatch that is an error for cluster.kind=slurm.

    Raises:
        UserError, ConfigError: with all problems, one per line.
    """
    composed = _compose(request)
    config = composed.config
    errors, warnings = problems_of(config, needs_slurm)
    snapshot = code.collect(request.cwd) if config.task.cmd or not errors else None
    if config.task.cmd and snapshot is not None:
        found = _own_script(composed, request.cwd, snapshot)
        errors += found.errors
        warnings += found.warnings
    run_id = new_id()
    directory = request.run_dir or Path(config.run_root) / f"{config.name}-{run_id}"
    python = interpreter(config, request.cwd)
    if not errors and not config.task.cmd:
        found_at_storage = storage.problems(config.checkpoint.storage, python)
        errors += found_at_storage[0]
        warnings += found_at_storage[1]
    if errors:
        raise UserError("\n".join(errors))
    assert snapshot is not None
    staged = environment_to_stage(config, python)
    archive = staged.archive if staged else None
    script = render(script_of(config, directory, run_id, __version__, python, archive))
    refuse_unmountable(composed.plain, directory)
    warnings += _plugins(config, snapshot)
    warnings += _kernels(config, snapshot)
    if snapshot.left_out:
        warnings.append(f"left out of the code snapshot, since they look like keys: {', '.join(snapshot.left_out)}")
    if staged and staged.elsewhere:
        warnings.append(
            f"cluster.stage_env=true: not staged, since outside of {staged.prefix} (nodes still read it from there): "
            f"{', '.join(staged.elsewhere)}"
        )
    plan = Plan(
        directory=directory,
        run_id=run_id,
        name=config.name,
        seed=config.seed,
        plain=composed.plain,
        yaml=composed.yaml,
        overrides=composed.overrides,
        command=request.command,
        cwd=request.cwd,
        python=python,
        script=script,
        snapshot=snapshot,
        staged=staged,
    )
    return Prepared(plan, config, tuple(warnings))


def _compose(request: Request) -> Composed:
    """As conf.compose, but the rules between fields are told along with what does not even parse."""
    try:
        return compose(request.overrides, request.config_dir)
    except ConfigError as e:
        raise ConfigError([*e.problems, *_further_problems(request, e)]) from None


def _further_problems(request: Request, found: ConfigError) -> list[Problem]:
    """What is wrong besides, judged without the overrides that are wrong by themselves."""
    bad = {p.field for p in found.problems}
    if not all("." in field for field in bad):
        return []  # a group's choice: what it would have set is not known
    rest = [o for o in request.overrides if o.lstrip("+~").partition("=")[0] not in bad]
    if len(rest) == len(request.overrides):
        return []
    try:
        config = compose(rest, request.config_dir).config
    except ConfigError:
        return []
    if any(field.partition(".")[0] == "task" for field in bad) and not config.task.cmd:
        config.task.cmd = ["python"]  # a script of their own was meant: the trainer's rules do not matter
    return [p for p in check(config) if p.severity == "error" and p.field not in bad]


def problems_of(config: Config, needs_slurm: bool) -> tuple[list[str], list[str]]:
    """(errors, warnings) of a configuration, for a launch and for a changed resume alike.

    Raises:
        UserError: Slurm is needed and is not here, and nothing else is wrong.
    """
    found = check(config)
    errors = [str(p) for p in found if p.severity == "error"]
    warnings = [str(p) for p in found if p.severity != "error"]
    if (wrong := setup_lines.problem_with(config.cluster.setup)) is not None:
        errors.append(wrong)
    if config.cluster.kind is ClusterKind.slurm and (needs_slurm or slurm.is_available()):
        try:
            live = lints.live(config)
        except UserError as e:
            if not errors:
                raise
            live = lints.Findings([str(e)])
        errors += live.errors
        warnings += live.warnings
    if not errors:
        warnings += _secrets_written_out(config)
    return list(dict.fromkeys(errors)), list(dict.fromkeys(warnings))


def _secrets_written_out(config: Config) -> list[str]:
    """Warnings about what looks like a secret by its form or by what stands before it; its text is not repeated."""
    texts = {f"cluster.env.{name}": value for name, value in config.cluster.env.items()}
    texts |= {f"cluster.setup[{at}]": line for at, line in enumerate(config.cluster.setup)}
    texts["task.cmd"] = " ".join(word if word.startswith("-") else shlex.quote(word) for word in config.task.cmd)
    found = []
    for field, text in texts.items():
        redactor = Redactor({})
        redactor.learn(text)
        if redactor.count:
            found.append(
                f"{field}: holds what looks like a key or password, and is written into the run directory and the "
                "script; export it before `stoker launch` instead (the job inherits your environment), or read a file"
            )
    return found


def _own_script(composed: Composed, cwd: Path, snapshot: code.Snapshot) -> task_words.Findings:
    """What is wrong or doubtful with `task.cmd`, besides its words (conf/checks_task.py)."""
    config = composed.config
    if not config.task.cmd[0]:
        return task_words.Findings()
    is_here = config.container.runtime is ContainerRuntime.none
    cluster = config.cluster  # these may change the PATH
    is_path_ours = is_here and not (cluster.modules or cluster.conda or cluster.setup or "PATH" in cluster.env)
    which = shutil.which if is_path_ours else None
    found = task_words.look(config.task.cmd, cwd, snapshot.cwd, snapshot.files.keys(), is_here, which)
    ignored = without_effect(composed.plain, compose(()).plain)
    if not ignored:
        return found
    warning = f"{', '.join(ignored)}: without effect: task.cmd runs a script of your own, not stoker's trainer"
    return task_words.Findings(found.errors, (*found.warnings, warning))


def _plugins(config: Config, snapshot: code.Snapshot) -> list[str]:
    """Warnings about user modules that the job would not find, or would find only as they are by then."""
    found = []
    for module in config.plugins:
        path = module.replace(".", "/")
        roots = snapshot.pythonpath[1:]
        if any(f"{root}/{path}{end}" in snapshot.files for root in roots for end in (".py", "/__init__.py")):
            continue
        where = f"the git project around {Path.cwd()}" if snapshot.project else "any git project: none is around here"
        found.append(
            f"plugins: {module} is not in {where}, so it is not frozen; the job imports whatever is installed by then"
        )
    return found


def _kernels(config: Config, snapshot: code.Snapshot) -> list[str]:
    """A warning about kernels that each node would have to build, if it can: better known before a job has waited."""
    wants_native = config.kernels.default in ("auto", "native") and not config.task.cmd
    if not wants_native or config.cluster.gpus_per_node == 0 or snapshot.has_kernels:
        return []
    return [
        "kernels: none are built here to go along, so every node builds them at its first start and needs a compiler "
        "for that; `stoker kernels build` before the launch saves it (docs/kernels.md)"
    ]


def interpreter(config: Config, cwd: Path) -> str:
    """The interpreter inside the job; a relative path is meant from here."""
    # A conda environment brings its own, first on the path once it is activated.
    chosen = config.cluster.python or ("python" if config.cluster.conda else sys.executable)
    return os.path.normpath(cwd / Path(chosen).expanduser()) if "/" in chosen else chosen


def environment_to_stage(config: Config, python: str) -> stage.Environment | None:
    """What cluster.stage_env means for the interpreter that the job will use.

    Raises:
        UserError: it cannot be staged.
    """
    cluster = config.cluster
    if not cluster.stage_env or cluster.kind is not ClusterKind.slurm:
        return None
    if cluster.conda and not cluster.python:
        python = os.path.join(cluster.conda, "bin", "python")
    return stage.plan(python, Path(config.run_root))


def refuse_unmountable(plain: dict[str, Any], directory: Path) -> None:
    """Raises UserError for a run directory (from --run-dir) that the container's runtime cannot mount."""
    runtime = plain["container"]["runtime"]
    found = separators_in(runtime, str(directory))
    if found:
        characters = " ".join(map(repr, found))
        raise UserError(f"run directory {directory}: {runtime} cannot mount a path with {characters}; choose another")
