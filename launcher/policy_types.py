"""The vocabulary of the supervisor's decisions: what it knows, what can happen, what it can do. Values only.

Times are seconds: `now` is the supervisor's monotonic clock; wall-clock times say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from .job_fate import JobFate as JobFate
from .run.heartbeat import Phase, Save
from .run.outcome import Cause, Next, Outcome


@dataclass(frozen=True)
class Settings:
    """What of the configuration matters here."""

    nodes: int
    procs_per_node: int
    can_requeue: bool  # somebody starts this run again when asked (Slurm, the local loop, a successor)
    warning: float = 120.0  # lead of the warning signal, used where the job's end is not known
    hang_timeout: float = 0.0  # 0: max(20 x median step, 120)
    start_timeout: float = 900.0
    save_timeout: float = 1800.0
    eval_timeout: float = 1800.0
    gather_timeout: float = 900.0  # agents must have joined and loaded by then
    verdict_timeout: float = 300.0  # how long a silent node may wait for Slurm's word (SlurmdTimeout is 300 by default)
    closed_timeout: float = 20.0  # the same for an agent that died on a node that lives
    max_restarts: int = 3
    progress_steps: int = 10
    by_topology: bool = True  # ranks follow the switches, else names alone
    is_own_script: bool = False  # workers are processes of the user's own (task.cmd)
    is_chain: bool = False  # a successor job goes on, not this one
    names: tuple[str, ...] = ()  # of all nodes, where they are known

    @property
    def world_size(self) -> int:
        return self.nodes * self.procs_per_node

    @property
    def onward(self) -> Next:
        """What an interruption leads to."""
        return Next.NOTHING if not self.can_requeue else Next.CHAIN if self.is_chain else Next.REQUEUE


class Stage(str, Enum):
    GATHERING = "gathering"  # agents are joining and loading
    RUNNING = "running"  # workers of the current generation exist
    CLEARING = "clearing"  # workers are being killed; `then` follows
    AWAITING_SLURM = "awaiting_slurm"  # a node is lost: Slurm's word decides
    DONE = "done"


@dataclass(frozen=True)
class AgentView:
    address: str
    place: tuple[str, ...] = ()  # switches above it, from the top down
    is_ready: bool = False  # its zygote has loaded


@dataclass(frozen=True)
class RankView:
    node: str
    step: int = 0  # steps completed
    phase: Phase = Phase.START
    sequence: int = 0
    age: float = 0.0  # since its last sign of life
    median: float = 0.0  # its median step time, 0 until known
    is_alive: bool = True
    ended: bool | None = None  # None: not yet; True: the run is finished; False: stopped at the stop step
    is_named: bool = False  # already reported as slow
    failed_stop: int | None = None  # exit code of a script that failed after it was asked to stop


@dataclass(frozen=True)
class StopPlan:
    """A stop under way (protocol in run/heartbeat.py)."""

    cause: Cause
    reason: str
    deadline: float | None  # monotonic; past it the workers are killed and the run requeued all the same
    step: int
    margin: int
    acks: frozenset[str] = frozenset()
    is_committed: bool = False
    requeue: bool = True
    save: Save = Save.BOTH


@dataclass(frozen=True)
class Trouble:
    """Something broke; `due` is when it is acted on (a rank that only lost its peer waits for the true culprit)."""

    cause: Cause
    reason: str
    due: float
    rank: int | None = None
    node: str | None = None
    traceback: str | None = None
    is_certain: bool = False
    patience: float = 0.0  # AWAITING_SLURM: how long


@dataclass(frozen=True)
class State:
    settings: Settings
    now: float = 0.0
    stage: Stage = Stage.GATHERING
    since: float = 0.0  # when the stage began
    generation: int = 0
    agents: Mapping[str, AgentView] = field(default_factory=dict)
    is_wait_noted: bool = False  # a start that takes long is told once
    store_node: str | None = None  # who was asked to start the store
    store: tuple[str, int] | None = None
    store_due: float | None = None  # when the store is given up and asked of another node
    is_store_moved: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)  # nodes that failed at start, and how
    ended_all: frozenset[str] = frozenset()  # those for which srun gave up: the others failed for no fault of their own
    start_crashes: tuple[str | None, ...] = ()  # node of each crash in a row at start; None: of another trouble
    is_released: bool = False  # the agents were let go to make srun end
    ranks: Mapping[int, RankView] = field(default_factory=dict)
    stop: StopPlan | None = None
    trouble: Trouble | None = None
    then: Outcome | None = None  # what follows CLEARING: None = start the next generation, else end with it
    restarts: int = 0  # in a row without progress
    mark: int = 0  # step that counts as progress when passed by `progress_steps`
    best_step: int = 0  # completed by all ranks of some generation
    saved_step: int | None = None
    save_seconds: float = 0.0  # shortest seen: beside training a save takes longer than when all wait for it
    has_ever_run: bool = False
    launch_code: int | None = None  # srun's exit code, once it is gone


# What can happen.


@dataclass(frozen=True)
class Tick:
    pass


@dataclass(frozen=True)
class AgentJoined:
    node: str
    address: str
    place: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentReady:
    node: str


@dataclass(frozen=True)
class StoreUp:
    host: str
    port: int


@dataclass(frozen=True)
class AgentLost:
    node: str
    reason: str
    is_closed: bool = False  # its kernel closed the connection: the process is gone, the node is not


@dataclass(frozen=True)
class RankStatus:
    generation: int
    rank: int
    step: int
    phase: Phase
    sequence: int
    age: float
    median: float


@dataclass(frozen=True)
class AgentFailed:
    """Slurm says that a node could not start its agent, or that it ended before it joined."""

    node: str
    reason: str
    is_end_of_all: bool = False  # for this one srun gives up and kills the others' agents


@dataclass(frozen=True)
class NodeStatus:
    """Where a node's ranks are, in one event: a large run sends thousands of these a second if it were one per rank."""

    ranks: tuple[RankStatus, ...]


@dataclass(frozen=True)
class RankReport:
    """Something a worker said itself."""

    generation: int
    rank: int
    event: str  # ended, failed, peer_lost, checkpoint_saved, ...
    step: int | None = None
    finished: bool = False
    seconds: float = 0.0
    cause: Cause = Cause.CRASH
    error: str = ""
    traceback: str | None = None


@dataclass(frozen=True)
class RankExited:
    generation: int
    rank: int
    code: int | None  # None if ended by a signal
    signal: str | None
    tail: str | None = None


@dataclass(frozen=True)
class ProposalAnswer:
    generation: int
    node: str
    step: int
    is_accepted: bool
    max_step: int


@dataclass(frozen=True)
class Warned:
    """The allocation will end: by time limit or preemption; or somebody asked for an orderly stop."""

    cause: Cause
    reason: str
    seconds_left: float | None  # None: unknown
    requeue: bool = True


@dataclass(frozen=True)
class Terminated:
    """SIGTERM, to us or to an agent, with what Slurm said when asked why."""

    fate: JobFate
    by: str  # "batch" or a node
    seconds_left: float | None = None
    evidence: Mapping[str, str] = field(default_factory=dict)
    why: Cause | None = None  # of a requeue by Slurm: the reason that it gives, where it does
    down: tuple[str, ...] = ()  # our nodes that Slurm holds for down


@dataclass(frozen=True)
class SlurmSaid:
    """The answer to AskSlurm."""

    fate: JobFate
    evidence: Mapping[str, str] = field(default_factory=dict)
    why: Cause | None = None
    down: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchEnded:
    """srun is gone (all agents with it). `words`: what was said last of why nothing started."""

    code: int
    words: str = ""


@dataclass(frozen=True)
class Superseded:
    pass


Event = (
    Tick
    | AgentJoined
    | AgentReady
    | StoreUp
    | AgentLost
    | AgentFailed
    | NodeStatus
    | RankReport
    | RankExited
    | ProposalAnswer
    | Warned
    | Terminated
    | SlurmSaid
    | LaunchEnded
    | Superseded
)

# What can be done.


@dataclass(frozen=True)
class StartStore:
    node: str


@dataclass(frozen=True)
class Form:
    """Start workers: node -> its first rank."""

    generation: int
    first_ranks: Mapping[str, int]
    store: tuple[str, int]


@dataclass(frozen=True)
class Propose:
    generation: int
    step: int
    save: Save


@dataclass(frozen=True)
class Commit:
    generation: int
    step: int
    save: Save


@dataclass(frozen=True)
class KillWorkers:
    generation: int
    with_stacks: bool = False  # they hang: where, goes into the nodes' logs first; under a second


@dataclass(frozen=True)
class Note:
    """An event for the record."""

    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Finish:
    """Requeue if the outcome says so (and Slurm has not done it: `ask`), write the outcome, end."""

    outcome: Outcome
    ask: bool = False


@dataclass(frozen=True)
class AskSlurm:
    """Ask what Slurm does with our job; the answer comes as SlurmSaid."""


@dataclass(frozen=True)
class AskAgain:
    """Slurm gave no usable answer to why we were terminated: put the question again in a moment."""


@dataclass(frozen=True)
class Release:
    """Let the agents go, so that srun ends as soon as the last of them is gone."""


@dataclass(frozen=True)
class Blame:
    """Evidence that a node is bad: it is avoided for a while, by all runs or by this one alone."""

    node: str
    cause: Cause
    reason: str
    is_own: bool = False  # suspected by this run alone: its own code may be to blame


Action = AskAgain | AskSlurm | Blame | StartStore | Form | Propose | Commit | KillWorkers | Note | Finish | Release
