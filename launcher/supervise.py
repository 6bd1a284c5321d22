"""`python -m stoker.launcher.supervise RUN_DIR [--local]`: one per attempt, on the batch host. Keeps the run going.

Owns: the loop that turns signals, sockets and clocks into events, asks policy.decide, and does what it says. Decides
nothing itself. Standard library only.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import time
import traceback
from typing import Any

from . import interval_facts, jobinfo, jobnodes
from . import policy_types as p
from .agents import Agents, AgentSignalled
from .continuation import Continuation
from .desk import Desk, Question
from .heard import OwnJob, events_of, inquire
from .launch_agents import Launch, launch_agents, local_nodes
from .policy import decide
from .protocol import SUBMISSION, WARNED
from .run.attempts import Fence, claim
from .run.effective import effective_config
from .run.events import EventLog
from .run.files import create_json
from .run.interval import sentence
from .run.layout import AttemptDir, RunDir, open_run
from .run.outcome import EXIT_FINISHED, EXIT_REQUEUE, EXIT_USAGE, Cause, Next, Outcome
from .run.packages import changes
from .run.process_start import start_ticks
from .run.stacks import offer
from .run.submissions import Submission, own_submission, rival, series, submissions
from .signals import SignalPipe
from .supervise_start import end_already, job_at_work, refusal, settings_of, without_scontrol
from .track_start import PATIENCE as TRACKER_PATIENCE
from .track_start import start_tracker, stop_tracker

TICK = 0.5  # seconds between looks at the clock, and for hangs
FENCE_EVERY = 2.0
SIGN_EVERY = 30.0  # seconds between two signs of life for `stoker watch`: the event file's time of change
WARNING_PATIENCE = 5.0  # seconds that a warning waits for Slurm's word on what it means and how much time is left
ASK_AGAIN = 3.0  # seconds until a question without a usable answer is put again
END_FIRST, END_LONGEST = 30.0, 480.0  # seconds until an unanswered question for the allocation's end is put again
CLOCK_WARNING_SLACK = 5.0  # seconds after the warning should have come by signal until the clock stands in for it


def main(argv: list[str]) -> int:
    signals = SignalPipe()  # first of all: from here on no signal is lost
    try:
        run = open_run(argv[0])
    except (IndexError, ValueError) as e:
        print(f"supervise: {e}", file=sys.stderr)
        return EXIT_USAGE
    is_local = "--local" in argv[1:]
    job_id = None if is_local else os.environ.get("SLURM_JOB_ID")
    token = os.environ.get(SUBMISSION)
    if job_id and token and (other := rival(run, job_id, token)):
        print(f"supervise: job {other} works on {run.path}, this is a second copy of it; nothing to do")
        return EXIT_FINISHED
    if job_id and (other := job_at_work(run, job_id)):
        print(f"supervise: job {other} works on {run.path}; nothing to do")
        return EXIT_FINISHED
    submission = own_submission(run, job_id, token) if job_id else submissions(run)[-1]
    mine = series(submissions(run), upto=submission.number)
    code = end_already(run, mine)
    if code is not None:
        print(f"supervise: {run.path} is over (exit code {code}); `stoker resume` starts it again", file=sys.stderr)
        return code
    attempt = claim(run)
    offer(run, attempt.number, "supervisor")
    events = EventLog(attempt.events("supervisor"), "supervisor", attempt.number)
    supervisor = None
    try:
        supervisor = Supervisor(run, attempt, mine, events, job_id, signals)
        return supervisor.serve()
    except Exception as e:
        tail = "\n".join(traceback.format_exc().splitlines()[-40:])
        events.write("supervisor_failed", error=f"{type(e).__name__}: {e}", traceback=tail)
        if supervisor is not None and supervisor.exit_code is not None:
            traceback.print_exc()
            return supervisor.exit_code
        raise  # the batch script sees that, and has the last word said (aftermath.py)


class Supervisor:
    def __init__(
        self,
        run: RunDir,
        attempt: AttemptDir,
        mine: list[Submission],
        events: EventLog,
        job_id: str | None,
        signals: SignalPipe,
    ) -> None:
        self.run, self.attempt, self.submission, self.events = run, attempt, mine[-1], events
        self.job_id, self.signals = job_id, signals
        self.fence = Fence(run, attempt.number)
        self.config = effective_config(run, self.submission.number)
        self.restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        # An allocation of the user's own (salloc) is nobody's to requeue: the loop around us starts the next attempt.
        batch_id = jobinfo.slurm_name(os.environ) if job_id is not None and self.submission.mode != "salloc" else None
        self.continuation = Continuation(
            run, attempt, mine, self.config, batch_id, self.restarts, events, self._give_sign
        )
        nodes = jobnodes.hostnames(os.environ.get("SLURM_JOB_NODELIST", "")) if job_id is not None else []
        self.continuation.nodes = nodes
        settings = settings_of(self.config, batch_id is not None, job_id is None, nodes)
        self.state = p.State(settings, now=time.monotonic(), since=time.monotonic())
        self.lease = float(self.config["resilience"]["lease"])
        self.token = secrets.token_hex(16)
        self.agents = Agents(self.token, self.config, self.lease)
        self.agents.watch(signals.read_end)
        self.desk = self._desk() if job_id is not None else None
        if self.desk is not None:
            self.agents.watch(self.desk.read_end)
        self.ends_at: float | None = None  # monotonic; the allocation's end
        self._end_asked_at = math.inf  # when to ask for it again, should nobody have answered
        self._end_pause = END_FIRST
        self.exit_code: int | None = None
        self.interrupts = 0
        self.launch_ended = False
        self._ticked = 0.0
        self._ask_again_at: float | None = None
        self._warned_at: float | None = None
        self._warned_how = ""
        self._next_sign = 0.0
        self._next_fence = 0.0

    def _desk(self) -> Desk:
        assert self.job_id is not None
        name, nodes = jobinfo.slurm_name(os.environ), os.environ.get("SLURM_JOB_NODELIST", "")
        job = OwnJob.of(name, self.restarts, nodes, self.run.job_logs / f"{self.job_id}.log")
        ask = jobinfo.Inquirer()
        return Desk(name, lambda _: inquire(job, ask))

    def serve(self) -> int:
        self._record_start()
        refused = refusal(self.continuation, self.submission, self.state.settings.onward, self.events)
        if refused is None or refused.outcome.next is not Next.NOTHING:
            self.continuation.begin()
        if refused is not None:
            self._finish(refused)
        if self.exit_code is not None:
            return self.exit_code
        launch = launch_agents(self.run, self.attempt, self.config, self.agents.addresses, self.token, self.job_id)
        if os.environ.get(WARNED):
            self._warned("the warning came while the job was starting")
        tracker = start_tracker(self.run, self.config)
        try:
            while self.exit_code is None:
                self._turn(launch)
                self.agents.keepalive.beat()
        finally:
            self.agents.quit()
            launch.end()
            self.agents.close()
            # After a requeue SIGKILL follows soon; what the tracker has not sent, the next one sends.
            stop_tracker(tracker, 5.0 if self.exit_code == EXIT_REQUEUE else TRACKER_PATIENCE)
        return self.exit_code

    def _record_start(self) -> None:
        nodes = os.environ.get("SLURM_JOB_NODELIST") or ",".join(local_nodes(self.state.settings.nodes))
        record: dict[str, Any] = {
            "job_id": self.job_id,
            "restart_count": self.restarts,
            "nodes": nodes,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_start": start_ticks(os.getpid()),
            "submission": self.submission.number,
            "time": time.time(),
        }
        create_json(self.attempt.start, record)
        self.events.write("attempt_started", **record)
        self._report_packages()
        if self.job_id is not None and shutil.which("scontrol") is None:
            # Said now, not when the requeue is due: somebody can still put it right, or watch the run.
            consequence = without_scontrol(self.state.settings.is_chain)
            self.events.write("no_scontrol", consequence=consequence)
            _say(f"scontrol is not installed on {socket.gethostname()}: {consequence}")
            self._end_asked_at = math.inf
            return
        self._ask("start")

    def _report_packages(self) -> None:
        """The code is frozen, what is installed is not: say what changed since the run was launched."""
        try:
            changed = changes(self.run)
        except (OSError, ValueError):  # a run directory made by hand
            return
        if changed:
            self.events.write("packages_changed", changes=changed)
            _say(f"installed packages changed since the run was launched: {', '.join(changed[:10])}")

    # The loop.

    def _turn(self, launch: Launch) -> None:
        readable = self.agents.wait(TICK)
        for s in self.signals.take():
            self._signalled(s)
        for question, info in self.desk.answers() if self.desk is not None else []:
            self._answered(question, info)
        for event in self.agents.read(readable):
            if isinstance(event, AgentSignalled):
                self._agent_signalled(event)
            else:
                self._feed(event)
        code = None if self.launch_ended or self.agents.any_connected() else launch.poll()
        for failure in launch.failures():
            self._feed(p.AgentFailed(*failure))
        if code is not None:
            self.launch_ended = True
            self._feed(p.LaunchEnded(code, launch.last_words()))
        now = time.monotonic()
        if now >= self._next_fence:
            self._next_fence = now + FENCE_EVERY
            with contextlib.suppress(OSError):  # storage that does not answer says nothing of a later attempt
                if not self.fence.is_current():
                    self._feed(p.Superseded())
        self._give_sign()
        if now - self._ticked >= TICK:
            self._ticked = now
            self._look_at_the_clock()
            if self._ask_again_at is not None and now >= self._ask_again_at:
                self._ask_again_at = None
                self._ask("terminated", "batch")
            self._feed(p.Tick())

    def _give_sign(self) -> None:
        """For `stoker watch`: who tells nothing for long, and touches nothing, is taken for dead."""
        if time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + SIGN_EVERY
            with contextlib.suppress(OSError):
                os.utime(self.events.path)

    def _look_at_the_clock(self) -> None:
        """Should Slurm's warning not come: near the end as we know it, ask whether that still holds."""
        now = time.monotonic()
        if self.state.stop is not None:
            return
        if self._warned_at is not None and now - self._warned_at > WARNING_PATIENCE:
            self._answered(Question("warning", self._warned_how), None)  # it comes to a stop in any case
        elif now >= self._end_asked_at:
            self._end_asked_at, self._end_pause = math.inf, min(2 * self._end_pause, END_LONGEST)
            self._ask("start")
        elif self.ends_at is not None and self.ends_at - now < self.state.settings.warning - CLOCK_WARNING_SLACK:
            self.ends_at = None  # until the answer
            self._ask("clock")

    def _feed(self, event: p.Event) -> None:
        if self.exit_code is not None:
            return
        self.state, actions = decide(self.state, event, time.monotonic())
        # What stops or saves workers comes first: storage may be slow to take the record.
        for action in sorted(actions, key=_urgency):
            self._do(action)

    def _do(self, action: p.Action) -> None:
        match action:
            case p.Note():
                self.events.write(action.event, **action.fields)
                _say(f"{action.event} {dict(action.fields)}")
            case p.Finish():
                self._finish(action)
            case p.Blame():
                self.continuation.blame(action)
            case p.Release():
                self.agents.quit()
            case p.AskSlurm():
                self._ask("launch")
            case p.AskAgain():
                self._ask_again_at = time.monotonic() + ASK_AGAIN
            case _:
                self.agents.do(action, self.state.settings)

    # Signals, and what Slurm says to them.

    def _ask(self, about: str, by: str = "") -> None:
        if self.desk is not None and self.exit_code is None:
            self.desk.ask(Question(about, by))
        elif self.desk is None and about == "warning":
            self._answered(Question(about, by), None)

    def _signalled(self, s: signal.Signals) -> None:
        if s in (signal.SIGUSR1, signal.SIGUSR2):
            self._warned(f"warned by {s.name}")
        elif s is signal.SIGTERM:
            self._terminated("batch")
        elif s is signal.SIGINT:
            self.interrupts += 1
            if self.interrupts == 1 and self.job_id is None:
                self._feed(p.Warned(Cause.CANCELLED, "interrupted from the keyboard", None, requeue=False))
            else:
                self._terminated("batch")

    def _agent_signalled(self, e: AgentSignalled) -> None:
        if self.job_id is None:
            return  # without Slurm only the supervisor is spoken to
        if e.signal in ("SIGUSR1", "SIGUSR2"):
            self._warned(f"node {e.node} was warned by {e.signal}")
        elif self.state.stop is None:
            # On preemption with grace Slurm signals the steps' tasks and not the batch script.
            self._terminated(e.node)

    def _warned(self, how: str) -> None:
        if self.state.stop is None:
            self._warned_at, self._warned_how = self._warned_at or time.monotonic(), how
            self._ask("warning", how)

    def _terminated(self, by: str) -> None:
        if self.desk is None or self.submission.is_cancelled:
            self._feed(p.Terminated(p.JobFate.CANCELLED, by))
        else:
            # One question for all nodes that are signalled at once.
            self._ask("terminated", "batch" if by == "batch" else "agents")

    def _answered(self, question: Question, info: jobinfo.JobInfo | None) -> None:
        if question.about in ("start", "clock"):
            self.ends_at = info.ends_at if info else None
        if question.about == "start":
            self._end_asked_at = math.inf if info else time.monotonic() + self._end_pause
        since = 0.0 if self._warned_at is None else time.monotonic() - self._warned_at
        for event in events_of(question, info, self.restarts, self.state.settings.warning, since):
            self._feed(event)

    # The end.

    def _finish(self, action: p.Finish) -> None:
        outcome = self.continuation.plan(action.outcome, is_ours=action.ask)
        if action.ask and outcome.next is not Next.NOTHING:
            outcome = self.continuation.bring_about(outcome, True, self.ends_at)
            self._record_end(outcome)
            self._advise()
            return
        # What Slurm has decided, or nobody is asked for, is written down first: there may be little time.
        self._record_end(outcome)
        self.continuation.bring_about(outcome, False, self.ends_at)
        self._advise()

    def _advise(self) -> None:
        """Whether checkpoints are made far too often or too rarely. The last of all: nobody waits for it."""
        try:
            advice = interval_facts.advice(self.run)
        except (OSError, ValueError, KeyError, TypeError) as e:
            _say(f"how often to save is not known: {e}")
            return
        if advice is not None and advice.is_far:
            self.events.write("checkpoint_interval", **advice.to_json())
            _say(f"checkpoint {sentence(advice)}")

    def _record_end(self, outcome: Outcome) -> None:
        self.exit_code = outcome.exit_code
        try:
            is_first = outcome.write(self.attempt)
        except OSError as e:
            _say(f"the outcome could not be written: {e}")
            is_first = True
        if is_first:
            fields = {"cause": outcome.cause.value, "next": outcome.next.value, "reason": outcome.reason}
            self.events.write("attempt_ended", **fields, step=outcome.step, saved_step=outcome.saved_step)
        _say(f"{outcome.cause.value}: {outcome.reason} (next: {outcome.next.value})")


def _urgency(action: p.Action) -> int:
    return 1 if isinstance(action, p.Note | p.Blame) else 2 if isinstance(action, p.Finish) else 0


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"supervisor: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
