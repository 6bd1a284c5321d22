"""The supervisor's decisions about nodes and about what follows: who is blamed, what waits, how a chain goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stoker.launcher import policy_types as p
from stoker.launcher.run.heartbeat import Phase
from stoker.launcher.run.outcome import Cause, Next
from stoker.launcher.supervise import _urgency

from .test_policy import SETTINGS, Scene, warned

CHAIN = replace(SETTINGS, is_chain=True)
THREE = replace(SETTINGS, nodes=3, names=("n1", "n2", "n3"))


def blames(actions: list[p.Action]) -> list[tuple[str, Cause, bool]]:
    return [(a.node, a.cause, a.is_own) for a in actions if isinstance(a, p.Blame)]


def test_a_node_whose_agent_fails_at_start_is_blamed_once_the_others_are_up() -> None:
    s = Scene(THREE)
    s.feed(p.AgentJoined("n1", "a"), p.AgentReady("n1"), p.AgentJoined("n3", "c"))
    assert s.feed(p.AgentFailed("n2", "Exited with exit code 127")) == []  # n3 may be about to fail, too
    actions = s.feed(p.AgentReady("n3"))
    assert blames(actions) == [("n2", Cause.LAUNCH_FAILED, False)]
    finish = s.finish(actions)
    assert (finish.outcome.cause, finish.outcome.next, finish.outcome.node, finish.ask) == (
        Cause.LAUNCH_FAILED, Next.REQUEUE, "n2", True,
    )  # fmt: skip
    assert finish.outcome.reason == "no agent on n2 (Exited with exit code 127); the other 2 came up"


def test_a_zygote_that_cannot_start_is_its_node_s_fault_if_others_start() -> None:
    s = Scene()
    s.feed(p.AgentJoined("n1", "a"), p.AgentJoined("n2", "b"), p.AgentReady("n1"))
    actions = s.feed(p.AgentLost("n2", "end of stream", is_closed=True))
    assert blames(actions) == [("n2", Cause.LAUNCH_FAILED, False)]


def test_when_no_agent_comes_up_no_node_is_to_blame() -> None:
    s = Scene()
    assert s.feed(p.AgentFailed("n1", "x"), p.AgentFailed("n2", "x")) == []
    actions = s.feed(p.LaunchEnded(1))
    assert blames(actions) == []
    assert s.finish(actions).outcome.next is Next.REQUEUE


def test_a_launch_that_slurm_gives_up_blames_the_node_that_it_names() -> None:
    s = Scene()
    s.feed(p.AgentFailed("n2", "Communication connection failure"))
    assert blames(s.feed(p.LaunchEnded(1))) == [("n2", Cause.LAUNCH_FAILED, False)]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_node_that_srun_cannot_reach_is_to_blame_and_not_those_that_it_kills_for_it(is_first: bool) -> None:
    s = Scene(THREE)
    s.feed(p.AgentJoined("n1", "a"))
    unreached = p.AgentFailed("n2", "Communication connection failure", is_end_of_all=True)
    killed = [p.AgentLost("n1", "end of stream", is_closed=True), p.AgentFailed("n3", "Killed")]
    assert s.feed(*([unreached, *killed] if is_first else [*killed, unreached])) == []
    actions = s.feed(p.LaunchEnded(233))
    assert blames(actions) == [("n2", Cause.LAUNCH_FAILED, False)]
    outcome = s.finish(actions).outcome
    assert (outcome.cause, outcome.next, outcome.node) == (Cause.LAUNCH_FAILED, Next.REQUEUE, "n2")


def test_a_node_whose_agent_srun_kills_for_another_is_not_blamed_while_a_third_is_still_up() -> None:
    s = Scene(THREE)
    s.feed(*(event for n in ("n1", "n3") for event in (p.AgentJoined(n, "a"), p.AgentReady(n))))
    assert s.feed(p.AgentLost("n3", "end of stream", is_closed=True)) == []
    actions = s.feed(p.AgentFailed("n2", "Communication connection failure", is_end_of_all=True))
    assert blames(actions) == [("n2", Cause.LAUNCH_FAILED, False)]
    assert s.finish(actions).outcome.reason == "no agent on n2 (Communication connection failure); the other 1 came up"


def test_when_srun_can_reach_no_node_none_is_to_blame() -> None:
    s = Scene()
    s.feed(*(p.AgentFailed(n, "Communication connection failure", is_end_of_all=True) for n in ("n1", "n2")))
    assert blames(s.feed(p.LaunchEnded(233))) == []


def slow_start(nodes: int, *ready: int) -> list[tuple[str, Cause, bool]]:
    """Who is blamed for the nodes that are not ready in time."""
    s = Scene(replace(SETTINGS, nodes=nodes, names=tuple(f"n{i}" for i in range(1, nodes + 1))))
    for i in range(1, nodes):  # the last one does not even join
        s.feed(p.AgentJoined(f"n{i}", "a"))
    s.feed(*(p.AgentReady(f"n{i}") for i in ready))
    return blames(s.feed(p.Tick(), at=901.0))


def test_a_few_nodes_that_are_not_ready_in_time_are_blamed_by_name() -> None:
    assert slow_start(2, 1) == [("n2", Cause.LAUNCH_FAILED, False)]
    assert slow_start(3, 1, 2) == [("n3", Cause.LAUNCH_FAILED, False)]
    assert slow_start(8, 1, 2, 3, 4, 5, 6) == [("n7", Cause.LAUNCH_FAILED, False), ("n8", Cause.LAUNCH_FAILED, False)]


def test_where_many_are_not_ready_in_time_no_node_is_to_blame() -> None:
    assert slow_start(3, 1) == []
    assert slow_start(8, 1, 2, 3, 4, 5) == []
    assert slow_start(64, 1) == []
    assert slow_start(3) == []


def test_among_many_slow_ones_a_node_that_failed_is_to_blame() -> None:
    s = Scene(replace(SETTINGS, nodes=4, names=("n1", "n2", "n3", "n4")))
    s.feed(p.AgentJoined("n1", "a"), p.AgentReady("n1"), p.AgentFailed("n4", "Exited with exit code 127"))
    assert blames(s.feed(p.Tick(), at=901.0)) == [("n4", Cause.LAUNCH_FAILED, False)]


def test_an_agent_that_joins_after_all_is_not_held_against_its_node() -> None:
    s = Scene()
    s.feed(p.AgentFailed("n2", "x"), p.AgentJoined("n2", "b"), p.AgentJoined("n1", "a"), p.StoreUp("a", 1))
    assert s.feed(p.AgentReady("n1"), p.AgentReady("n2")) == [p.Form(1, {"n1": 0, "n2": 1}, ("a", 1))]


def test_a_store_that_does_not_come_is_asked_of_another_node_once() -> None:
    s = Scene()
    s.feed(p.AgentJoined("n1", "a"), p.AgentJoined("n2", "b"), p.AgentReady("n1"), p.AgentReady("n2"))
    assert s.feed(p.Tick(), at=1.0) == []
    assert s.feed(p.Tick(), at=30.0) == []
    assert s.feed(p.Tick(), p.Tick(), at=31.5) == [p.StartStore("n2")]
    assert s.feed(p.Tick(), at=100.0) == []
    assert s.feed(p.StoreUp("b", 9)) == [p.Form(1, {"n2": 0, "n1": 1}, ("b", 9))]


def test_workers_that_do_not_die_are_their_nodes_fault() -> None:
    s = Scene().running(step=7)
    s.feed(s.exited(0, None, "SIGKILL"))
    actions = s.feed(p.Tick(), at=61.0)
    assert blames(actions) == [("n2", Cause.HARDWARE_FAULT, False)]
    assert s.finish(actions).outcome.cause is Cause.HARDWARE_FAULT


def crash_at_start(s: Scene, rank: int) -> list[p.Action]:
    other = 1 - rank
    s.feed(*(s.status(r, 0, Phase.START, median=0.0) for r in (0, 1)))
    return s.feed(s.exited(rank, None, "SIGSEGV"), s.exited(other, None, "SIGKILL"))


def test_crashes_at_start_always_on_one_node_have_this_run_go_on_without_it() -> None:
    s = Scene().form()
    for _ in range(3):
        assert not [a for a in crash_at_start(s, 1) if isinstance(a, p.Finish)]
    actions = crash_at_start(s, 1)
    assert blames(actions) == [("n2", Cause.CRASH, True)]
    outcome = s.finish(actions).outcome
    assert (outcome.cause, outcome.next, outcome.rank, outcome.node) == (Cause.CRASH, Next.REQUEUE, 1, "n2")


@pytest.mark.parametrize("ranks", [(1, 1, 0, 1), (0, 0, 0, 1)])
def test_crashes_at_start_on_several_nodes_are_the_code_s(ranks: tuple[int, ...]) -> None:
    s = Scene().form()
    for rank in ranks:
        actions = crash_at_start(s, rank)
    assert blames(actions) == []
    assert s.finish(actions).outcome.next is Next.NOTHING


def test_a_silent_node_that_thaws_ends_the_wait_and_is_no_scancel() -> None:
    """The other agents are let go, so that srun ends with the thawed one's; its exit code may be anything."""
    s = Scene().running(step=7)
    assert s.feed(p.AgentLost("n2", "no word for 15 s")) == [p.KillWorkers(1), p.Release()]
    assert s.feed(p.AgentLost("n1", "end of stream", is_closed=True)) == []
    assert s.feed(p.LaunchEnded(137), at=30.0) == [p.AskSlurm()]
    actions = s.feed(p.SlurmSaid(p.JobFate.RUNNING))
    assert blames(actions) == [("n2", Cause.NODE_FAILURE, False)]
    finish = s.finish(actions)
    assert (finish.outcome.cause, finish.outcome.node, finish.ask) == (Cause.NODE_FAILURE, "n2", True)


def test_scancel_while_a_silent_node_is_waited_for_still_means_stop() -> None:
    s = Scene().running(step=7)
    s.feed(p.AgentLost("n2", "no word for 15 s"), p.LaunchEnded(137))
    actions = s.feed(p.SlurmSaid(p.JobFate.CANCELLED))
    assert (s.finish(actions).outcome.next, blames(actions)) == (Next.NOTHING, [])


@pytest.mark.parametrize(
    ("why", "down", "cause", "node"),
    [
        (None, ("n2",), Cause.NODE_FAILURE, "n2"),
        (Cause.NODE_FAILURE, (), Cause.NODE_FAILURE, None),
        (Cause.PREEMPTED, ("n2",), Cause.NODE_FAILURE, "n2"),
        (Cause.PREEMPTED, (), Cause.PREEMPTED, None),
        (Cause.REQUEUED, (), Cause.REQUEUED, None),
        (None, (), Cause.REQUEUED, None),
    ],
)
def test_the_cause_of_a_requeue_by_slurm_is_what_it_shows(
    why: Cause | None, down: tuple[str, ...], cause: Cause, node: str | None
) -> None:
    s = Scene().running(step=7)
    finish = s.finish(s.feed(p.Terminated(p.JobFate.REQUEUED, "batch", why=why, down=down)))
    assert (finish.outcome.cause, finish.outcome.node, finish.outcome.next) == (cause, node, Next.REQUEUE)
    assert finish.ask is False


@pytest.mark.parametrize(
    ("fate", "cause"),
    [
        (p.JobFate.TIME_LIMIT, Cause.TIME_LIMIT),
        (p.JobFate.TAKEN, Cause.PREEMPTED),
        (p.JobFate.NODE_FAIL, Cause.NODE_FAILURE),
        (p.JobFate.ENDED, Cause.CRASH),
    ],
)
def test_what_slurm_ends_goes_on_in_the_chain(fate: p.JobFate, cause: Cause) -> None:
    finish = (s := Scene(CHAIN).running(step=7)).finish(s.feed(p.Terminated(fate, "batch")))
    assert (finish.outcome.cause, finish.outcome.next, finish.outcome.exit_code) == (cause, Next.CHAIN, 75)
    assert finish.ask is True


def test_without_a_chain_what_slurm_ends_for_good_stops_and_says_how_to_go_on() -> None:
    s = Scene().running(step=7)
    outcome = s.finish(s.feed(p.Terminated(p.JobFate.TAKEN, "batch"))).outcome
    assert (outcome.cause, outcome.next, outcome.exit_code) == (Cause.PREEMPTED, Next.NOTHING, 1)
    assert "`stoker resume` goes on" in outcome.reason


def test_scancel_ends_a_chain() -> None:
    s = Scene(CHAIN).running(step=7)
    assert s.finish(s.feed(p.Terminated(p.JobFate.CANCELLED, "batch"))).outcome.next is Next.NOTHING


def test_a_warned_stop_in_a_chain_leaves_the_rest_to_the_successor() -> None:
    s = Scene(CHAIN).running(step=7)
    s.feed(warned(1.0))
    finish = s.finish(s.feed(s.exited(0, None, "SIGKILL"), s.exited(1, None, "SIGKILL")))
    assert (finish.outcome.next, finish.ask) == (Next.CHAIN, True)


def test_a_node_that_was_given_up_and_is_ready_after_all_changes_nothing() -> None:
    s = Scene(THREE)
    s.feed(p.AgentJoined("n1", "a"), p.AgentJoined("n2", "b"), p.AgentFailed("n2", "Exited with exit code 1"))
    assert s.feed(p.AgentReady("n2")) == []
    assert s.state.failed == {"n2": "Exited with exit code 1"}


def test_workers_are_killed_and_forked_before_storage_is_written() -> None:
    actions: list[p.Action] = [
        p.Blame("n1", Cause.HARDWARE_FAULT, "x"), p.Note("x", {}), p.KillWorkers(1), p.AskSlurm(),
    ]  # fmt: skip
    assert sorted(actions, key=_urgency) == [actions[2], actions[3], actions[0], actions[1]]
