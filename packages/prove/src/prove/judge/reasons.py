"""Why does a row say what it says? Each reason has the words for its evidence, and one cure.

A judge finds a reason and its facts. The sentences stand with each check, and those of the proof in
replay_reasons.py. Braces in them name the facts, and say how wording.py writes them.
"""

from enum import Enum


class Heading:
    """The headings of cures.md, which says more than a cure in the table can."""

    ACCURACY = "test-accuracy-differs-with-the-number-of-ranks"
    BUFFERS = "training-is-good-evaluation-is-bad-batchnorms-running-statistics"
    FILES = "filenotfounderror-while-saving-now-and-then-or-a-file-of-two-halves"
    HANG = "it-hangs"
    LOSS = "the-loss-is-not-that-of-one-process"
    NAN = "the-loss-is-nan"
    PRINTS = "every-line-is-printed-n-times"
    RATE = "a-larger-batch-learns-worse-which-learning-rate"
    RESUME = "it-resumes-differently"
    SAME_ORDER = "every-epoch-has-the-same-order"
    UNEVEN = "the-last-batch-of-an-epoch-hangs"
    UNUSED = "expected-to-have-finished-reduction-in-the-prior-iteration-before-starting-a-new-one"


class Phrase:
    """Parts of a sentence that have facts of their own: see wording.phrase."""

    NOTHING = ""
    DRAWN_BETWEEN = "numbers that a generator of its own draws at {places}"
    READ_BETWEEN = "a pass over the training data without gradients, cut short ({at})"
    FIRST_OUTPUT = "; the first output that differs is that of {layer}"
    OTHER_LAYER = "; rank {rank} calls {layer} where one rank calls {other}"
    AFTER_THE_MODEL = "; its layers give the same on one rank, so look at what comes after them"
    AFTER_EPOCH = "after epoch {epoch}"
    AT_STEP = "at step {step} ({at})"
    ALLOW_FLOAT32 = "if a part of the step computes in float32, --float32 allows for that"
    COMPUTE_IN_FLOAT64 = "let all parts of the step compute in float64 while you prove it"
    TRY_FLOAT32 = "try --float32"
    OWN_DTYPE = "the script must not choose the dtype by the number of ranks or samples"
    SEND_IN_FLOAT64 = "a part of the step computes or sends in fewer bits, though prove runs it in "
    SEND_IN_FLOAT64 += "float64: switch that off while you prove it"
    LEAVE_OUT_FLOAT32 = "without --float32, prove runs it in float64, which tells more"
    KEPT_IN_FLOAT32 = (
        "mend what is said above the table: it kept the script from running in float64"
    )
    PRINTED = "{name} {of_ranks} on {world_size} ranks and {of_one} on one ({at})"


OWN_SEED = "torch.manual_seed(seed + rank) after the model is built; numpy and random alike"


class Reason(Enum):
    """A sentence of a row: evidence, cure, and the Heading in cures.md that says more."""

    def __init__(self, evidence: str, cure: str = "", link: str = "") -> None:
        self.evidence, self.cure, self.link = evidence, cure, link
