"""What keeps prove from a verdict, and with which status its process ends."""

PROVEN, IS_WRONG, NOT_JUDGED, OWN_ERROR, NOTHING_PROVEN = range(5)


class NotJudgedError(Exception):
    """Nothing could be judged; its text is the one line that says why."""


class NotObservedError(NotJudgedError):
    """The script runs by itself, but not while prove watches it: a mistake of prove's."""
