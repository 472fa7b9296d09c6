"""What keeps prove from a verdict, and with which status its process ends."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """The status with which prove's process ends."""

    PROVEN = 0
    IS_WRONG = 1
    NOT_JUDGED = 2
    OWN_ERROR = 3
    NOTHING_PROVEN = 4


class NotJudgedError(Exception):
    """Nothing could be judged; its text is the one line that says why."""


class NotObservedError(NotJudgedError):
    """The script runs by itself, but not while prove watches it: a mistake of prove's."""
