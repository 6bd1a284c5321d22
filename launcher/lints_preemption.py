"""What is said before a launch about preemption, requeue and chains: where the run may not go on as hoped.

Owns: those warnings. None of them stops a launch. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..conf.schema import Config, Continuation
from .run.outcome import EXIT_FAILED, EXIT_USAGE
from .site import Partition, Qos, Site, number_of_seconds

SHORT_GRACE = 60  # seconds; less may be too short for a checkpoint (conf's checks say the same of resilience.warning)


def warnings(config: Config, chosen: Sequence[Partition], site: Site) -> list[str]:
    return [
        *_preemption(config, chosen, site),
        *_requeue(config, site),
        *_requeue_by_exit_code(site),
        *_chain(config, chosen, site),
    ]


def _preemption(config: Config, chosen: Sequence[Partition], site: Site) -> Iterator[str]:
    for partition in chosen:
        found = preemption(partition, config.cluster.qos, site)
        if found is None:
            continue
        mode, grace, where = found
        if "SUSPEND" in mode:
            yield f"{where} has PreemptMode={mode}: a preempted run is stopped where it stands, and goes on later"
        elif "CANCEL" in mode and config.resilience.continuation is Continuation.requeue:
            yield (
                f"{where} has PreemptMode={mode}: a preempted job is cancelled there, not requeued; "
                "resilience.continuation=chain goes on in a second job (or `stoker resume`, by hand)"
            )
        if ("CANCEL" in mode or "REQUEUE" in mode) and grace < SHORT_GRACE:
            wait = number_of_seconds(site.settings.get("KillWait", "")) or 0
            interval = config.checkpoint.interval
            lost = f"checkpoint.interval={interval} steps" if interval else "the whole run (checkpoint.interval=0)"
            yield (
                f"{where} has GraceTime={grace} and KillWait={wait}: a preempted run is killed after "
                f"{grace + wait} s, which may be too short to save; up to {lost} are lost then"
            )


def preemption(partition: Partition, qos: str | None, site: Site) -> tuple[str, int, str] | None:
    """(mode, seconds of grace, whose they are) of a job there, or None if it is not preempted, as far as is visible."""
    kind = site.settings.get("PreemptType", "").rpartition("/")[2]
    default = site.settings.get("PreemptMode", "").upper()
    if kind == "partition_prio":
        higher = any(p.tier > partition.tier and p.state == "UP" for p in site.partitions)
        mode = (partition.preempt_mode or default).upper()
        return (mode, partition.grace_time, f"partition {partition.name}") if higher and mode != "OFF" else None
    if kind == "qos" and site.inventory.accounting is not None:
        known = site.inventory.accounting.qos
        own = next((q for q in known if q.name == (partition.qos or qos)), None)
        if own is not None and any(own.name in q.preempts for q in known):
            return _of_qos(own, default), own.grace_time, f"QOS {own.name}"
    return None


def _of_qos(qos: Qos, default: str) -> str:
    mode = qos.preempt_mode.upper()
    return default if mode in ("", "CLUSTER") else mode


def _requeue(config: Config, site: Site) -> Iterator[str]:
    if config.resilience.continuation is Continuation.requeue and site.settings.get("JobRequeue") == "0":
        yield (
            "this Slurm has JobRequeue=0: jobs are not requeued unless they ask for it, as this one does; "
            "if the site forbids it all the same, resilience.continuation=chain goes on in a second job"
        )


def _requeue_by_exit_code(site: Site) -> Iterator[str]:
    """Sites may have Slurm requeue, or hold, jobs that end with certain codes, of which ours mean something else."""
    for name, what in (("RequeueExit", "starts again by itself"), ("RequeueExitHold", "is held in the queue")):
        codes = [code for code in (EXIT_FAILED, EXIT_USAGE) if _holds(site.settings.get(name, ""), code)]
        if codes:
            yield (
                f"this Slurm has {name}={site.settings[name]}: a run that has failed (exit code {codes[0]}) {what}; "
                "`stoker cancel` ends it"
            )


def _holds(listed: str, code: int) -> bool:
    """Whether `1,3-5` holds a number."""
    ranges = (part.partition("-") for part in listed.split(",") if part[:1].isdigit())
    return any(low.isdigit() and int(low) <= code <= int(high if high.isdigit() else low) for low, _, high in ranges)


def _chain(config: Config, chosen: Sequence[Partition], site: Site) -> Iterator[str]:
    """A chain has two jobs at once: one that runs, one that waits for its end."""
    accounting = site.inventory.accounting
    if config.resilience.continuation is not Continuation.chain or accounting is None or not site.enforces("limits"):
        return
    names = {config.cluster.qos, *(p.qos for p in chosen)}
    limits = [(f"QOS {q.name}", q.max_submit_user) for q in accounting.qos if q.name in names]
    if config.cluster.account:
        own = [a for a in accounting.associations if a.account == config.cluster.account.lower()]
        limits += [(f"account {a.account}", a.max_submit) for a in own]
    for where, limit in limits:
        if limit is not None and limit < 2:
            yield (
                f"resilience.continuation=chain: keeps a second job waiting, and {where} lets you have {limit} at a "
                "time (MaxSubmitJobs); requeue needs only one"
            )
