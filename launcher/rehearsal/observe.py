"""What Slurm says about jobs and nodes, as values: enough for commands and tests of the rehearsal cluster, no more."""

from __future__ import annotations

from dataclasses import dataclass

from .. import slurm_text


@dataclass(frozen=True)
class Job:
    """One job as `scontrol show job` prints it. `nodes` is Slurm's list ("n[1-2]"), empty while it has none."""

    job_id: str
    state: str
    reason: str
    nodes: str
    node_count: int
    restarts: int
    batch_host: str


def parse_job(text: str) -> Job:
    """The first record of `scontrol show job`. Raises ValueError when it is none."""
    fields = next(iter(slurm_text.records(text, "JobId")), {})

    def field(name: str, default: str = "") -> str:
        found = fields.get(name, "(null)")
        return found if found != "(null)" else default

    if not field("JobId") or not field("JobState"):
        raise ValueError(f"not a job: {text.strip()[:200]!r}")
    return Job(
        job_id=field("JobId"),
        state=field("JobState"),
        reason=field("Reason"),
        nodes=field("NodeList"),
        node_count=int(field("NumNodes", "0").split("-")[0]),
        restarts=int(field("Restarts", "0")),
        batch_host=field("BatchHost"),
    )


def parse_node_states(text: str) -> dict[str, str]:
    """`sinfo -h -N -o '%N %T'`: node to state, such as "idle" or "down*" (the star: it does not answer)."""
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line.strip())
