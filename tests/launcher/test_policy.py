"""The supervisor's decisions as a table: what happens -> what is done."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from stoker.launcher import policy_types as p
from stoker.launcher.policy import decide
from stoker.launcher.policy_trouble import culprit, hang_limit
from stoker.launcher.run.heartbeat import Phase, Save
from stoker.launcher.run.outcome import Cause, Next

SETTINGS = p.Settings(nodes=2, procs_per_node=1, can_requeue=True)


class Scene:
    """A state with a clock; `feed` returns the actions without notes."""

    def __init__(self, settings: p.Settings = SETTINGS) -> None:
        self.state = p.State(settings)
        self.now = 0.0
        self.notes: list[p.Note] = []

    def feed(self, *events: p.Event, at: float | None = None) -> list[p.Action]:
        self.now = self.now if at is None else at
        actions: list[p.Action] = []
        for event in events:
            self.state, new = decide(self.state, event, self.now)
            actions += new
        self.notes += [a for a in actions if isinstance(a, p.Note)]
        return [a for a in actions if not isinstance(a, p.Note)]

    def form(self) -> Scene:
        self.feed(p.AgentJoined("n1", "10.0.0.1"), p.AgentJoined("n2", "10.0.0.2"), p.StoreUp("10.0.0.1", 4000))
        self.feed(p.AgentReady("n1"), p.AgentReady("n2"))
        return self

    def running(self, step: int = 5, phase: Phase = Phase.STEP, age: float = 0.0) -> Scene:
        if not self.state.ranks:
            self.form()
        self.feed(*(self.status(r, step, phase, age=age) for r in self.state.ranks))
        return self

    def status(
        self, rank: int, step: int, phase: Phase = Phase.STEP, sequence: int = 0, age: float = 0.0, median: float = 0.1
    ) -> p.NodeStatus:
        return p.NodeStatus((p.RankStatus(self.state.generation, rank, step, phase, sequence, age, median),))

    def report(self, rank: int, event: str, **fields: object) -> p.RankReport:
        return p.RankReport(self.state.generation, rank, event, **fields)  # type: ignore[arg-type]

    def exited(self, rank: int, code: int | None = None, signal: str | None = None) -> p.RankExited:
        return p.RankExited(self.state.generation, rank, code, signal)

    def finish(self, actions: list[p.Action]) -> p.Finish:
        (last,) = [a for a in actions if isinstance(a, p.Finish)]
        return last


def test_workers_start_once_every_agent_and_the_store_are_ready() -> None:
    s = Scene()
    assert s.feed(p.AgentJoined("n10", "10.0.0.10"), p.AgentReady("n10")) == []
    assert s.feed(p.AgentJoined("n2", "127.0.1.1"), p.AgentReady("n2")) == [p.StartStore("n10")]
    assert s.feed(p.StoreUp("10.0.0.10", 4000)) == [p.Form(1, {"n10": 0, "n2": 1}, ("10.0.0.10", 4000))]


@pytest.mark.parametrize(
    ("by_topology", "order"), [(True, ["n2", "n1", "n3"]), (False, ["n1", "n2", "n3"])], ids=["topology", "name"]
)
def test_ranks_follow_the_switches_in_every_generation_whoever_joins_first(by_topology: bool, order: list[str]) -> None:
    places = {"n1": ("top", "leaf2"), "n2": ("top", "leaf1"), "n3": ("top", "leaf2")}
    for joining in (["n1", "n2", "n3"], ["n3", "n2", "n1"]):
        s = Scene(replace(SETTINGS, nodes=3, procs_per_node=2, by_topology=by_topology))
        s.feed(*(p.AgentJoined(n, f"10.0.0.{n[1]}", places[n]) for n in joining), p.StoreUp("10.0.0.1", 4000))
        (form,) = s.feed(*(p.AgentReady(n) for n in joining))
        assert isinstance(form, p.Form)
        assert form.first_ranks == {node: 2 * i for i, node in enumerate(order)}
        s.feed(s.exited(0, code=1))
        (again,) = [a for r in range(1, 6) for a in s.feed(s.exited(r, signal="SIGKILL")) if isinstance(a, p.Form)]
        assert (again.generation, again.first_ranks) == (2, form.first_ranks)


def test_agents_that_do_not_come_requeue_the_run_and_name_those_that_did() -> None:
    s = Scene()
    s.feed(p.AgentJoined("n1", "a"), p.AgentReady("n1"))
    assert s.feed(p.Tick(), at=899.0) == []
    outcome = s.finish(s.feed(p.Tick(), at=901.0)).outcome
    assert (outcome.cause, outcome.next, outcome.exit_code) == (Cause.LAUNCH_FAILED, Next.REQUEUE, 75)
    assert "only 1 of 2 nodes were ready after 900 s (n1)" in outcome.reason


def test_a_slow_start_says_once_what_it_waits_for() -> None:
    s = Scene()
    s.feed(p.AgentJoined("n1", "10.0.0.1"), p.AgentJoined("n2", "10.0.0.2"), p.AgentReady("n1"))
    s.feed(p.Tick(), p.Tick(), at=31.0)
    assert [n.fields for n in s.notes if n.event == "waiting"] == [
        {"seconds": 31, "for": "n2 to load; the store on n1"}
    ]


def test_a_finished_run_exits_zero_and_is_not_requeued() -> None:
    s = Scene().running(step=9)
    for rank in (0, 1):
        actions = s.feed(s.report(rank, "ended", finished=True, step=10), s.exited(rank, 0))
    finish = s.finish(actions)
    assert (finish.outcome.cause, finish.outcome.exit_code, finish.outcome.step) == (Cause.FINISHED, 0, 10)
    assert finish.ask is False


def test_exit_zero_without_a_last_word_is_a_crash() -> None:
    s = Scene().running()
    assert s.feed(s.exited(0, 0)) == [p.KillWorkers(1)]


def test_a_crash_restarts_all_workers_and_keeps_the_agents() -> None:
    s = Scene().running(step=7)
    assert s.feed(s.exited(1, None, "SIGKILL")) == [p.KillWorkers(1)]
    assert s.feed(s.exited(0, None, "SIGKILL")) == [p.Form(2, {"n1": 0, "n2": 1}, ("10.0.0.1", 4000))]
    assert s.state.restarts == 1


def test_who_only_lost_a_peer_is_not_the_culprit() -> None:
    s = Scene().running(step=7)
    assert s.feed(s.report(0, "peer_lost", error="reset by peer")) == []
    assert s.feed(s.exited(1, None, "SIGKILL"), at=0.5) == [p.KillWorkers(1)]
    assert s.state.trouble is not None
    assert s.state.trouble.rank == 1


def test_a_lost_peer_without_a_culprit_restarts_after_a_moment() -> None:
    s = Scene().running(step=7)
    s.feed(s.report(0, "peer_lost", error="reset by peer"), at=10.0)
    assert s.feed(p.Tick(), at=12.9) == []
    assert s.feed(p.Tick(), at=13.1) == [p.KillWorkers(1)]


def test_a_crash_loop_stops_and_names_rank_node_reason_and_traceback() -> None:
    s = Scene().running(step=7)
    for _ in range(3):
        s.feed(s.exited(1, None, "SIGSEGV"), s.exited(0, None, "SIGKILL"))
        s.running(step=7)
    s.feed(s.report(1, "failed", error="ValueError: boom", traceback="Traceback: boom", cause=Cause.CRASH))
    outcome = s.finish(s.feed(s.exited(1, 1), s.exited(0, None, "SIGKILL"))).outcome
    assert (outcome.cause, outcome.next, outcome.exit_code) == (Cause.CRASH, Next.NOTHING, 1)
    assert (outcome.rank, outcome.node, outcome.step, outcome.traceback) == (1, "n2", 7, "Traceback: boom")
    assert outcome.reason == "ValueError: boom (3 restarts without 10 steps of progress)"


def test_progress_gives_the_restarts_back() -> None:
    s = Scene().running(step=7)
    s.feed(s.exited(1, None, "SIGSEGV"), s.exited(0, None, "SIGKILL"))
    s.running(step=16)
    assert s.state.restarts == 1
    s.running(step=17)
    assert s.state.restarts == 0


@pytest.mark.parametrize(
    ("cause", "code"),
    [(Cause.BAD_CONFIG, 2), (Cause.DIVERGED, 1), (Cause.OUT_OF_MEMORY, 1), (Cause.STORAGE, 1), (Cause.SUPERSEDED, 1)],
)
def test_what_would_only_happen_again_is_not_restarted(cause: Cause, code: int) -> None:
    s = Scene().running()
    s.feed(s.report(0, "failed", cause=cause, error="why"))
    outcome = s.finish(s.feed(s.exited(0, 1), s.exited(1, None, "SIGKILL"))).outcome
    assert (outcome.cause, outcome.next, outcome.exit_code) == (cause, Next.NOTHING, code)


def test_a_hang_restarts_and_names_the_rank_the_others_wait_for() -> None:
    s = Scene().form()
    s.feed(s.status(0, 7, sequence=42, age=121.0), s.status(1, 7, sequence=41, age=120.5))
    assert s.feed(p.Tick()) == [p.KillWorkers(1, with_stacks=True)]
    assert s.state.trouble is not None
    assert (s.state.trouble.rank, s.state.trouble.node, s.state.trouble.cause) == (1, "n2", Cause.HANG)


def test_a_slow_rank_is_named_once_long_before_it_is_killed() -> None:
    s = Scene().form()
    s.feed(s.status(0, 7, sequence=42, age=6.0), s.status(1, 7, sequence=41, age=6.0))
    assert s.feed(p.Tick(), p.Tick()) == []
    assert [n.fields for n in s.notes if n.event == "slow"] == [{"rank": 1, "node": "n2", "step": 7, "seconds": 6.0}]


@pytest.mark.parametrize(
    ("phase", "step_seconds", "limit"),
    [
        (Phase.START, 1.0, 900.0),
        (Phase.STEP, 1.0, 120.0),
        (Phase.STEP, 10.0, 200.0),
        (Phase.DATA, 1.0, 120.0),
        (Phase.SAVE, 1.0, 1800.0),
        (Phase.EVAL, 1.0, 1800.0),
    ],
)
def test_each_phase_has_its_own_limit(phase: Phase, step_seconds: float, limit: float) -> None:
    assert hang_limit(SETTINGS, phase, step_seconds) == limit


def test_hang_timeout_of_the_configuration_counts() -> None:
    assert hang_limit(replace(SETTINGS, hang_timeout=4.0), Phase.STEP, 10.0) == 4.0


def test_the_first_step_may_take_as_long_as_the_start() -> None:
    s = Scene().form()
    s.feed(*(s.status(r, 0, age=500.0, median=0.0) for r in (0, 1)), p.Tick())
    assert s.state.trouble is None


def test_culprit_is_fewest_steps_then_fewest_collectives_then_longest_silent() -> None:
    r = p.RankView("n")
    assert culprit({0: replace(r, step=2), 1: replace(r, step=1, sequence=9)}) == 1
    assert culprit({0: replace(r, sequence=5), 1: replace(r, sequence=4)}) == 1
    assert culprit({0: replace(r, age=3.0), 1: replace(r, age=2.0)}) == 0


def warned(seconds: float | None = 100.0) -> p.Warned:
    return p.Warned(Cause.TIME_LIMIT, "the time limit is near", seconds)


def test_a_warned_stop_is_two_steps_ahead_saves_and_requeues() -> None:
    s = Scene().running(step=7)
    assert s.feed(warned()) == [p.Propose(1, 9, Save.BOTH)]
    assert s.feed(p.ProposalAnswer(1, "n1", 9, True, 8)) == []
    assert s.feed(p.ProposalAnswer(1, "n2", 9, True, 8)) == [p.Commit(1, 9, Save.BOTH)]
    for rank in (0, 1):
        s.feed(s.report(rank, "checkpoint_saved", step=9, seconds=1.0))
        actions = s.feed(s.report(rank, "ended", finished=False, step=9), s.exited(rank, 0))
    finish = s.finish(actions)
    assert finish.ask is True
    o = finish.outcome
    assert (o.cause, o.next, o.exit_code, o.step, o.saved_step) == (Cause.TIME_LIMIT, Next.REQUEUE, 75, 9, 9)


def test_a_missed_proposal_is_repeated_further_ahead() -> None:
    s = Scene().running(step=7)
    s.feed(warned())
    assert s.feed(p.ProposalAnswer(1, "n1", 9, False, 30)) == [p.Propose(1, 34, Save.BOTH)]
    assert s.feed(p.ProposalAnswer(1, "n2", 9, True, 8)) == []  # the answer to the old one
    assert s.feed(p.ProposalAnswer(1, "n1", 34, True, 31)) == []


def test_too_little_time_for_a_save_is_left_to_the_one_in_flight() -> None:
    s = Scene().running(step=7)
    s.feed(s.report(0, "checkpoint_saved", step=5, seconds=60.0))
    assert s.feed(warned(80.0), at=1000.0) == [p.Propose(1, 9, Save.UNDER_WAY)]
    answers = [p.ProposalAnswer(1, n, 9, True, 8) for n in ("n1", "n2")]
    assert s.feed(*answers) == [p.Commit(1, 9, Save.UNDER_WAY)]
    s.feed(s.report(0, "checkpoint_saved", step=7, seconds=60.0))
    for rank in (0, 1):
        actions = s.feed(s.report(rank, "ended", finished=False, step=9), s.exited(rank, 0))
    o = s.finish(actions).outcome
    assert (o.next, o.exit_code, o.step, o.saved_step) == (Next.REQUEUE, 75, 9, 7)
    assert o.reason == "the time limit is near; too little time for a save"


def test_too_little_time_for_a_save_requeues_by_the_deadline_all_the_same() -> None:
    s = Scene().running(step=7)
    s.feed(s.report(0, "checkpoint_saved", step=5, seconds=60.0))
    s.feed(warned(80.0), at=1000.0)
    assert s.feed(p.Tick(), at=1071.0) == []
    assert s.feed(p.Tick(), at=1073.0) == [p.KillWorkers(1)]
    o = s.finish(s.feed(s.exited(0, None, "SIGKILL"), s.exited(1, None, "SIGKILL"))).outcome
    assert (o.next, o.saved_step, o.reason) == (
        Next.REQUEUE,
        5,
        "the time limit is near; too little time for a save",
    )


def test_no_time_at_all_saves_nothing_and_requeues_at_once() -> None:
    s = Scene().running(step=7)
    s.feed(s.report(0, "checkpoint_saved", step=5, seconds=60.0))
    assert s.feed(warned(8.0)) == [p.KillWorkers(1)]
    o = s.finish(s.feed(s.exited(0, None, "SIGKILL"), s.exited(1, None, "SIGKILL"))).outcome
    assert (o.next, o.exit_code, o.saved_step) == (Next.REQUEUE, 75, 5)
    assert "too little time for a save" in o.reason


def test_a_save_that_was_slow_beside_training_does_not_keep_a_stop_from_saving() -> None:
    s = Scene().running(step=7)
    for step, seconds in ((3, 9.0), (5, 600.0), (6, 12.0)):
        s.feed(s.report(0, "checkpoint_saved", step=step, seconds=seconds))
    assert s.feed(warned(80.0)) == [p.Propose(1, 9, Save.BOTH)]


def test_a_save_in_flight_is_not_given_up_for_one_that_would_be_killed() -> None:
    s = Scene().running(step=7)
    s.feed(s.report(0, "checkpoint_saved", step=5, seconds=10.0))
    assert s.feed(warned(17.0)) == [p.Propose(1, 9, Save.BOTH)]  # 9 s until then


@pytest.mark.parametrize(
    ("left", "save"),
    [(89.0, Save.UNDER_WAY), (91.0, Save.OWN), (157.0, Save.OWN), (159.0, Save.BOTH), (None, Save.BOTH)],
)
def test_a_stop_saves_what_there_is_time_for(left: float | None, save: Save) -> None:
    """A minute each, and half of one to spare."""
    s = Scene().running(step=7)
    s.feed(s.report(0, "checkpoint_saved", step=5, seconds=60.0))
    assert s.feed(warned(left)) == [p.Propose(1, 9, save)]


def test_a_save_that_is_not_done_in_time_is_given_up_before_the_end() -> None:
    s = Scene().running(step=7)
    s.feed(warned(100.0), at=1000.0)
    assert s.feed(p.Tick(), at=1091.0) == []
    assert s.feed(p.Tick(), at=1093.0) == [p.KillWorkers(1)]


def test_workers_that_do_not_die_before_the_end_do_not_cost_the_requeue() -> None:
    s = Scene().running(step=7)
    s.feed(warned(100.0), at=1000.0)
    s.feed(p.Tick(), at=1093.0)
    assert s.feed(p.Tick(), at=1094.0) == []
    assert s.finish(s.feed(p.Tick(), at=1096.0)).ask is True


def test_sigterm_at_the_end_of_a_warned_stop_still_requeues() -> None:
    for fate in (p.JobFate.UNKNOWN, p.JobFate.TIME_LIMIT):
        s = Scene().running(step=7)
        s.feed(warned())
        finish = s.finish(s.feed(p.Terminated(fate, "batch")))
        assert (finish.outcome.cause, finish.outcome.next, finish.ask) == (Cause.TIME_LIMIT, Next.REQUEUE, True)


def test_a_node_lost_during_a_warned_stop_is_requeued_by_the_deadline() -> None:
    s = Scene().running(step=7)
    s.feed(warned(100.0), at=1000.0)
    s.feed(p.AgentLost("n2", "no word"))
    assert s.finish(s.feed(p.Tick(), at=1093.0)).ask is True


@pytest.mark.parametrize("cause", [Cause.SUPERSEDED, Cause.DIVERGED])
def test_what_must_not_start_again_does_not_because_of_a_warning(cause: Cause) -> None:
    s = Scene().running(step=7)
    s.feed(warned())
    s.feed(s.report(0, "failed", cause=cause, error="why"))
    assert s.finish(s.feed(s.exited(0, 1), s.exited(1, None, "SIGKILL"))).outcome.next is Next.NOTHING


def test_a_crash_during_a_warned_stop_does_not_start_another_generation() -> None:
    s = Scene().running(step=7)
    s.feed(warned())
    assert s.feed(s.exited(1, None, "SIGKILL")) == [p.KillWorkers(1)]
    assert s.finish(s.feed(s.exited(0, None, "SIGKILL"))).outcome.next is Next.REQUEUE


def test_without_requeue_a_warned_stop_says_how_to_go_on() -> None:
    s = Scene(replace(SETTINGS, can_requeue=False)).running(step=7)
    s.feed(warned(1.0))
    o = s.finish(s.feed(s.exited(0, None, "SIGKILL"), s.exited(1, None, "SIGKILL"))).outcome
    assert (o.next, o.exit_code) == (Next.NOTHING, 1)
    assert "stoker resume" in o.reason


def test_preemption_with_grace_reaches_only_the_agents_and_is_a_warned_stop() -> None:
    s = Scene().running(step=7)
    assert s.feed(p.Terminated(p.JobFate.PREEMPTED, "n1", 20.0)) == [p.Propose(1, 9, Save.BOTH)]
    assert s.state.stop is not None
    assert s.state.stop.cause is Cause.PREEMPTED


@pytest.mark.parametrize("by", ["batch", "n1"])
@pytest.mark.parametrize("fate", [p.JobFate.CANCELLED, p.JobFate.RUNNING])
def test_a_plain_scancel_of_job_or_step_means_stop(by: str, fate: p.JobFate) -> None:
    s = Scene().running(step=7)
    finish = s.finish(s.feed(p.Terminated(fate, by)))
    assert (finish.outcome.cause, finish.outcome.next, finish.ask) == (Cause.CANCELLED, Next.NOTHING, False)
    assert finish.outcome.exit_code == 143


def test_without_evidence_nothing_is_decided_and_slurm_is_asked_again() -> None:
    s = Scene().running(step=7)
    assert s.feed(p.Terminated(p.JobFate.UNKNOWN, "batch")) == [p.AskAgain()]
    assert s.state.stage is p.Stage.RUNNING


def test_scancel_while_stopping_for_requeue_wins() -> None:
    s = Scene().running(step=7)
    s.feed(warned(1.0))
    assert s.finish(s.feed(p.Terminated(p.JobFate.CANCELLED, "batch"))).outcome.next is Next.NOTHING


def test_a_lost_node_waits_for_slurm_and_then_is_a_node_failure() -> None:
    s = Scene().running(step=7)
    assert s.feed(p.AgentLost("n2", "no word for 15 s")) == [p.KillWorkers(1), p.Release()]
    assert s.feed(p.Terminated(p.JobFate.RUNNING, "n1")) == []
    finish = s.finish(s.feed(p.Terminated(p.JobFate.REQUEUED, "batch")))
    o = finish.outcome
    assert (o.cause, o.next, o.node, finish.ask) == (Cause.NODE_FAILURE, Next.REQUEUE, "n2", False)


def test_a_lost_node_of_which_slurm_never_says_anything_is_requeued_by_us() -> None:
    s = Scene().running(step=7)
    s.feed(p.AgentLost("n2", "connection lost"))
    finish = s.finish(s.feed(p.Tick(), at=301.0))
    assert (finish.outcome.cause, finish.ask) == (Cause.NODE_FAILURE, True)


def test_an_agent_that_died_alone_is_not_waited_for_as_long_as_a_silent_node() -> None:
    s = Scene().running(step=7)
    s.feed(p.AgentLost("n2", "end of stream", is_closed=True))
    assert s.feed(p.Tick(), at=19.0) == []
    finish = s.finish(s.feed(p.Tick(), at=21.0))
    assert (finish.outcome.next, finish.outcome.node, finish.ask) == (Next.REQUEUE, None, True)
    assert finish.outcome.reason == "the agent on n2 is lost: end of stream"


def lose_all(s: Scene, code: int = 137) -> list[p.Action]:
    return s.feed(
        p.AgentLost("n1", "end of stream", True), p.AgentLost("n2", "end of stream", True), p.LaunchEnded(code)
    )


def test_scancel_of_the_step_takes_all_agents_and_means_stop() -> None:
    s = Scene().running(step=7)
    assert lose_all(s)[-1] == p.AskSlurm()
    outcome = s.finish(s.feed(p.SlurmSaid(p.JobFate.RUNNING))).outcome
    assert (outcome.cause, outcome.next, outcome.exit_code) == (Cause.CANCELLED, Next.NOTHING, 143)


def test_agents_that_die_by_themselves_are_no_cancellation() -> None:
    s = Scene().running(step=7)
    lose_all(s, code=1)
    finish = s.finish(s.feed(p.SlurmSaid(p.JobFate.RUNNING)))
    assert (finish.outcome.cause, finish.outcome.next, finish.ask) == (Cause.NODE_FAILURE, Next.REQUEUE, True)


def test_agents_lost_during_a_warned_stop_are_requeued() -> None:
    s = Scene().running(step=7)
    s.feed(warned())
    lose_all(s)
    assert s.finish(s.feed(p.SlurmSaid(p.JobFate.UNKNOWN))).outcome.next is Next.REQUEUE


def test_all_agents_lost_because_slurm_requeued_is_not_a_cancellation() -> None:
    s = Scene().running(step=7)
    lose_all(s)
    assert s.finish(s.feed(p.SlurmSaid(p.JobFate.REQUEUED))).outcome.next is Next.REQUEUE


def test_all_agents_lost_while_slurm_does_not_answer_waits() -> None:
    s = Scene().running(step=7)
    lose_all(s)
    assert s.feed(p.SlurmSaid(p.JobFate.UNKNOWN)) == []
    assert s.finish(s.feed(p.Tick(), at=301.0)).ask is True


@pytest.mark.parametrize(("code", "then"), [(1, Next.REQUEUE), (213, Next.REQUEUE)])
def test_a_launch_that_fails_is_requeued(code: int, then: Next) -> None:
    s = Scene()
    outcome = s.finish(s.feed(p.LaunchEnded(code))).outcome
    assert (outcome.cause, outcome.next) == (Cause.LAUNCH_FAILED, then)


@pytest.mark.parametrize(
    ("code", "words"),
    [(127, "sh: 1: exec: bwarp: not found"), (126, ""), (255, "srun: unrecognized option '--container-image=x'")],
)
def test_a_launch_that_cannot_work_is_not_tried_again(code: int, words: str) -> None:
    s = Scene()
    s.feed(p.AgentFailed("n1", "x"), p.AgentFailed("n2", "x"))
    outcome = s.finish(s.feed(p.LaunchEnded(code, words))).outcome
    assert (outcome.cause, outcome.next, outcome.exit_code) == (Cause.BAD_CONFIG, Next.NOTHING, 2)
    assert outcome.reason.endswith(words or "exit code 126")


def test_a_program_that_one_node_lacks_is_looked_for_elsewhere() -> None:
    s = Scene()
    s.feed(p.AgentFailed("n2", "Exited with exit code 127"))
    outcome = s.finish(s.feed(p.LaunchEnded(127))).outcome
    assert (outcome.cause, outcome.next) == (Cause.LAUNCH_FAILED, Next.REQUEUE)


def test_a_launch_that_is_killed_is_not_requeued_unasked() -> None:
    s = Scene()
    assert s.feed(p.LaunchEnded(143)) == [p.AskSlurm()]
    assert s.finish(s.feed(p.SlurmSaid(p.JobFate.RUNNING))).outcome.next is Next.NOTHING


def test_killed_at_the_time_limit_without_warning_still_goes_on() -> None:
    s = Scene().running(step=7)
    finish = s.finish(s.feed(p.Terminated(p.JobFate.TIME_LIMIT, "batch")))
    assert (finish.outcome.cause, finish.outcome.next, finish.ask) == (Cause.TIME_LIMIT, Next.REQUEUE, True)


def test_a_superseded_attempt_ends_without_asking_for_anything() -> None:
    s = Scene().running(step=7)
    finish = s.finish(s.feed(p.Superseded()))
    assert (finish.outcome.cause, finish.ask) == (Cause.SUPERSEDED, False)


def test_nothing_happens_after_the_end() -> None:
    s = Scene().running(step=7)
    s.feed(p.Superseded())
    assert s.feed(p.Terminated(p.JobFate.TIME_LIMIT, "batch"), p.Tick()) == []


@pytest.mark.parametrize("seed", range(200))
def test_any_order_of_events_ends_in_at_most_one_finish_and_never_raises(seed: int) -> None:
    """Simulation: random events in random order; a run that was cancelled is never requeued."""
    rng = random.Random(seed)
    s = Scene().form()
    finishes: list[p.Finish] = []
    was_cancelled = False
    for _ in range(60):
        generation, rank = rng.choice([s.state.generation, 1]), rng.choice([0, 1])
        step = rng.randrange(20)
        event = rng.choice(
            [
                p.Tick(),
                p.NodeStatus(
                    (p.RankStatus(generation, rank, step, rng.choice(list(Phase)), step, rng.choice([0.0, 2e3]), 0.1),)
                ),
                p.SlurmSaid(rng.choice(list(p.JobFate))) if rng.random() < 0.1 else p.Tick(),
                p.RankReport(generation, rank, "ended", step=step, finished=False),
                p.RankReport(generation, rank, "peer_lost", error="x"),
                p.RankReport(generation, rank, "failed", error="x"),
                p.RankExited(generation, rank, rng.choice([0, 1]), None),
                p.ProposalAnswer(generation, rng.choice(["n1", "n2"]), step, rng.random() < 0.7, step),
                warned(rng.choice([None, 1.0, 500.0])),
                p.AgentLost(rng.choice(["n1", "n2"]), "x") if rng.random() < 0.1 else p.Tick(),
                p.LaunchEnded(rng.choice([1, 137])) if rng.random() < 0.1 else p.Tick(),
                p.Terminated(rng.choice(list(p.JobFate)), "batch") if rng.random() < 0.1 else p.Tick(),
            ]
        )
        if s.state.stop is None and isinstance(event, p.RankReport) and event.event == "ended":
            continue  # workers do not stop unasked
        is_over = s.state.stage is p.Stage.DONE
        was_cancelled |= isinstance(event, p.Terminated) and event.fate is p.JobFate.CANCELLED and not is_over
        actions = s.feed(event, at=s.now + rng.choice([0.1, 1.0, 30.0]))
        finishes += [a for a in actions if isinstance(a, p.Finish)]
    assert len(finishes) <= 1
    if was_cancelled:
        assert finishes[0].outcome.next is Next.NOTHING


# A script of the user's own: it says less, and may be signalled before us.

OWN = replace(SETTINGS, is_own_script=True)


def own(phase: Phase = Phase.SILENT) -> Scene:
    return Scene(OWN).running(step=0, phase=phase)


def test_an_own_script_is_finished_when_all_ranks_exited_0() -> None:
    s = own()
    assert s.feed(s.report(1, "ended", finished=True), s.exited(1, 0)) == []  # the others may go on
    finish = s.finish(s.feed(s.report(0, "ended", finished=True), s.exited(0, 0)))
    assert (finish.outcome.cause, finish.outcome.reason) == (Cause.FINISHED, "all ranks exited 0")


def test_a_rank_that_sends_no_heartbeat_is_never_hung_and_holds_nobodys_steps_back() -> None:
    s = own()
    s.feed(s.status(0, 40, Phase.STEP, median=1.0), s.status(1, 0, Phase.SILENT, age=9999.0))
    assert s.feed(p.Tick(), at=9999.0) == []
    assert s.state.best_step == 40
    s.feed(s.status(0, 40, Phase.STEP, median=1.0, age=121.0))
    assert s.feed(p.Tick()) == [p.KillWorkers(1, with_stacks=True)]
    assert s.state.trouble is not None
    assert s.state.trouble.reason.startswith("rank 0 shows no progress for 121 s in step 40")


def test_an_own_script_is_asked_to_stop_however_little_time_is_left() -> None:
    """We do not know what it has to save, nor how long that takes."""
    s = own(Phase.START)
    s.feed(s.status(0, 0, median=60.0))
    assert s.feed(p.Warned(Cause.TIME_LIMIT, "near", 20.0)) == [p.Propose(1, 2, Save.BOTH)]
    answers = [p.ProposalAnswer(1, n, 2, True, 0) for n in ("n1", "n2")]
    assert s.feed(*answers) == [p.Commit(1, 2, Save.BOTH)]
    assert s.feed(s.report(0, "ended", error="stopped when asked to"), s.exited(0, 1)) == []  # any code will do
    finish = s.finish(s.feed(s.report(1, "ended", error="stopped when asked to"), s.exited(1, None, "SIGTERM")))
    assert (finish.outcome.cause, finish.outcome.next, finish.ask) == (Cause.TIME_LIMIT, Next.REQUEUE, True)
    assert finish.outcome.reason == "near"
    assert finish.outcome.evidence == {"generation": 1, "failed_stops": {"0": 1}}


@pytest.mark.parametrize(("code", "signal"), [(0, None), (75, None), (143, None), (None, "SIGTERM"), (None, "SIGKILL")])
def test_an_own_script_that_ends_in_order_or_by_the_stop_signal_has_not_failed(
    code: int | None, signal: str | None
) -> None:
    s = own()
    s.feed(p.Warned(Cause.TIME_LIMIT, "near", 90.0), *(p.ProposalAnswer(1, n, 2, True, 0) for n in ("n1", "n2")))
    s.feed(s.report(0, "ended", error="stopped when asked to"), s.exited(0, code, signal))
    finish = s.finish(s.feed(s.report(1, "ended", error="stopped when asked to"), s.exited(1, code, signal)))
    assert finish.outcome.evidence == {"generation": 1}


def test_exit_75_waits_for_the_others_and_requeues() -> None:
    s = own()
    again = "asked to be started again (exit code 75)"
    assert s.feed(s.report(1, "ended", error=again, cause=Cause.REQUESTED), s.exited(1, 75)) == []
    assert s.feed(p.Tick(), at=100.0) == []  # rank 0 may be saving
    finish = s.finish(s.feed(s.report(0, "ended", error=again, cause=Cause.REQUESTED), s.exited(0, 75)))
    assert (finish.outcome.cause, finish.outcome.next, finish.ask) == (Cause.REQUESTED, Next.REQUEUE, True)
    assert finish.outcome.reason == f"rank 1 {again}"


@pytest.mark.parametrize("left", ["a rank that waits", "a rank that crashes of it"])
def test_after_exit_75_the_others_cannot_hold_the_run_up(left: str) -> None:
    s = own()
    s.feed(s.report(1, "ended", error="asked", cause=Cause.REQUESTED), s.exited(1, 75))
    if left == "a rank that waits":
        assert s.feed(p.Tick(), at=119.0) == []
        assert s.feed(p.Tick(), at=121.0) == [p.KillWorkers(1)]
        finish = s.finish(s.feed(s.exited(0, None, "SIGKILL")))
    else:
        finish = s.finish(s.feed(s.exited(0, 1)))
    assert (finish.outcome.cause, finish.outcome.next) == (Cause.REQUESTED, Next.REQUEUE)


def test_a_warning_after_exit_75_takes_over() -> None:
    s = own()
    s.feed(s.report(1, "ended", error="asked", cause=Cause.REQUESTED), s.exited(1, 75))
    assert s.feed(p.Warned(Cause.PREEMPTED, "preempted", 30.0)) == [p.Propose(1, 2, Save.BOTH)]
    assert s.feed(*(p.ProposalAnswer(1, n, 2, True, 0) for n in ("n1", "n2"))) == [p.Commit(1, 2, Save.BOTH)]
    finish = s.finish(s.feed(s.report(0, "ended", error="stopped"), s.exited(0, 0)))
    assert finish.outcome.cause is Cause.PREEMPTED


@pytest.mark.parametrize("who", ["the agent is told", "Slurm is asked"])
def test_ranks_that_were_signalled_before_us_wait_for_slurms_word(who: str) -> None:
    s = own()
    after = "ended after SIGTERM from outside"
    actions = s.feed(*(e for r in (0, 1) for e in (s.report(r, "ended", error=after), s.exited(r, 0))))
    assert actions == [p.AskSlurm()]
    if who == "the agent is told":
        finish = s.finish(s.feed(p.Terminated(p.JobFate.PREEMPTED, "agents", 20.0)))
    else:
        finish = s.finish(s.feed(p.SlurmSaid(p.JobFate.PREEMPTED)))
    assert (finish.outcome.cause, finish.outcome.next, finish.ask) == (Cause.PREEMPTED, Next.REQUEUE, True)
    assert finish.outcome.reason == "preempted by a job of higher priority"


@pytest.mark.parametrize(
    ("fate", "cause", "then"),
    [
        (p.JobFate.CANCELLED, Cause.CANCELLED, Next.NOTHING),
        (p.JobFate.REQUEUED, Cause.REQUEUED, Next.REQUEUE),
        (p.JobFate.RUNNING, Cause.REQUESTED, Next.REQUEUE),
    ],
)
def test_what_slurm_says_of_ranks_that_were_signalled_before_us(fate: p.JobFate, cause: Cause, then: Next) -> None:
    s = own()
    s.feed(*(e for r in (0, 1) for e in (s.report(r, "ended", error="after SIGTERM"), s.exited(r, 0))))
    outcome = s.finish(s.feed(p.SlurmSaid(fate))).outcome
    assert (outcome.cause, outcome.next) == (cause, then)


def test_without_an_answer_ranks_that_were_signalled_are_started_again() -> None:
    s = own()
    s.feed(*(e for r in (0, 1) for e in (s.report(r, "ended", error="after SIGTERM"), s.exited(r, 0))))
    assert s.feed(p.Tick(), at=19.0) == []
    assert s.finish(s.feed(p.Tick(), at=21.0)).outcome.next is Next.REQUEUE


def test_one_crash_of_an_own_script_restarts_finished_ranks_too() -> None:
    s = own()
    s.feed(s.report(0, "ended", finished=True), s.exited(0, 0))
    assert s.feed(s.exited(1, 3)) == [p.KillWorkers(2), p.Form(2, {"n1": 0, "n2": 1}, ("10.0.0.1", 4000))]
