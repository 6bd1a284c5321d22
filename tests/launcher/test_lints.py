"""A launch held against the live Slurm."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stoker.conf.schema import ClusterConfig, Config, Continuation, ResilienceConfig
from stoker.launcher.lints import lint
from stoker.launcher.site import Partition

MAIN = Partition("main", True, True, None, None, 4, None, "REQUEUE")
SHORT = Partition("short", False, True, 3600, 600, 4, 2, "REQUEUE")
SITE = {"JobRequeue": "1", "PreemptMode": "REQUEUE"}


def problems(
    cluster: ClusterConfig,
    partitions: tuple[Partition, ...] = (MAIN, SHORT),
    settings: dict[str, str] = SITE,
    resilience: ResilienceConfig | None = None,
) -> tuple[list[str], list[str]]:
    found = lint(Config(cluster=cluster, resilience=resilience or ResilienceConfig()), partitions, settings)
    return found.errors, found.warnings


def test_nothing_to_say() -> None:
    assert problems(ClusterConfig(nodes=4, time="1-00:00:00")) == ([], [])
    assert problems(ClusterConfig(nodes=2, time="60", partition="short")) == ([], [])


def test_unknown_partition_lists_the_known() -> None:
    expected = "cluster.partition=gpu: there is no partition gpu here; known: main, short"
    assert problems(ClusterConfig(partition="gpu")) == ([expected], [])


def test_one_of_several_partitions_is_unknown() -> None:
    errors, _ = problems(ClusterConfig(partition="main,gpu"))
    assert errors == ["cluster.partition=main,gpu: there is no partition gpu here; known: main, short"]


def test_no_default_partition() -> None:
    errors, _ = problems(ClusterConfig(), partitions=(SHORT,))
    assert errors == ["cluster.partition=null: this Slurm has no default partition; choose one of short"]


def test_partition_that_is_down() -> None:
    _, warnings = problems(ClusterConfig(partition="main"), partitions=(replace(MAIN, is_up=False),))
    assert warnings == ["cluster.partition=main: partition main is not up; the job will wait"]


@pytest.mark.parametrize(("partition", "nodes", "limit"), [("main", 5, "main 4"), ("short", 3, "short 2")])
def test_more_nodes_than_a_job_can_get(partition: str, nodes: int, limit: str) -> None:
    errors, _ = problems(ClusterConfig(partition=partition, nodes=nodes))
    assert errors == [f"cluster.nodes={nodes}: more than a job can get here ({limit} nodes)"]


@pytest.mark.parametrize("time", ["61", "1:00:01", "UNLIMITED", "2-0"])
def test_longer_than_the_partition_allows(time: str) -> None:
    errors, _ = problems(ClusterConfig(partition="short", time=time))
    assert errors == [f"cluster.time={time}: more than short allows (01:00:00)"]


def test_default_time_too_short_for_the_warning() -> None:
    errors, _ = problems(ClusterConfig(partition="short"), resilience=ResilienceConfig(warning=570))
    assert errors == [
        "cluster.time=null: the partition's default is 00:10:00, and the warning may come 600 s before that "
        "(resilience.warning), so before the run starts; ask for more time"
    ]


def test_preemption_that_cancels_is_warned_of() -> None:
    _, warnings = problems(ClusterConfig(), partitions=(replace(MAIN, preempt_mode="CANCEL"),))
    assert len(warnings) == 1
    assert warnings[0].startswith("partition main has PreemptMode=CANCEL: a preempted job is cancelled there")


def test_site_without_requeue_is_warned_of_unless_it_does_not_matter() -> None:
    site = SITE | {"JobRequeue": "0"}
    _, warnings = problems(ClusterConfig(), settings=site)
    assert len(warnings) == 1
    assert "JobRequeue=0" in warnings[0]
    never = ResilienceConfig(continuation=Continuation.none)
    assert problems(ClusterConfig(), settings=site, resilience=never) == ([], [])
