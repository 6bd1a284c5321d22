"""A launch held against a site: tables of what is refused, what is warned of, and what must not be said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from stoker.conf.schema import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    ContainerConfig,
    ContainerRuntime,
    Continuation,
    ResilienceConfig,
)
from stoker.launcher import lints
from stoker.launcher.lints import license_problems, lint
from stoker.launcher.site import Accounting, Association, Hardware, Inventory, Partition, Probe, Qos, Site
from stoker.launcher.slurm import Reply

MAIN = Partition("main", is_default=True, total_nodes=4, preempt_mode="REQUEUE", grace_time=120)
SHORT = Partition("short", max_time=3600, default_time=600, total_nodes=4, max_nodes=2, min_nodes=0)
BIG = Partition("big", total_nodes=4, min_nodes=3, max_cpus=16, max_memory=100_000)
ALL = ("main", "short", "big")
# Two kinds of nodes; only the first have the disk.
LARGE = Hardware(("n1", "n2", "n3"), ALL, 64, 500_000, 900_000, (("h100", 8),), ("ib", "rack1"))
SMALL = Hardware(("n4",), ALL, 32, 250_000, 0, (("a100", 4),), ("ib",))
SETTINGS = {
    "JobRequeue": "1", "PreemptMode": "REQUEUE", "PreemptType": "preempt/partition_prio", "KillWait": "30 sec",
    "AccountingStorageType": "accounting_storage/none", "NodeFeaturesPlugins": "(null)",
}  # fmt: skip
SITE = Site(SETTINGS, (MAIN, SHORT, BIG), {}, Inventory((LARGE, SMALL), None, False))


def problems(site: Site = SITE, which: Any = lambda _: None, **parts: Any) -> tuple[list[str], list[str]]:
    found = lint(Config(**parts), site, which)
    return found.errors, found.warnings


def errors(site: Site = SITE, **cluster: Any) -> list[str]:
    return problems(site, cluster=ClusterConfig(**cluster))[0]


@pytest.mark.parametrize(
    "cluster",
    [
        {"nodes": 4, "time": "1-00:00:00"},
        {"nodes": 2, "time": "60", "partition": "short"},
        {"nodes": 3, "gpus_per_node": 8, "gpu_type": "H100", "cpus_per_task": 64, "mem": "0"},
        {"nodes": 4, "gpus_per_node": 4},
        {"nodes": 4, "cpus_per_task": 32, "mem": "250000", "constraint": "ib"},
        {"nodes": 3, "tmp": "800G", "constraint": "ib&rack1", "exclude": "n4"},
        {"nodes": 4, "constraint": "rack1|ib"},
        {"nodes": 2, "constraint": "[rack1*1&ib*1]"},  # not judged
        {"nodes": 2, "nodelist": "n[1-2]"},
        {"nodes": 3, "partition": "short,big", "time": "UNLIMITED"},  # short would not, big does
        {"nodes": 4, "mem": "what", "time": "soon", "exclude": "n[", "tmp": "?"},  # conf's checks speak of these
    ],
)
def test_what_the_site_can_do_is_not_spoken_of(cluster: dict[str, Any]) -> None:
    assert problems(cluster=ClusterConfig(**cluster)) == ([], [])


@pytest.mark.parametrize(
    ("cluster", "error"),
    [
        ({"partition": "gpu"}, "cluster.partition=gpu: there is no partition gpu here; known: main, short, big"),
        ({"partition": "main,gpu"},
         "cluster.partition=main,gpu: there is no partition gpu here; known: main, short, big"),
        ({"nodes": 5}, "cluster.nodes=5: partition main has 4; ask for no more, or take another"),
        ({"nodes": 3, "partition": "short"},
         "cluster.nodes=3: partition short gives a job at most 2; ask for no more"),
        ({"nodes": 2, "partition": "big"}, "cluster.nodes=2: partition big gives a job at least 3; ask for as many"),
        ({"partition": "short", "time": "61"},
         "cluster.time=61: partition short allows at most 01:00:00; ask for no more"),
        ({"partition": "short", "time": "UNLIMITED"},
         "cluster.time=UNLIMITED: partition short allows at most 01:00:00; ask for no more"),
        ({"partition": "short", "time": "0"},
         "cluster.time=0: partition short allows at most 01:00:00; ask for no more"),
        ({"nodes": 3, "partition": "big", "cpus_per_task": 17},
         "cluster.cpus_per_task=17: partition big gives a job at most 16 CPUs of a node; ask for no more"),
        ({"nodes": 3, "partition": "big", "mem": "98G"},
         "cluster.mem=98G: partition big gives a job at most 100000M of a node"),
        ({"nodes": 3, "partition": "big", "mem": "0"},
         "cluster.mem=0: stands for all memory of a node, and partition big gives a job at most 100000M; ask for that"),
        ({"cpus_per_task": 65},
         "cluster.cpus_per_task=65: no node fits in partition main (3 with 64 CPUs, 1 with 32 CPUs); "
         "ask for less, or take another partition"),
        ({"nodes": 4, "cpus_per_task": 64},
         "cluster.cpus_per_task=64: only 3 nodes fit in partition main (3 with 64 CPUs, 1 with 32 CPUs); "
         "ask for less, or take another partition"),
        ({"gpus_per_node": 9},
         "cluster.gpus_per_node=9: no node fits in partition main (3 with 8 GPUs h100, 1 with 4 GPUs a100); "
         "ask for less, or take another partition"),
        ({"gpus_per_node": 1, "gpu_type": "v100"},
         "cluster.gpus_per_node=1 cluster.gpu_type=v100: no node fits in partition main (3 with 8 GPUs h100, 1 with 4 "
         "GPUs a100); ask for less, or take another partition"),
        ({"mem": "500001"},
         "cluster.mem=500001: no node fits in partition main (3 with 500000 MiB, 1 with 250000 MiB); "
         "ask for less, or take another partition"),
        ({"mem_per_cpu": "7813", "cpus_per_task": 64},
         "cluster.mem_per_cpu=7813 (500032 MiB in all): no node fits in partition main (3 with 500000 MiB, 1 with "
         "250000 MiB); ask for less, or take another partition"),
        ({"mem_per_gpu": "62501M", "gpus_per_node": 8},
         "cluster.mem_per_gpu=62501M (500008 MiB in all): no node fits in partition main (3 with 500000 MiB, 1 with "
         "250000 MiB); ask for less, or take another partition"),
        ({"nodes": 4, "tmp": "1000"},
         "cluster.tmp=1000: only 3 nodes fit in partition main (3 with 900000 MB of local disk, 1 with 0 MB of local "
         "disk); ask for less, or take another partition"),
        ({"nodes": 4, "constraint": "rack1"},
         "cluster.constraint=rack1: only 3 nodes fit in partition main (the features ib, rack1); "
         "ask for less, or take another partition"),
        ({"nodes": 3, "exclude": "n[1,2]"},
         "cluster.exclude=n[1,2]: leaves 2 nodes of partition main, less than cluster.nodes=3; exclude fewer"),
        ({"nodes": 3, "gpus_per_node": 8, "exclude": "n1"},
         "cluster.gpus_per_node=8: only 2 nodes fit in partition main (3 with 8 GPUs h100, 1 with 4 GPUs a100); "
         "ask for less, or take another partition"),
        ({"nodelist": "n4", "cpus_per_task": 64},
         "cluster.cpus_per_task=64: n4 of cluster.nodelist=n4 does not fit (1 with 32 CPUs)"),
        ({"exclude": "n[4-5]"},
         "cluster.exclude=n[4-5]: there is no node n5 here; `sinfo -N` lists them"),
    ],
)  # fmt: skip
def test_what_slurm_would_refuse_is_one_error(cluster: dict[str, Any], error: str) -> None:
    assert errors(**cluster) == [error]


def test_a_feature_that_no_node_has() -> None:
    error = "cluster.constraint=ib&nvme: no node has the feature nvme; there are: ib, rack1"
    assert error in errors(constraint="ib&nvme")
    assert error.replace("ib&nvme", "ib&nvme|rack1") in errors(constraint="ib&nvme|rack1")
    # Where nodes get their features at boot, those of now are not all.
    changing = replace(SITE, settings=SETTINGS | {"NodeFeaturesPlugins": "node_features/helpers"})
    assert error not in errors(changing, constraint="ib&nvme")


def test_a_named_node_outside_of_the_partition() -> None:
    site = replace(SITE, inventory=replace(SITE.inventory, hardware=(LARGE, replace(SMALL, partitions=("other",)))))
    site = replace(site, partitions=(replace(MAIN, total_nodes=3), Partition("other", total_nodes=1)))
    assert errors(site, nodelist="n4") == [
        "cluster.nodelist=n4: n4 is not in partition main; name others, or another partition"
    ]


def test_two_needs_that_no_node_has_together() -> None:
    assert errors(nodes=2, constraint="ib", gpus_per_node=4, gpu_type="a100", cpus_per_task=32) == [
        "cluster.gpus_per_node=4 cluster.gpu_type=a100: only 1 node fits in partition main (3 with 8 GPUs h100, 1 with "
        "4 GPUs a100); ask for less, or take another partition"
    ]
    assert errors(nodes=1, gpus_per_node=4, gpu_type="a100", tmp="1") == [
        "cluster.gpus_per_node=4 cluster.gpu_type=a100 cluster.tmp=1: no node of partition main has all of it; "
        "ask for less, or take another partition"
    ]


def test_nodes_that_cannot_be_seen_are_not_judged() -> None:
    """Powered down in a cloud, or hidden by PrivateData."""
    cloud = replace(SITE, inventory=replace(SITE.inventory, hardware=(LARGE,)))
    hidden = replace(SITE, inventory=replace(SITE.inventory, hardware=()))
    asked = {"nodes": 4, "gpus_per_node": 99, "cpus_per_task": 999, "constraint": "x", "nodelist": "n9"}
    assert errors(cloud, **asked) == errors(hidden, **asked) == []


@pytest.mark.parametrize("state", ["DRAIN", "INACTIVE"])
def test_a_partition_that_takes_no_jobs(state: str) -> None:
    site = replace(SITE, partitions=(replace(MAIN, state=state), SHORT, BIG))
    assert errors(site, partition="main") == [
        f"cluster.partition=main: partition main is set to {state} and takes no jobs; take one that is up "
        "(short, big), or wait until it is"
    ]


def test_a_partition_that_is_down_makes_wait() -> None:
    site = replace(SITE, partitions=(replace(MAIN, state="DOWN"), SHORT, BIG))
    expected = ["cluster.partition=main: partition main is down; jobs wait until it is up"]
    assert problems(site, cluster=ClusterConfig(partition="main")) == ([], expected)
    assert problems(site, cluster=ClusterConfig(partition="main,big")) == ([], [])


def test_an_empty_name_in_a_list_of_partitions_is_left_to_the_rules_of_the_field() -> None:
    assert errors(partition="main,") == []


def test_no_default_partition_and_a_hidden_one_that_is_known_all_the_same() -> None:
    site = replace(SITE, partitions=(SHORT, replace(BIG, is_hidden=True)))
    assert errors(site) == ["cluster.partition=null: this Slurm has no default partition; choose one of short"]
    assert errors(site, partition="big", nodes=3) == []


def test_a_partition_for_reservations_only() -> None:
    site = replace(SITE, partitions=(replace(MAIN, needs_reservation=True),))
    assert errors(site) == ["cluster.reservation=null: partition main takes only jobs with a reservation; name yours"]
    assert errors(site, reservation="mine") == []


def test_too_few_nodes_in_service_make_wait() -> None:
    site = replace(SITE, out_of_service={"n2": ("drained", "ECC errors: GPU 3"), "n4": ("down*", "none")})
    _, warnings = problems(site, cluster=ClusterConfig(nodes=3, gpus_per_node=8))
    assert warnings == [
        "cluster.nodes=3: 2 of the nodes that fit are in service now; the job waits for the others "
        "(n2 drained: ECC errors: GPU 3)"
    ]
    assert problems(site, cluster=ClusterConfig(nodes=2, gpus_per_node=8)) == ([], [])
    _, warnings = problems(site, cluster=ClusterConfig(nodes=1, nodelist="n4"))
    assert warnings == ["cluster.nodelist=n4: the job waits for nodes out of service (n4 down*)"]


def test_default_time_too_short_for_the_warning() -> None:
    found, _ = problems(cluster=ClusterConfig(partition="short"), resilience=ResilienceConfig(warning=570))
    assert found == [
        "cluster.time=null: the partition's default is 00:10:00, and the warning may come 600 s before that "
        "(resilience.warning), so before the run starts; ask for more time"
    ]


ENFORCED = SETTINGS | {
    "AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageEnforce": "associations,limits,qos"
}  # fmt: skip
QOS = (
    Qos("normal"),
    Qos("short", max_time=1800, max_tres=(("node", 2), ("gres/gpu", 12))),
    Qos("wide", max_tres_user=(("cpu", 100),), group_tres=(("mem", 1000),)),
    Qos("free", flags=("PartitionTimeLimit", "PartitionMaxNodes", "OverPartQOS")),
    Qos("lone", max_submit_user=1),
    Qos("taken"),
)
MINE = (Association("acct", qos=("normal", "short", "wide", "free", "lone"), max_submit=1), Association("root"))
BANK = replace(SITE, settings=ENFORCED, inventory=replace(SITE.inventory, accounting=Accounting(QOS, MINE)))


@pytest.mark.parametrize(
    ("cluster", "error"),
    [
        ({"account": "nope"}, "cluster.account=nope: you may not charge it; yours: acct, root"),
        ({"qos": "vip"},
         "cluster.qos=vip: there is no such QOS here; known: normal, short, wide, free, lone, taken"),
        ({"account": "acct", "qos": "taken"},
         "cluster.qos=taken: you may not use it; yours: normal, short, wide, free, lone"),
        ({"qos": "short", "time": "31"}, "cluster.time=31: QOS short allows at most 00:30:00; ask for no more"),
        ({"qos": "short", "nodes": 3},
         "cluster.nodes=3: that is node=3 in all, and QOS short gives a job 2; ask for less"),
        ({"qos": "short", "nodes": 2, "gpus_per_node": 8},
         "cluster.gpus_per_node=8: that is gres/gpu=16 in all, and QOS short gives a job 12; ask for less"),
        ({"qos": "wide", "nodes": 4, "cpus_per_task": 26},
         "cluster.cpus_per_task=26: that is cpu=104 in all, and QOS wide gives a user 100; ask for less"),
        ({"qos": "wide", "nodes": 2, "mem": "501M"},
         "cluster.mem=501M: that is mem=1002 in all, and QOS wide gives all jobs together 1000; ask for less"),
    ],
)  # fmt: skip
def test_what_the_accounts_do_not_allow_is_one_error(cluster: dict[str, Any], error: str) -> None:
    assert errors(BANK, **cluster) == [error]


def test_a_qos_may_lift_a_partitions_limits() -> None:
    assert errors(BANK, partition="short", qos="free", nodes=3, time="2:00:00") == []
    assert len(errors(BANK, partition="short", qos="normal", nodes=3, time="2:00:00")) == 2
    assert len(errors(BANK, partition="short", nodes=3, time="2:00:00")) == 2
    # It may be the one that a job gets without asking: an association's default, or its only one.
    for association in (Association("acct", default_qos="free"), Association("acct", qos=("free",))):
        mine = replace(BANK, inventory=replace(BANK.inventory, accounting=Accounting(QOS, (association,))))
        assert errors(mine, partition="short", nodes=3, time="2:00:00") == []
    unread = replace(BANK, inventory=replace(BANK.inventory, accounting=None))
    assert errors(unread, partition="short", qos="free", nodes=3, time="2:00:00") == []


def test_a_partitions_own_qos_goes_before_the_jobs() -> None:
    site = replace(BANK, partitions=(replace(MAIN, qos="short"), SHORT, BIG))
    assert errors(site, qos="wide", time="31") == [
        "cluster.time=31: QOS short allows at most 00:30:00; ask for no more"
    ]
    assert errors(site, qos="free", time="31") == []


def test_limits_that_are_not_enforced_are_not_judged() -> None:
    loose = replace(BANK, settings=ENFORCED | {"AccountingStorageEnforce": "none"})
    assert errors(loose, account="nope", qos="short", nodes=4, time="40") == []


def test_an_account_that_a_partition_does_not_take_is_warned_of() -> None:
    site = replace(SITE, partitions=(replace(MAIN, allow_accounts=("zzz",)),), settings=ENFORCED)
    assert problems(site, cluster=ClusterConfig(account="acct")) == (
        [],
        [
            "cluster.account=acct: partition main takes only zzz; if yours is not below one of them, "
            "the job waits for ever"
        ],
    )


@pytest.mark.parametrize(("allowed", "denied"), [(("vip",), ()), (None, ("normal",))])
def test_a_qos_that_a_partition_does_not_take(allowed: Any, denied: Any) -> None:
    site = replace(SITE, partitions=(replace(MAIN, allow_qos=allowed, deny_qos=denied),), settings=ENFORCED)
    (error,) = errors(site, qos="normal")
    assert error.startswith("cluster.qos=normal: partition main ")
    assert errors(site, qos="vip") == []


def test_accounts_without_accounting_have_no_effect() -> None:
    assert problems(cluster=ClusterConfig(account="mine")) == (
        [],
        ["cluster.account=mine: no effect, this Slurm has no accounts"],
    )


URGENT = Partition("urgent", total_nodes=4, tier=100, preempt_mode="OFF")


def preempted(partition: Partition, continuation: Continuation = Continuation.requeue, **settings: str) -> list[str]:
    site = replace(SITE, partitions=(partition, URGENT), settings=SETTINGS | settings)
    site = replace(site, inventory=Inventory())
    resilience = ResilienceConfig(continuation=continuation)
    return problems(site, resilience=resilience, checkpoint=CheckpointConfig(interval=500))[1]


def test_preemption_that_cancels_is_warned_of() -> None:
    cancelling = replace(MAIN, preempt_mode="CANCEL")
    assert preempted(cancelling) == [
        "partition main has PreemptMode=CANCEL: a preempted job is cancelled there, not requeued; "
        "resilience.continuation=chain goes on in a second job (or `stoker resume`, by hand)"
    ]
    assert preempted(cancelling, Continuation.chain) == []


def test_grace_too_short_to_save_is_warned_of() -> None:
    assert preempted(replace(MAIN, grace_time=0)) == [
        "partition main has GraceTime=0 and KillWait=30: a preempted run is killed after 30 s, which may be too short "
        "to save; up to checkpoint.interval=500 steps are lost then"
    ]
    assert preempted(replace(MAIN, grace_time=60)) == []


def test_nothing_is_said_of_preemption_where_there_is_none() -> None:
    bad = replace(MAIN, preempt_mode="CANCEL", grace_time=0)
    assert preempted(bad, PreemptType="preempt/none") == []
    assert preempted(replace(bad, tier=100)) == []  # nothing stands above it
    assert preempted(replace(bad, preempt_mode="OFF")) == []


def test_suspension_is_told() -> None:
    assert preempted(replace(MAIN, preempt_mode="GANG,SUSPEND")) == [
        "partition main has PreemptMode=GANG,SUSPEND: a preempted run is stopped where it stands, and goes on later"
    ]


def test_preemption_between_qos() -> None:
    qos = (Qos("low", grace_time=20, preempt_mode="cancel"), Qos("high", preempts=("low",)))
    site = replace(
        SITE, settings=ENFORCED | {"PreemptType": "preempt/qos"}, inventory=Inventory((), Accounting(qos, ()), None)
    )
    _, warnings = problems(site, cluster=ClusterConfig(qos="low"))
    assert [w.partition(":")[0] for w in warnings] == [
        "QOS low has PreemptMode=CANCEL",
        "QOS low has GraceTime=20 and KillWait=30",
    ]
    assert problems(site, cluster=ClusterConfig(qos="high")) == ([], [])


def test_site_without_requeue_is_warned_of_unless_it_does_not_matter() -> None:
    site = replace(SITE, settings=SETTINGS | {"JobRequeue": "0"})
    (warning,) = problems(site)[1]
    assert warning.startswith("this Slurm has JobRequeue=0: jobs are not requeued unless they ask for it")
    assert problems(site, resilience=ResilienceConfig(continuation=Continuation.none)) == ([], [])


@pytest.mark.parametrize(
    ("name", "codes", "expected"),
    [
        ("RequeueExit", "1-255", ["RequeueExit=1-255: a run that has failed (exit code 1) starts again by itself"]),
        ("RequeueExitHold", "2", ["RequeueExitHold=2: a run that has failed (exit code 2) is held in the queue"]),
        ("RequeueExit", "75,100-120", []),
        ("RequeueExit", "(null)", []),
    ],
)
def test_sites_that_requeue_by_exit_code_are_warned_of(name: str, codes: str, expected: list[str]) -> None:
    _, warnings = problems(replace(SITE, settings=SETTINGS | {name: codes}))
    assert warnings == [f"this Slurm has {line}; `stoker cancel` ends it" for line in expected]


@pytest.mark.parametrize(("cluster", "where"), [({"qos": "lone"}, "QOS lone"), ({"account": "acct"}, "account acct")])
def test_a_chain_needs_two_jobs(cluster: dict[str, Any], where: str) -> None:
    chain = ResilienceConfig(continuation=Continuation.chain)
    assert problems(BANK, cluster=ClusterConfig(**cluster), resilience=chain)[1] == [
        f"resilience.continuation=chain: keeps a second job waiting, and {where} lets you have 1 at a time "
        "(MaxSubmitJobs); requeue needs only one"
    ]
    assert problems(BANK, cluster=ClusterConfig(**cluster)) == ([], [])


def test_containers_that_are_not_here_are_warned_of() -> None:
    def said(runtime: ContainerRuntime, which: Any = lambda _: None, **cluster: Any) -> list[str]:
        return problems(SITE, which, container=ContainerConfig(runtime=runtime), cluster=ClusterConfig(**cluster))[1]

    assert [w.partition(":")[0] for w in said(ContainerRuntime.pyxis)] == ["container.runtime=pyxis"]
    assert [w.partition(":")[0] for w in said(ContainerRuntime.apptainer)] == ["container.runtime=apptainer"]
    assert said(ContainerRuntime.apptainer, lambda name: name == "singularity" and "/usr/bin/singularity") == []
    assert said(ContainerRuntime.apptainer, modules=["apptainer"]) == []


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("matlab:2,ansys", []),
        ("matlab:3", ["cluster.licenses=matlab:3: there are 2 of matlab in all; ask for no more"]),
        ("foo", ["cluster.licenses=foo: there is no license foo here; known: matlab, ansys"]),
        ("matlab:9|ansys", []),  # a choice: not judged
    ],
)
def test_licenses(wanted: str, expected: list[str]) -> None:
    assert license_problems(wanted, {"matlab": 2, "ansys": 1}) == expected


def test_each_reservation_of_a_list_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def reservation(name: str) -> Reply:
        return Reply(0, "", "") if name in ("res1", "res2") else Reply(1, "", f"Reservation {name} not found")

    monkeypatch.setattr(lints.slurm, "is_available", lambda: True)
    monkeypatch.setattr(lints.site_ask, "ask", lambda: SITE)
    monkeypatch.setattr(lints.site_ask, "reservation", reservation)
    assert lints.live(Config(cluster=ClusterConfig(reservation="res1,res2", time="20"))).errors == []
    assert lints.live(Config(cluster=ClusterConfig(reservation="res1, nope", time="20"))).errors == [
        "cluster.reservation=res1, nope: there is no reservation nope; `scontrol show reservation` lists them"
    ]


@pytest.mark.parametrize(
    ("continuation", "runtime", "commands", "warned"),
    [
        (
            "requeue",
            "none",
            ("sbatch",),
            ["resilience.continuation=requeue: there is no scontrol on n2 of partition m"],
        ),
        ("chain", "none", ("scontrol",), ["resilience.continuation=chain: there is no sbatch on n2 of partition main"]),
        ("none", "none", (), []),
        ("requeue", "none", ("scontrol",), []),
        ("none", "apptainer", ("scontrol",), ["container.runtime=apptainer: there is neither apptainer nor singular"]),
        ("none", "apptainer", ("singularity",), []),
    ],
)
def test_what_a_probe_did_not_see_on_the_nodes_is_warned_of(
    continuation: str, runtime: str, commands: tuple[str, ...], warned: list[str]
) -> None:
    def said(partition: str) -> list[str]:
        site = replace(SITE, probes={"main": Probe("n2", commands)})
        parts = {
            "resilience": ResilienceConfig(continuation=Continuation(continuation)),
            "container": ContainerConfig(runtime=ContainerRuntime(runtime)),
            "cluster": ClusterConfig(partition=partition, time="30:00"),
        }
        return [w for w in problems(site, lambda name: f"/usr/bin/{name}", **parts)[1] if " on n2 of " in w]

    assert [w[: len(start)] for w, start in zip(said("main"), warned, strict=True)] == warned
    assert said("short") == []  # nobody looked there
