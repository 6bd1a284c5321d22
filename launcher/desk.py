"""Questions to Slurm without waiting for them: asked by the supervisor's loop, answered on a pipe it selects on.

Owns: one thread at a time, one RPC for all questions that came meanwhile. A controller that takes fifteen seconds must
not keep the supervisor from its agents.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from . import jobinfo
from .jobinfo import JobInfo

RETRY_AFTER = 1.0  # seconds until a question that got no answer is put once more


@dataclass(frozen=True)
class Question:
    """`about`: start, clock, warning, terminated or launch; `by`: who or what gave rise to it."""

    about: str
    by: str = ""


class Desk:
    """Asks about one job. `read_end` is readable when there are answers."""

    def __init__(self, job_id: str, query: Callable[[str], JobInfo | None] | None = None) -> None:
        self._job_id, self._query = job_id, query or jobinfo.Inquirer()
        self.read_end, self._write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self._lock = threading.Lock()
        self._open: list[Question] = []
        self._answers: list[tuple[Question, JobInfo | None]] = []
        self._is_asking = False

    def ask(self, question: Question) -> None:
        """Returns at once. A question that is still open is not asked twice."""
        with self._lock:
            if question not in self._open:
                self._open.append(question)
            if not self._is_asking:
                self._is_asking = True
                threading.Thread(target=self._work, name="slurm", daemon=True).start()

    def answers(self) -> list[tuple[Question, JobInfo | None]]:
        """Those since the last call; None stands for no answer from Slurm."""
        try:
            os.read(self.read_end, 4096)
        except BlockingIOError:
            return []
        with self._lock:
            found, self._answers = self._answers, []
        return found

    def _work(self) -> None:
        while True:
            with self._lock:
                # Only what was asked before the RPC begins is answered by it.
                questions, self._open = self._open, []
                if not questions:
                    self._is_asking = False
                    return
            info = self._answer()
            if info is None:
                time.sleep(RETRY_AFTER)
                info = self._answer()
            with self._lock:
                self._answers += [(q, info) for q in questions]
            os.write(self._write_end, b"!")

    def _answer(self) -> JobInfo | None:
        try:
            return self._query(self._job_id)
        except Exception:  # whatever Slurm said: the next question must find a desk that works
            traceback.print_exc()
            return None
