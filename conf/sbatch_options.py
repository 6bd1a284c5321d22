"""sbatch's long options: which there are, which take a value, and which of them are fields of `cluster`.

Owns: these tables (render.py writes options from TYPED), and judging one entry of `cluster.sbatch`. Names and arity
were taken from sbatch 22.05 by asking it, later ones (up to 26.05) from its manual; an option that the site's sbatch
does not know is refused by sbatch itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import slurm_gpus
from .problems import nearest

_NO_VALUE = (
    "consolidate-segments contiguous help hold ignore-pbs no-requeue overcommit oversubscribe parsable quiet reboot"
    " spread-job spread-segments stepmgr test-only usage use-min-nodes verbose version wait"
)
_VALUE_OR_NOT = "exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports"
_VALUE = (
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container"
    " container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency"
    " distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node"
    " gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type"
    " mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile nodelist nodes ntasks"
    " ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output partition power prefer"
    " priority profile qos reservation segment signal sockets-per-node switches thread-spec threads-per-core time"
    " time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap"
)
SWITCHES = frozenset(_NO_VALUE.split())
WITH_VALUE = frozenset(_VALUE.split())
OPTIONS = SWITCHES | WITH_VALUE | frozenset(_VALUE_OR_NOT.split())

# Options that are a field of their own, in the order in which scripts have them: option -> field of `cluster`.
TYPED: Mapping[str, str] = {
    "nodes": "nodes",
    "cpus-per-task": "cpus_per_task",
    "mem": "mem",
    "mem-per-cpu": "mem_per_cpu",
    "mem-per-gpu": "mem_per_gpu",
    "tmp": "tmp",
    "time": "time",
    "begin": "begin",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "nodelist": "nodelist",
    "exclude": "exclude",
    "reservation": "reservation",
    "licenses": "licenses",
    "switches": "switches",
    "exclusive": "exclusive",
    "nice": "nice",
    "comment": "comment",
    "mail-type": "mail_type",
    "mail-user": "mail_user",
}

_OF_THE_CALL = "decides how sbatch is called, not what the job is; leave it out"
_OUR_LOGS = "logs lie in the run directory; leave it out"
_ONE_AGENT = "one agent per node starts the workers; use cluster.nodes and cluster.procs_per_node"
_GPUS = "use cluster.gpus_per_node and cluster.gpu_type"
# Options that stoker sets, and what to do instead.
OURS: Mapping[str, str] = {option: f"use cluster.{field}" for option, field in TYPED.items()} | {
    "array": "a run is one job; leave it out",
    "chdir": "the job runs in its run directory; use run_root",
    "clusters": "jobs are watched on one cluster; submit on the other one",
    "cpus-per-gpu": "excludes the cpus-per-task that stoker sets; use cluster.cpus_per_task",
    "dependency": "use `stoker launch --after`: what a run waited for is no part of it when it goes on",
    "error": _OUR_LOGS,
    "export": "use cluster.env",
    "export-file": "use cluster.env",
    "gpus": _GPUS,
    "gpus-per-node": _GPUS,
    "gpus-per-socket": _GPUS,
    "gpus-per-task": f"{_GPUS}; cluster.gpu_request=gpus_per_task asks for them in this way",
    "gres": f"{_GPUS}, and cluster.gres for what is no GPU; cluster.gpu_request=gres asks for both in this way",
    "help": _OF_THE_CALL,
    "input": "the job reads no standard input; leave it out",
    "job-name": "use name",
    "no-kill": "a job that outlives the node of its batch script has nobody to end it; leave it out",
    "no-requeue": "use resilience.continuation=none",
    "nodefile": "use cluster.nodelist",
    "ntasks": _ONE_AGENT,
    "ntasks-per-core": _ONE_AGENT,
    "ntasks-per-gpu": _ONE_AGENT,
    "ntasks-per-node": _ONE_AGENT,
    "ntasks-per-socket": _ONE_AGENT,
    "open-mode": _OUR_LOGS,
    "output": _OUR_LOGS,
    "parsable": _OF_THE_CALL,
    "quiet": _OF_THE_CALL,
    "requeue": "use resilience.continuation=requeue",
    "signal": "use resilience.warning",
    "test-only": _OF_THE_CALL,
    "usage": _OF_THE_CALL,
    "verbose": _OF_THE_CALL,
    "version": _OF_THE_CALL,
    "wait": "use `stoker launch --wait`",
    "wrap": _OF_THE_CALL,
}


def problem_with(option: str, value: str | None) -> str | None:
    """What is wrong with `cluster.sbatch.option=value`, or None.

    "", "true" and "false" switch an option without value; None leaves it out.

    Returns:
        What was expected and what to do, to follow the field and its value.
    """
    if option not in OPTIONS:
        near = nearest(option.lstrip("-"), OPTIONS)
        if near is None:
            return "no long option of sbatch (they are written without dashes)"
        return (
            f"no long option of sbatch; for {near} {OURS[near]}"
            if near in OURS
            else f"no long option of sbatch; did you mean {near}?"
        )
    if value is None:
        return None
    if option in OURS:
        return f"set by stoker; {_advice(option, value)}"
    is_switch = value.lower() in ("", "true", "false")
    if option in SWITCHES and not is_switch:
        return "takes no value; leave it empty"
    if option in WITH_VALUE and is_switch:
        return "needs a value"
    return None


def _advice(option: str, value: str) -> str:
    """Written out with the value, where it is GPUs of one kind."""
    read = {"gpus-per-node": slurm_gpus.asked, "gres": slurm_gpus.listed}.get(option)
    try:
        found = read(value) if read else ()
    except ValueError:
        found = ()
    if len(found) != 1 or (option == "gres" and "," in value):
        return OURS[option]
    kind = f" cluster.gpu_type={found[0].type}" if found[0].type else ""
    return f"use cluster.gpus_per_node={found[0].count}{kind}"
