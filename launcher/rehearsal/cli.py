"""`stoker cluster ...`: the rehearsal cluster on the command line. Prints, and maps errors to exit codes; no more."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import cluster as clusters
from . import nodes
from .cluster import Cluster, ClusterError
from .spec import ClusterSpec, Layout

_NODE_VERBS = {
    "crash": "power a node off: everything on it dies at once",
    "cut": "pull a node's network cable; its processes go on (isolated nodes)",
    "heal": "plug a node's network cable in again",
    "freeze": "stop every process of a node (SIGSTOP)",
    "thaw": "let a frozen node go on",
    "start": "power a node on again, or start its slurmd",
}
_CONTROLLER_VERBS = {
    "stop-controller": "end slurmctld: jobs go on, and Slurm's commands get no answer",
    "start-controller": "start slurmctld again, with its state",
}
_DEFAULTS = ClusterSpec()


def default_directory() -> str:
    return os.environ.get("STOKER_CLUSTER") or str(Path.home() / ".cache" / "stoker" / "cluster")


def main(argv: Sequence[str]) -> int:
    """`argv` is what follows `stoker cluster`. Returns the exit code: 0, or 1 for an error (told in one line), 130 when
    interrupted; usage errors exit with 2, exec with the command's own."""
    arguments = _parser().parse_args(argv)
    try:
        return int(_VERBS[arguments.verb](arguments))
    except KeyboardInterrupt:
        print("stoker cluster: interrupted; what had been started is taken down again", file=sys.stderr)
        return 130
    except (ClusterError, ValueError, OSError) as error:
        print(f"stoker cluster {arguments.verb}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stoker cluster", description="A private, real Slurm on this machine.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        added.add_argument("--dir", default=default_directory(), help="the cluster's directory (%(default)s)")
        return added

    up = verb("up", "start a cluster and wait until its nodes are idle")
    up.add_argument("--isolate", action="store_true", help="nodes with their own address, host name, /tmp and /dev/shm")
    up.add_argument("--db", action="store_true", help="with slurmdbd, so that sacct works")
    for option, text in (
        ("nodes", "nodes"),
        ("cpus", "CPUs a node claims to have"),
        ("gpus", "pretended GPUs a node has"),
    ):
        up.add_argument(f"--{option}", type=int, default=getattr(_DEFAULTS, option), help=f"{text} (%(default)s)")
    up.add_argument("--memory", type=int, default=_DEFAULTS.memory, help="MB a node claims to have (%(default)s)")
    up.add_argument("--grace", type=int, default=_DEFAULTS.grace_time, help="seconds of preemption grace (%(default)s)")
    up.add_argument("--send-user-signal", action="store_true", help="announce preemption by the job's own --signal")
    up.add_argument("--no-requeue", action="store_true", help="JobRequeue=0")
    up.add_argument("--share", action="append", default=[], help="directory below /tmp that isolated nodes share")
    up.add_argument("--slurm-prefix", default="", help="another build of Slurm (bin/ and sbin/ below it)")
    down = verb("down", "end the cluster and remove every trace of it")
    down.add_argument("--keep-logs", action="store_true", help="leave DIR/log")
    verb("status", "nodes, daemons, jobs")
    verb("env", 'settings for a shell: eval "$(stoker cluster env)"')
    execute = verb("exec", "run a command as a client of the cluster, or on a node")
    execute.add_argument("--node", help="run it there")
    execute.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    for name, text in _NODE_VERBS.items():
        verb(name, text).add_argument("node", help="n1, n2, ...")
    for name, text in _CONTROLLER_VERBS.items():
        verb(name, text)
    preempt = verb("preempt", "take a running job's nodes away by a job in partition urgent")
    preempt.add_argument("job", help="job id")
    preempt.add_argument("--seconds", type=int, default=5, help="how long the urgent job runs (%(default)s)")
    return parser


def _spec(arguments: argparse.Namespace) -> ClusterSpec:
    # What is submitted from here writes here, so nodes with a /tmp of their own must see it.
    here = Path.cwd()
    share = [*arguments.share, *([str(here)] if Path("/tmp") in here.parents else [])]
    return ClusterSpec(
        nodes=arguments.nodes,
        cpus=arguments.cpus,
        memory=arguments.memory,
        gpus=arguments.gpus,
        isolate=arguments.isolate,
        database=arguments.db,
        grace_time=arguments.grace,
        send_user_signal=arguments.send_user_signal,
        job_requeue=not arguments.no_requeue,
        share=tuple(str(Path(path).resolve()) for path in share),
        slurm_prefix=arguments.slurm_prefix,
    )


def _up(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    cluster = Cluster.start(_spec(arguments), arguments.dir)
    cluster.detach()
    kind = "isolated" if cluster.spec.isolate else "plain"
    print(f"up in {time.monotonic() - began:.1f} s: {cluster.spec.nodes} {kind} nodes in {cluster.layout.root}")
    print(cluster.run(["sinfo"]).stdout, end="")
    where = "" if arguments.dir == default_directory() else f" --dir {shlex.quote(arguments.dir)}"
    print(f'use it:   eval "$(stoker cluster env{where})"')
    print(f"end it:   stoker cluster down{where}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    root = Layout.of(arguments.dir).root
    try:
        Cluster.attach(root).down(arguments.keep_logs)
    except clusters.NotUp:
        if not clusters.clear(root, arguments.keep_logs):
            print(f"no cluster in {root}")
            return 0
    print(f"down: no process, mount or file of {root} is left" + (" but log/" if arguments.keep_logs else ""))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    cluster = Cluster.attach(arguments.dir)
    report = cluster.status()
    print(f"{cluster.layout.root}: {'isolated' if cluster.spec.isolate else 'plain'}, keeper {cluster.keeper}")
    print(f"daemons: {' '.join(report['daemons'])}")
    if dead := [name for name in report["ended"] if name != "mariadb-install-db"]:
        print(f"ended:   {' '.join(dead)}")
    slurm_says: dict[str, str] = {}
    jobs = ""
    try:
        slurm_says = cluster.node_states()
        jobs = cluster.run(["squeue"]).stdout
    except ClusterError as error:
        print(f"Slurm does not answer: {error}")
    powered = nodes.roots(cluster.keeper)
    for name in cluster.nodes():
        members = cluster.processes_on(name) if name in powered else []
        is_frozen = bool(members) and members[0].state in "Tt"
        power = "off" if not members else "frozen" if is_frozen else "on"
        print(f"{name:5} {slurm_says.get(name, '?'):10} power {power:7} {len(members)} processes")
    print(jobs, end="")
    return 0


def _env(arguments: argparse.Namespace) -> int:
    cluster = Cluster.attach(arguments.dir)
    for key, value in {**cluster.exports(), "STOKER_CLUSTER": str(cluster.layout.root)}.items():
        print(f"export {key}={shlex.quote(value)}")
    return 0


def _exec(arguments: argparse.Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ValueError("what is to be run? stoker cluster exec [--node n1] -- COMMAND")
    cluster = Cluster.attach(arguments.dir)
    argv = cluster.argv_on(arguments.node, command) if arguments.node else cluster.argv_inside(command)
    sys.stdout.flush()
    os.execvpe(argv[0], argv, cluster.env)


def _on_node(arguments: argparse.Namespace) -> int:
    cluster = Cluster.attach(arguments.dir)
    act = {
        "crash": cluster.crash,
        "cut": cluster.cut,
        "heal": cluster.heal,
        "freeze": cluster.freeze,
        "thaw": cluster.thaw,
        "start": cluster.restart_node,
    }
    act[arguments.verb](arguments.node)
    return 0


def _controller(arguments: argparse.Namespace) -> int:
    cluster = Cluster.attach(arguments.dir)
    if arguments.verb == "stop-controller":
        cluster.stop_controller()
    else:
        cluster.start_controller()
    return 0


def _preempt(arguments: argparse.Namespace) -> int:
    print(Cluster.attach(arguments.dir).preempt(arguments.job, arguments.seconds))
    return 0


_VERBS = {
    "up": _up,
    "down": _down,
    "status": _status,
    "env": _env,
    "exec": _exec,
    "preempt": _preempt,
    **dict.fromkeys(_NODE_VERBS, _on_node),
    **dict.fromkeys(_CONTROLLER_VERBS, _controller),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
