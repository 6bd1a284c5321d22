"""The one exception for mistakes and circumstances that a person has to act on.

Owns: UserError. Printing it is cli.py's; which exit code means what is run/outcome.py's.
"""

from __future__ import annotations

from .run.outcome import EXIT_FAILED, EXIT_USAGE


class UserError(Exception):
    """Something the user can put right. Every line of the message is shown, prefixed with the command.

    Args:
        message: field or file, value found, what was expected, what to do; one line per problem.
        exit_code: EXIT_USAGE (2) for configuration and usage, EXIT_FAILED (1) for everything around it.
    """

    def __init__(self, message: str, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def environment_error(message: str) -> UserError:
    """A UserError about the surroundings (no Slurm, full disk), not about what the user wrote."""
    return UserError(message, EXIT_FAILED)
