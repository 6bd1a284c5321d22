"""What ends a run for good: exceptions that carry their cause, which the worker passes on to the supervisor."""

from __future__ import annotations

from ..launcher.run.outcome import Cause


class BadInputError(ValueError):
    """Settings or data are wrong in a way that only the trainer can see; starting again does not help."""

    cause = Cause.BAD_CONFIG


class DivergedError(Exception):
    """Loss or gradients were not finite too often, or in the very last step."""

    cause = Cause.DIVERGED


class StorageError(Exception):
    """The last checkpoint of the run could not be saved."""

    cause = Cause.STORAGE
