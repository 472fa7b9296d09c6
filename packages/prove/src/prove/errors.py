"""The errors that keep prove from a verdict, and the exit statuses of its process."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """The status with which prove's process ends."""

    PROVEN = 0
    IS_WRONG = 1
    NOT_JUDGED = 2
    OWN_ERROR = 3
    NOTHING_PROVEN = 4


class NotJudgedError(Exception):
    """Nothing could be judged; the text of the error is one line that says why."""


class NotObservedError(NotJudgedError):
    """The script runs by itself, but not while prove watches it, which is a bug in prove."""
