"""Prove that a script trains right on several GPUs, from a test of your own:

assert prove.check(["torchrun", "--standalone", "--nproc-per-node=2", "train.py"]).proven
"""

from prove.api import Result, check
from prove.errors import NotJudgedError, NotObservedError
from prove.judge.table import NOT_SEEN, RIGHT, WARNING, WRONG, ReportRow

__version__ = "0.1.0"

__all__ = [
    "NOT_SEEN",
    "RIGHT",
    "WARNING",
    "WRONG",
    "NotJudgedError",
    "NotObservedError",
    "ReportRow",
    "Result",
    "check",
]
