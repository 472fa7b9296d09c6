"""A mistake that is planted in a script: what a check must find, and with which verdict."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """A list of texts to replace in one of the scripts of packages/prove/evidence/planted.

    With an original, which is also a list of texts to replace, prove compares the script with that.
    """

    name: str
    script: str
    verdict: str
    check: str
    changes: tuple[tuple[str, str], ...]
    original: tuple[tuple[str, str], ...] = ()
