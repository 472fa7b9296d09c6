"""Why does a row say what it says? Each reason has the words for its evidence, and one cure.

A judge finds a reason and its facts; only here do they become sentences. Braces name the facts.
"""

from enum import Enum
from typing import NamedTuple


class See:
    """Headings of cures.md, which say more than a cure in the table can."""

    ACCURACY = "test-accuracy-differs-with-the-number-of-ranks"
    BUFFERS = "training-is-good-evaluation-is-bad-batchnorms-running-statistics"
    FILES = "filenotfounderror-while-saving-now-and-then-or-a-file-of-two-halves"
    HANG = "it-hangs"
    LOSS = "the-loss-is-not-that-of-one-process"
    NAN = "the-loss-is-nan"
    PRINTS = "every-line-is-printed-n-times"
    RATE = "a-larger-batch-learns-worse-which-learning-rate"
    SAME_ORDER = "every-epoch-has-the-same-order"
    UNEVEN = "the-last-batch-of-an-epoch-hangs"
    UNUSED = "expected-to-have-finished-reduction-in-the-prior-iteration-before-starting-a-new-one"


class Words(NamedTuple):
    evidence: str
    cure: str = ""
    link: str = ""  # one of See


class Reason(Enum):
    """In the order of the judges."""

    OTHER = Words("{text}", "{cure}")
