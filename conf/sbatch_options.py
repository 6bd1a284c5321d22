"""sbatch's long options: which there are, which take a value, and which belong to a field of ours.

Owns: that table, and judging one entry of `cluster.sbatch`. Names and arity were taken from sbatch 22.05 by asking it,
later ones (up to 26.05) from its manual; an option that the site's sbatch does not know is refused by sbatch itself.
"""

from __future__ import annotations

from collections.abc import Mapping

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

_OF_THE_CALL = "decides how sbatch is called, not what the job is; leave it out"
_OUR_LOGS = "logs lie in the run directory; leave it out"
_ONE_AGENT = "one agent per node starts the workers; use cluster.nodes and cluster.procs_per_node"
_GPUS = "use cluster.gpus_per_node"
# Options that stoker sets, and what to do instead.
OURS: Mapping[str, str] = {
    "account": "use cluster.account",
    "array": "a run is one job; leave it out",
    "chdir": "the job runs in its run directory; use run_root",
    "clusters": "jobs are watched on one cluster; submit on the other one",
    "constraint": "use cluster.constraint",
    "cpus-per-task": "use cluster.cpus_per_task",
    "error": _OUR_LOGS,
    "exclude": "use cluster.exclude",
    "exclusive": "use cluster.exclusive",
    "export": "use cluster.env",
    "export-file": "use cluster.env",
    "gpus": _GPUS,
    "gpus-per-node": _GPUS,
    "gpus-per-socket": _GPUS,
    "gpus-per-task": _GPUS,
    "help": _OF_THE_CALL,
    "input": "the job reads no standard input; leave it out",
    "job-name": "use name",
    "mem": "use cluster.mem",
    "no-kill": "a job that outlives the node of its batch script has nobody to end it; leave it out",
    "no-requeue": "use resilience.continuation=none",
    "nodefile": "use cluster.nodelist",
    "nodelist": "use cluster.nodelist",
    "nodes": "use cluster.nodes",
    "ntasks": _ONE_AGENT,
    "ntasks-per-core": _ONE_AGENT,
    "ntasks-per-gpu": _ONE_AGENT,
    "ntasks-per-node": _ONE_AGENT,
    "ntasks-per-socket": _ONE_AGENT,
    "open-mode": _OUR_LOGS,
    "output": _OUR_LOGS,
    "parsable": _OF_THE_CALL,
    "partition": "use cluster.partition",
    "qos": "use cluster.qos",
    "quiet": _OF_THE_CALL,
    "requeue": "use resilience.continuation=requeue",
    "reservation": "use cluster.reservation",
    "signal": "use resilience.warning",
    "test-only": _OF_THE_CALL,
    "time": "use cluster.time",
    "usage": _OF_THE_CALL,
    "verbose": _OF_THE_CALL,
    "version": _OF_THE_CALL,
    "wait": "use `stoker launch --wait`",
    "wrap": _OF_THE_CALL,
}


def problem_with(option: str, value: str) -> str | None:
    """What is wrong with `cluster.sbatch.option=value`, or None. "", "true" and "false" switch an option without value.

    Returns:
        What was expected and what to do, to follow the field and its value.
    """
    if option not in OPTIONS:
        near = nearest(option.lstrip("-"), OPTIONS)
        return f"no long option of sbatch{f'; did you mean {near}?' if near else ' (they are written without dashes)'}"
    if option in OURS:
        return f"set by stoker; {OURS[option]}"
    is_switch = value.lower() in ("", "true", "false")
    if option in SWITCHES and not is_switch:
        return "takes no value; leave it empty"
    if option in WITH_VALUE and is_switch:
        return "needs a value"
    return None
