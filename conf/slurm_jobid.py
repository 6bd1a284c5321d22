"""Slurm's job ids in all their spellings: jobs, array tasks, parts of heterogeneous jobs, steps, with a cluster's name.

Owns: that notation, as sbatch, squeue, scontrol and sacct print it and take it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = r"\d{1,10}"
_SPAN = rf"{_NUMBER}(?:-{_NUMBER}(?::{_NUMBER})?)?"
_ID = re.compile(
    rf"(?P<job>{_NUMBER})"
    rf"(?:_(?P<task>{_NUMBER})|_\[(?P<tasks>{_SPAN}(?:,{_SPAN})*(?:,?\.\.\.)?(?:%\d+)?)\]|\+(?P<part>{_NUMBER}))?"
    rf"(?:\.(?P<step>{_NUMBER}|batch|extern|interactive)(?:\+(?P<step_part>{_NUMBER}))?)?"
    r"(?:;(?P<cluster>[A-Za-z0-9_.-]+))?",
    re.ASCII,
)


@dataclass(frozen=True)
class JobId:
    """`str()` gives the text back. At most one of task, tasks and part is set."""

    job: int
    task: int | None = None  # 12_3
    tasks: str | None = None  # 12_[1-4,7%2]: waiting tasks of an array, as squeue shows them; long lists end in ...
    part: int | None = None  # 12+1, of a heterogeneous job
    step: str | None = None  # 12.0, 12.batch, 12.extern, 12.interactive
    step_part: int | None = None  # 12.0+1: the same part, as srun and sacct of some versions write it
    cluster: str | None = None  # 12;alpha, from `sbatch --parsable`

    @property
    def is_job(self) -> bool:
        """Whether a whole job or one array task is meant: what can be waited for, requeued and looked up."""
        return self.tasks is None and self.part is None and self.step is None

    def __str__(self) -> str:
        text = str(self.job)
        text += f"_{self.task}" if self.task is not None else ""
        text += f"_[{self.tasks}]" if self.tasks is not None else ""
        text += f"+{self.part}" if self.part is not None else ""
        text += f".{self.step}" if self.step is not None else ""
        text += f"+{self.step_part}" if self.step_part is not None else ""
        return text + (f";{self.cluster}" if self.cluster is not None else "")


def parse_job_id(text: str) -> JobId:
    """Read one id.

    Raises:
        ValueError: it is none.
    """
    found = _ID.fullmatch(text)
    if not found or int(found["job"]) == 0:
        raise ValueError(f"{text!r}: no job id; expected one like 12, 12_3 (array task) or 12.0 (step)")
    numbers = {name: None if found[name] is None else int(found[name]) for name in ("task", "part", "step_part")}
    step = found["step"]
    return JobId(
        job=int(found["job"]),
        task=numbers["task"],
        tasks=found["tasks"],
        part=numbers["part"],
        step=str(int(step)) if step and step.isdigit() else step,
        step_part=numbers["step_part"],
        cluster=found["cluster"],
    )
