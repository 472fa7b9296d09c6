"""The errors that keep prove from a verdict, and the exit statuses of its process."""

PROVEN, IS_WRONG, NOT_JUDGED, OWN_ERROR, NOTHING_PROVEN = range(5)


class NotJudgedError(Exception):
    """Nothing could be judged; the text of the error is one line that says why."""


class NotObservedError(NotJudgedError):
    """The script runs by itself, but not while prove watches it, which is a bug in prove."""
