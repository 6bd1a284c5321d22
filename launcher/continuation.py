"""How a run goes on after an attempt: the same job again, a successor, or the loop around us; when, and on which nodes.

Owns: putting budgets, back-off and bad nodes together, and asking Slurm for the next start. Whether an attempt's end
leads on at all is policy's to say. Standard library only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import avoid, budgets, jobinfo, jobnodes
from .chain import Chain
from .job_fate import JobFate
from .policy_types import Blame
from .run import badnodes
from .run.attempts import Fence
from .run.badnodes import Finding
from .run.events import EventLog
from .run.layout import AttemptDir, RunDir
from .run.outcome import EXIT_CANCELLED, EXIT_FAILED, NOT_STARTED, Cause, Next, Outcome
from .run.submissions import Submission
from .state import attempts_of

REQUEUE_MARGIN = 10.0  # seconds before the allocation's end at which a controller that is away is given up
LONGEST_WAIT = 600.0  # seconds that Slurm may take to answer where the end is not known
SUPERSEDED = "a later attempt of this run exists"


class Continuation:
    """What follows one attempt. `job_id` is None where no Slurm job is to start again (local, salloc)."""

    def __init__(
        self,
        run: RunDir,
        attempt: AttemptDir,
        mine: list[Submission],
        config: dict[str, Any],
        job_id: str | None,
        restarts: int,
        events: EventLog,
        sign: Callable[[], None] = lambda: None,
    ) -> None:
        """`mine`: the submissions of this series, our own last; `sign`: called while Slurm is waited for."""
        self.run, self.attempt, self.config, self.events = run, attempt, config, events
        self.own, self.job_id, self.restarts = mine[-1], job_id, restarts
        self.fence = Fence(run, attempt.number)
        self.nodes: list[str] = []  # of this allocation
        earlier = [a for a in attempts_of(run, *mine) if a.number < attempt.number]
        self.ground = budgets.Ground()
        self.past = budgets.history(run, earlier, config, self.ground, until=attempt.number)
        self.chain: Chain | None = None
        self._sign = sign

    # The start.

    def refusal(self) -> str | None:
        """Why this attempt must not begin: a budget is used up."""
        return budgets.spent(self.past, budgets.limits(self.config))

    def begin(self) -> None:
        """Have a successor queued, where that is how the run goes on."""
        if self.job_id is not None and self.config["resilience"]["continuation"] == "chain":
            self.chain = Chain(self.own, self.job_id, self.config, self.events, avoid.exclusion(self.run, self.config))
            self.chain.begin()

    def bad_in_allocation(self) -> list[Finding]:
        """Findings about nodes that we have got all the same."""
        found = avoid.findings(self.run, self.config)
        return [found[node] for node in self.nodes if node in found]

    def is_hopeless(self, findings: list[Finding]) -> bool:
        """Whether to ask for other nodes at once: one is known to fail launches, and the job can do without it."""
        failing = [f.node for f in findings if f.cause == Cause.LAUNCH_FAILED.value]
        return (
            bool(failing)
            and self.job_id is not None
            and set(failing) & set(avoid.avoided(self.run, self.config)) != set()
        )

    # What is learnt.

    def blame(self, blame: Blame) -> None:
        """Note evidence against a node."""
        now, hours = time.time(), float(self.config["resilience"]["bad_node_hours"])
        until = now + 3600.0 * hours
        identity = avoid.run_id(self.run)
        finding = Finding(
            blame.node, blame.reason, blame.cause.value, identity, self.attempt.number, now, until, blame.is_own
        )
        self.events.write("bad_node", node=blame.node, reason=blame.reason, until=round(until), own=blame.is_own)
        if self.config["resilience"]["avoid_bad_nodes"] and self.job_id is not None:
            try:
                badnodes.note(badnodes.directory_of(self.run), finding)
            except OSError as e:
                self.events.write("bad_node_not_noted", node=blame.node, error=str(e))

    # The end.

    def plan(self, outcome: Outcome, is_ours: bool) -> Outcome:
        """Hold an outcome that leads on against the budgets. `is_ours`: Slurm has not started the job again already."""
        return outcome if outcome.next is Next.NOTHING else self._within_budget(outcome, is_ours)

    def bring_about(self, outcome: Outcome, is_ours: bool, ends_at: float | None) -> Outcome:
        """Have Slurm do what the outcome says; returns it as it turned out. `ends_at`: monotonic."""
        if outcome.next is Next.NOTHING:
            if self.chain is not None and outcome.cause is not Cause.SUPERSEDED:
                self.chain.stop()
            return outcome
        if self.job_id is None:
            return outcome
        error = self._go_on(outcome, is_ours, ends_at)
        if error is None:
            return outcome
        self.events.write("requeue_refused" if outcome.next is Next.REQUEUE else "chain_broken", error=error)
        is_cancelled = error == jobinfo.CANCELLED
        cause, code = (Cause.CANCELLED, EXIT_CANCELLED) if is_cancelled else (outcome.cause, EXIT_FAILED)
        what = "nothing will follow" if outcome.next is Next.CHAIN else "not requeued"
        reason = f"{outcome.reason}; {what}: {error}"
        if self.chain is not None and error != SUPERSEDED:
            self.chain.stop()
        evidence = outcome.evidence if is_cancelled else {**outcome.evidence, NOT_STARTED: error}
        return replace(
            outcome, cause=cause, next=Next.NOTHING, exit_code=code, reason=reason, delay=0.0, evidence=evidence
        )

    def _within_budget(self, outcome: Outcome, is_ours: bool) -> Outcome:
        r = self.config["resilience"]
        got_further = replace(self.ground).gained(self.attempt, outcome)
        past = [*self.past, budgets.past_of(self.attempt, outcome, got_further, self.config)]
        reason = budgets.spent(past, budgets.limits(self.config))
        if reason is None or not is_ours:
            return replace(outcome, delay=budgets.delay(past, float(r["backoff"]), float(r["max_backoff"])))
        reason = f"{outcome.reason}; {reason}; `stoker resume` goes on"
        return replace(outcome, next=Next.NOTHING, exit_code=EXIT_FAILED, reason=reason)

    def _go_on(self, outcome: Outcome, is_ours: bool, ends_at: float | None) -> str | None:
        """Ask for the next start; None if there will be one."""
        assert self.job_id is not None
        patience = LONGEST_WAIT if ends_at is None else max(0.0, ends_at - time.monotonic() - REQUEUE_MARGIN)
        with contextlib.suppress(OSError):
            if self.own.is_cancelled:
                return jobinfo.CANCELLED
            if not self.fence.is_current():
                return SUPERSEDED
        if outcome.next is Next.CHAIN:
            assert self.chain is not None
            return self.chain.go_on(self._changes(outcome, self.chain.exclude or ""), min(patience, 60.0))
        info = jobinfo.query(self.job_id)
        if is_ours:
            error = self._requeue(info, patience)
            if error is not None:
                return error
        changes = self._changes(outcome, _excluded(info))
        error = jobnodes.amend(self.job_id, changes)
        if error is not None:
            self.events.write("amend_failed", job=self.job_id, changes=changes, error=error)
        elif changes:
            self.events.write("next_start", job=self.job_id, **changes)
        return None

    def _requeue(self, info: jobinfo.JobInfo | None, patience: float) -> str | None:
        assert self.job_id is not None
        fate = jobinfo.fate(info, self.restarts) if info else JobFate.UNKNOWN
        if fate is JobFate.CANCELLED:
            return jobinfo.CANCELLED
        if fate is JobFate.TAKEN:
            return jobinfo.TAKEN
        if fate is JobFate.REQUEUED:
            return None
        return jobinfo.requeue(self.job_id, self.restarts, patience, self._is_wanted)

    def _is_wanted(self) -> bool:
        self._sign()
        return not self.own.is_cancelled

    def _changes(self, outcome: Outcome, excluded: str) -> dict[str, str]:
        """What the next start needs changed. What was excluded and has expired leaves the list."""
        wanted = avoid.exclusion(self.run, self.config)
        before, after = set(jobnodes.hostnames(excluded)), set(jobnodes.hostnames(wanted))
        return jobnodes.changes_for(None if before == after else wanted, outcome.delay)


def _excluded(info: jobinfo.JobInfo | None) -> str:
    text = info.fields.get("ExcNodeList", "") if info else ""
    return "" if text == "(null)" else text
