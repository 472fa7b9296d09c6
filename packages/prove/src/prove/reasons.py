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

    # judge_replay: what one rank computes
    EQUAL = Words(
        "gradient of step 1 equal to {apart:.0e} of its length, weights after step {steps} to "
        "{weights_apart:.0e} of their change"
    )
    EQUAL_LESS_PRECISE = Words(
        "gradient of step 1 equal to {apart:.0e} of its length (not in float64: less than "
        "{limit:percent} is not seen), weights after step {steps} to {weights_apart:.0e} of their "
        "change"
    )
    EQUAL_BUT_ROUNDING = Words(
        "gradient of step 1 equal to {apart:.0e} of its length, weights after step {steps} to "
        "{weights_apart:.0e} of their change, though all gradients agree to {gradients_apart:.0e}, "
        "and the weights after step 1 to {first_apart:.0e}: rounding, divided by rounding"
    )
    FIRST_GRADIENT_EQUAL = Words("gradient of step 1 equal to {apart:.0e} of its length")
    GRADIENT_DIFFERS = Words(
        "the gradient of step {step} differs by {apart:percent} of its length from that of one "
        "rank, most in {most_in} ({at})",
        "what the loss divides by must be a number of all ranks, not of one; or a layer mixes the "
        "samples of a batch (attention over the batch)",
        See.LOSS,
    )
    GRADIENT_DIFFERS_GATHER = Words(
        "the gradient of step {step} differs by {apart:percent} of its length from that of one "
        "rank, most in {most_in} ({at}); the step gathers tensors of all ranks",
        "a gather must send gradients back to all ranks, summed: "
        "torch.distributed.nn.functional.all_gather; and the loss must be a mean over all samples",
        See.LOSS,
    )
    CHANGE_DIFFERS = Words(
        "what step {step} changes differs by {apart:percent} of its length from what one rank "
        "changes, most in {most_in} ({at})",
        "the mean of the gradients of all ranks must reach the update",
        See.LOSS,
    )
    LATER_GRADIENT_DIFFERS = Words(
        "the gradient of step {step} differs by {apart:percent} of its length from that of one "
        "rank ({at})",
        "what the loss divides by must be a number of all ranks, not of one; or a layer mixes the "
        "samples of a batch (attention over the batch)",
        See.LOSS,
    )
    WEIGHTS_DIFFER = Words(
        "gradient of step 1 equal to {apart:.0e} of its length, weights after step {steps} to "
        "{weights_apart:.0e} of their change ({at})",
        "something between backward and step depends on the ranks",
        See.LOSS,
    )
    FACTOR = Words(
        "the gradient is {times} that of one rank ({at})",
        "DDP takes the mean over the ranks: the loss must be a mean over the samples of a rank, "
        "or a sum times world_size, divided by a number of all ranks",
        See.LOSS,
    )
    FACTOR_IN_SOME = Words(
        "the gradient is {times} that of one rank in {agreeing} of {parameters} parameters ({at})",
        "look for what is scaled, gathered or averaged once more on the way to these parameters",
        See.LOSS,
    )
    ONE_NTH = Words(
        "the gradient is {times} that of one rank ({at}): a sum where a mean belongs, or divided "
        "by the number of ranks once more",
        "DDP divides by the number of ranks already",
        See.LOSS,
    )
    SUM_OVER_LOCAL_BATCH = Words(
        "the gradient is {times} that of one rank ({at}): the loss is a sum, or is divided by a "
        "constant, and DDP takes the mean of it",
        "take the mean; meant so only if the rate was chosen for the sum over one rank",
        See.LOSS,
    )
    TOO_CLOSE = Words(
        "step {step} differs by {apart:.0e} of its length from that of one rank: too close to tell "
        "a mistake from rounding ({at})"
    )
    LITTLE_PRECISION = Words(
        "gradient of step 1 equal to {apart:.0e} of its length, weights after step {steps} to "
        "{weights_apart:.0e} of their change: too little precision to tell"
    )
    AS_ABOVE = Words(
        "the gradient differs by {apart:percent}, as follows from the rows above ({at})"
    )
    NOT_REPRODUCED = Words(
        "the gradient differs by {apart:percent} from that of one rank, but rank {rank} does not "
        "reproduce its own either: fed its own batches and draws again, step {step} differs by "
        "{noise:percent} ({at}). Something that prove does not see differs from run to run"
    )
    CONTROL_FAILS = Words(
        "the gradient differs by {apart:percent} from that of one rank, but the ranks could not be "
        "run again with their own records: {message}"
    )
    EQUAL_WITH_ONE_DRAW = Words(
        "the gradient differs by {apart:percent} of its length with the numbers that the ranks drew, "
        "and by {apart_of_one_draw:.0e} where all samples get one draw ({places}): a divisor that "
        "depends on the draws, or samples that changed places before"
    )
    OTHER_SHAPE = Words(
        "the one rank's optimizer holds other parameters: {name} has the shape {of_ranks!s}, and "
        "{of_one!s} on one rank; it must not depend on the batch size"
    )
    OTHER_PARAMETERS = Words("the one rank's optimizer holds other parameters")
    OTHER_DTYPES = Words(
        "the ranks have gradients of {of_ranks}, and one rank of {of_one}: try --float32"
    )
    NO_GRADIENTS = Words("the two runs have no gradient in common")
    NOT_FINITE = Words("the gradient of step {step} is not finite ({at})")
    ZERO_GRADIENTS = Words("all gradients are zero: there is nothing to compare")
    TOO_SHORT = Words("the gradient has a length of {length:.0e}: that is rounding ({at})")
    BATCHNORM_ROWS = Words(
        "BatchNorm gets a number of rows that is no multiple of the samples, so nobody knows which "
        "rows are those of which rank"
    )
    BATCHNORM_ROWS_GUESSED = Words(
        "the gradient differs by {apart:percent}, but BatchNorm gets several rows of each sample, "
        "and which of them belong to which rank is a guess ({at})"
    )
    DRAWS_IN_KERNEL = Words(
        "random numbers are drawn inside a kernel, where nobody can record them: {places}"
    )
    TOO_MANY_DRAWS = Words("more random numbers are drawn than can be kept: {places}")
    DRAWS_ESCAPED = Words(
        "random numbers are drawn by a library that prove does not watch, {places}"
    )
    DRAWS_NOT_MATCHED = Words(
        "one rank draws other random numbers, or more of them, than all ranks together: {places}"
    )
    CANNOT_MERGE = Words("the batches of the ranks cannot be put together: {what}")
    NOT_KEPT = Words("{message}")
    REPLAY_FAILS = Words("one rank cannot run it: {kind} at {at}: {message}")
    REPLAY_SAYS = Words("one rank made no step with the recorded batches: {message}")
    NO_REPLAYED_STEP = Words("one rank made no step with the recorded batches")
    NOT_ONE_RANK = Words(
        "the command for one rank started {world_size}: --alone 'COMMAND' says how one is started"
    )
    ONLY_ONE_RANK = Words("it is the only one: start two to compare")
    WHICH_COMMAND = Words("say how one rank is started: --alone 'COMMAND'")
    MODEL_DIVIDED = Words("each rank holds a part of the model")
    ROWS_SPLIT = Words(
        "each rank takes its rows of a batch that all load, with other random numbers"
    )
    NO_LOADER = Words(
        "no DataLoader, and the loss is computed outside of the model: nothing to replay"
    )
    RUN_HANGS = Words("no replay of a run that hangs")
    RUN_FAILS = Words("no replay of a run that ends with an error: {message}")
    RECORDS_MISSING = Words("{present} of {world_size} wrote records")
    COIN_BY_RANK = Words(
        "each rank tosses a coin for its whole batch: {places}",
        "what is decided for a whole batch must be the same on all ranks: a generator with the "
        "same seed on all of them",
        See.LOSS,
    )
    SAME_NOISE = Words(
        "all ranks draw the same numbers for their samples: {places}",
        "torch.manual_seed(seed + rank) after the model is built; numpy and random alike",
    )
    NOISE_BY_SAMPLE = Words("the ranks draw different numbers for their samples: {places}")
    BATCHNORM_LARGE = Words("{layers} per rank, over at least {values} values")
    BATCHNORM_SMALL = Words(
        "{layers} normalizes {values} values on each rank; with those of all ranks, the gradient "
        "differs by {apart:percent}",
        "SyncBatchNorm; meant so if the local batch on the real machine is larger",
        See.LOSS,
    )
