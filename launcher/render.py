"""The batch script as a pure function of typed values.

Owns: which #SBATCH lines a configuration means, and their quoting. The text is slurm_templates/'s; submitting it is
executor.py's.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import jinja2

from ..conf.budgets import BUDGETS, UNLIMITED
from ..conf.sbatch_options import TYPED
from ..conf.schema import ClusterConfig, ClusterKind, Config, Continuation, GpuRequest
from .run.badnodes import directory_of
from .run.bootstrap import ENV_ARCHIVE, LOCAL_DIR
from .run.layout import RunDir

TEMPLATES = Path(__file__).resolve().parent.parent / "slurm_templates"
Value = str | int | bool | None

_PLAIN = re.compile(r"[A-Za-z0-9_@%+:,./=\[\]-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class Script:
    """Everything the template needs.

    `options` are sbatch's long options; None and False are left out, True is a bare flag. `setup` lines are shell text
    and go in as they are; everything else is quoted. `is_own_python`: the interpreter is not the submitting shell's.
    """

    run_dir: str
    run_id: str
    version: str
    python: str
    options: tuple[tuple[str, Value], ...]
    env: tuple[tuple[str, str], ...]
    setup: tuple[str, ...]
    modules: tuple[str, ...] = ()
    conda: str | None = None
    is_own_python: bool = False
    continuation: str = "none"  # of a Slurm job: how it is started elsewhere if this node cannot start it
    failed_starts: int = 10  # how often that is tried
    backoff: int = 0  # seconds between two such starts
    comment: str = ""  # the user's own, of such a job
    bad_nodes: str = ""  # directory of findings (run/badnodes.py)
    bad_node_seconds: int = 0  # for which a finding holds


def script_of(
    config: Config, run_dir: Path, run_id: str, version: str, python: str, env_archive: Path | None = None
) -> Script:
    """What a configuration means for the script.

    env_archive: the packed Python environment, with cluster.stage_env.

    Raises:
        ValueError: a value cannot stand in an #SBATCH line or an environment variable; names the field.
    """
    cluster = config.cluster
    env = {"OMP_NUM_THREADS": str(cluster.omp_threads)} | dict(cluster.env)
    env |= {LOCAL_DIR: cluster.local_dir} if cluster.local_dir else {}
    env |= {ENV_ARCHIVE: str(env_archive)} if env_archive else {}
    r = config.resilience
    limit = {**BUDGETS, **r.budgets}["launch_failed"]
    return Script(
        run_dir=str(run_dir),
        run_id=run_id,
        version=version,
        python=python,
        options=_options(config, run_dir) if cluster.kind is ClusterKind.slurm else (),
        env=tuple((name, str(value)) for name, value in env.items()),
        setup=tuple(cluster.setup),
        modules=tuple(cluster.modules),
        conda=cluster.conda,
        is_own_python=bool(cluster.modules or cluster.conda or cluster.python),
        continuation=config.resilience.continuation.value if cluster.kind is ClusterKind.slurm else "none",
        failed_starts=limit if limit != UNLIMITED else 10**6,
        backoff=round(r.backoff),
        comment=cluster.comment or "",
        bad_nodes=str(directory_of(RunDir(run_dir))),
        bad_node_seconds=round(3600 * r.bad_node_hours),
    )


def _options(config: Config, run_dir: Path) -> tuple[tuple[str, Value], ...]:
    cluster = config.cluster
    requeue = config.resilience.continuation is Continuation.requeue
    return (
        ("job-name", config.name),
        *_resources(cluster),
        *((name, _extra(value)) for name, value in cluster.sbatch.items()),
        ("chdir", str(run_dir)),
        ("output", _log_pattern(run_dir)),
        ("open-mode", "append"),
        ("export", "ALL"),
        ("signal", f"B:USR1@{config.resilience.warning}"),
        ("requeue" if requeue else "no-requeue", True),
    )


def _log_pattern(run_dir: Path) -> str:
    """Slurm replaces %j and its like all over the path, and nothing at all in a path with a backslash."""
    text = str(run_dir)
    if "\\" in text:
        raise ValueError(
            f"run directory {text}: Slurm cannot name log files below a path with a backslash; move run_root"
        )
    return f"{text.replace('%', '%%')}/slurm/%j.log"


def _resources(cluster: ClusterConfig) -> tuple[tuple[str, Value], ...]:
    typed = ((option, getattr(cluster, field)) for option, field in TYPED.items())
    return (("ntasks-per-node", 1), *_gpus(cluster), *typed)


def _gpus(cluster: ClusterConfig) -> tuple[tuple[str, Value], ...]:
    gpus = f"{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else str(cluster.gpus_per_node)
    if not cluster.gpus_per_node:
        return (("gres", cluster.gres),)
    if cluster.gpu_request is GpuRequest.gres:
        return (("gres", f"gpu:{gpus},{cluster.gres}" if cluster.gres else f"gpu:{gpus}"),)
    if cluster.gpu_request is GpuRequest.gpus_per_task:
        # Slurm takes it only together with a number of tasks; the nodes' agents are the tasks.
        return (("ntasks", cluster.nodes), ("gpus-per-task", gpus), ("gres", cluster.gres))
    return (("gpus-per-node", gpus), ("gres", cluster.gres))


def _extra(value: str | None) -> Value:
    """conf/sbatch_options.py says what may be here; an option without a value is switched by these words."""
    if value is None:
        return None
    word = value.lower()
    return True if word in ("", "true") else False if word == "false" else value


def option_line(name: str, value: Value) -> str | None:
    """`--name=value` as an #SBATCH line takes it; None if it is to be left out.

    Raises:
        ValueError: the value holds a newline or another control character.
    """
    if value is None or value is False:
        return None
    if value is True:
        return f"--{name}"
    text = str(value)
    if _CONTROL.search(text):
        raise ValueError(f"sbatch option {name}: {text!r} holds a control character; expected a single line")
    if _PLAIN.fullmatch(text):
        return f"--{name}={text}"
    # sbatch knows both quotes, and a backslash in or out of them takes the next character as it is.
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{escaped}"'


def render(script: Script, template: str = "supervisor.sbatch.j2") -> str:
    """The text of the batch script.

    Raises:
        ValueError: a value cannot be written there.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # shell, not HTML: every value goes through `sh`
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = _shell
    environment.filters["comment"] = lambda text: _CONTROL.sub("?", str(text))
    assert all(name.isidentifier() for name, _ in script.env), "conf.checks lets no other names through"
    lines = [option_line(name, value) for name, value in script.options]
    return environment.get_template(template).render(
        options=[line for line in lines if line is not None],
        run_dir=script.run_dir,
        run_id=script.run_id,
        version=script.version,
        python=script.python,
        env=script.env,
        setup=script.setup,
        modules=script.modules,
        conda=script.conda,
        is_own_python=script.is_own_python,
        continuation=script.continuation,
        failed_starts=script.failed_starts,
        backoff=script.backoff,
        comment=f"{script.comment} " if script.comment else "",
        attempts=str(RunDir(Path(script.run_dir)).attempts),
        submissions=str(RunDir(Path(script.run_dir)).submissions),
        bad_nodes=script.bad_nodes,
        bad_node_seconds=script.bad_node_seconds,
    )


def _shell(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"{text!r}: a NUL character cannot be passed to a program")
    return shlex.quote(text)
