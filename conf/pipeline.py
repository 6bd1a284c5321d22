"""What each pipeline schedule asks for: stages per rank, placement, and how many micro-batches a step must have.

Owns: these facts, for the checks, the planner and the trainer. The order of work within a schedule is
train/plan/schedule.py's. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from .schema import ParallelConfig


@dataclass(frozen=True)
class ScheduleFacts:
    """chunks: stages per rank if not said otherwise. least_chunks, most_chunks: what may be said (None: any number).
    is_v: a rank's second stage counts from the end, so that the first and the last stage lie on rank 0; else stages go
    around the ranks. is_split: the gradient of the input and that of the weights are formed at different times."""

    chunks: int
    least_chunks: int
    most_chunks: int | None
    is_v: bool
    is_split: bool


SCHEDULES = {
    "gpipe": ScheduleFacts(1, 1, 1, is_v=False, is_split=False),  # Huang et al. 2019, arXiv:1811.06965
    "1f1b": ScheduleFacts(1, 1, 1, is_v=False, is_split=False),  # PipeDream-flush, Narayanan et al. 2021
    "interleaved": ScheduleFacts(2, 1, None, is_v=False, is_split=False),  # Narayanan et al. 2021, arXiv:2104.04473
    "interleaved_zb": ScheduleFacts(2, 1, None, is_v=False, is_split=True),  # ZB1P of Qi et al. 2023, arXiv:2401.10241
    "zbv": ScheduleFacts(2, 2, 2, is_v=True, is_split=True),  # ZB-V of the same paper
    "dualpipev": ScheduleFacts(2, 2, 2, is_v=True, is_split=True),  # DeepSeek-AI 2024, arXiv:2412.19437
}


def stages_per_rank(parallel: ParallelConfig) -> int:
    """1 without a pipeline."""
    if parallel.pipeline == 1:
        return 1
    return parallel.pipeline_chunks or SCHEDULES[parallel.pipeline_schedule].chunks


def micro_steps_problem(schedule: str, pipeline: int, chunks: int, micro_steps: int) -> str | None:
    """Why a step of so many micro-batches does not fit the schedule, and what does; None if it fits."""
    if schedule in ("interleaved", "interleaved_zb"):
        rounds = max(1, micro_steps // pipeline)
        if micro_steps % rounds:
            return (
                f"{schedule} goes in rounds of {pipeline} or more: expected a multiple of parallel.pipeline={pipeline}"
            )
        return None
    least = {"1f1b": pipeline, "dualpipev": pipeline * chunks}.get(schedule, 1)
    return None if micro_steps >= least else f"{schedule} needs at least {least}, one for each stage"
