"""Why does a row say what it says? Each reason has the words for its evidence, and one cure.

A judge finds a reason and its facts; only here do they become sentences. Braces name the facts, and
say how they are written: `Prose` below.
"""

from collections.abc import Mapping
from enum import Enum, unique
from string import Formatter
from typing import Any, NamedTuple

MOST_NAMES = 3  # of parameters or places in one row


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


def count(number: int, noun: str) -> str:
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" + ending * (number != 1)


def listed(names: list[str], separator: str = ", ") -> str:
    """The first names, and how many more there are."""
    text = separator.join(names[:MOST_NAMES])
    return text + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1e}"


class Prose(Formatter):
    """str.format, with formats for the facts of a row:

    {steps:n step}      4 steps, and 1 step
    {apart:percent}     2%, and 1.5e-04
    {names}  {parts: + }    a list, joined by a comma or by what is given; of a long one, the first
    {values:each .4g}   a list of numbers, each with four digits
    """

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, Mapping):  # made by `part`
            return self.vformat(Phrase[value["phrase"]].value, (), value)
        if spec.startswith("each "):
            return listed([self.format_field(item, spec[5:]) for item in value])
        if isinstance(value, list | tuple):
            return listed([self.format_field(item, "") for item in value], spec or ", ")
        if spec.startswith("n "):
            return count(value, spec[2:])
        if spec == "percent":
            return percent(value)
        if spec == ".0e" and value == 0:
            return "0"
        return str(super().format_field(value, spec))


@unique
class Phrase(Enum):
    """A part of a sentence that has facts of its own."""

    LINE = '"{text}" ({at})'
    CALLS = "rank {rank} calls {name} at {at}"
    DIFFERENT_CALLS = "{calls:; }"
    NOT_REACHED = "rank {rank} calls {name} at {at}, which rank {others} does not reach"
    UNEQUAL_STEPS = "the ranks have made {steps!s} steps"
    LOST_CONNECTION = "rank {rank} loses its connection at {at}"
    GETS_ANOTHER_MESSAGE = "rank {rank} gets the message of another collective at {at}"
    ENDED_IN_CALL = "the process of rank {rank} ended in {name} at {at}"
    HAS_ENDED = "rank {rank} has ended after {steps} steps"
    WAITS_IN_CALL = "rank {rank} waits in {name} at {at}"
    WAITS_IN_BACKWARD = "rank {rank} waits in backward at {at}"
    WAITS_IN_FORWARD = "rank {rank} waits in DDP's forward at {at}"
    WAITS_IN_ITS_CODE = "rank {rank} waits in its own code at {at}"
    STREAM = "an IterableDataset"
    OTHER_DATA_SET = "another data set on each rank"
    TOO_LONG = "{sampler} is too long to list"
    BEFORE_FIRST_STEP = "before the first step"
    AFTER_STEP = "after step {step}"
    AFTER_EPOCH = "after epoch {epoch}"
    AT_STEP = "at step {step} ({at})"
    AT_EVALUATION = "evaluation"
    AT_THE_END = "the end"
    PRINTED = "{name} {of_ranks} on {world_size} ranks and {of_one} on one ({at})"


class Words(NamedTuple):
    evidence: str
    cure: str = ""
    link: str = ""  # one of See


LOADER = "the loader at {at}, sampler {sampler}"
OVERLAP = (
    f"{{together}} of {{size}} samples are seen in an epoch, {{twice}} of them twice ({LOADER})"
)
SHARD = "DataLoader(dataset, sampler=DistributedSampler(dataset)), or split the data by rank"
SHARD_STREAM = (
    "split by rank and by worker in __iter__: islice(all_samples, rank, None, world_size)"
)
OWN_SEED = "torch.manual_seed(seed + rank) after the model is built; numpy and random alike"
ALL_CALL = "every rank must reach each collective the same number of times, in the same order"
WRITE_ONCE = "if dist.get_rank() == 0, and a barrier before another rank reads it"
OPENED = "{path} is opened for writing by ranks {ranks!s} ({at})"
APART = "{apart} of {tensors} tensors differ between the ranks {when}: {names} ({at})"
LENGTHS = "{samples} samples in {batches} batches on {world_size} ranks together, "
LENGTHS += "{samples_of_original} in {batches_of_original} in the original ({at})"
GLOBAL_DIVISOR = "what the loss divides by must be a number of all ranks, not of one; or a layer "
GLOBAL_DIVISOR += "mixes the samples of a batch (attention over the batch)"


@unique
class Reason(Enum):
    """In the order of the judges."""

    # judge_effects: together
    HANG = Words("{ranks:; }", ALL_CALL, See.HANG)
    HANG_BY_DIFFERENCE = Words("{ranks:; }. The first difference: {difference}", ALL_CALL, See.HANG)
    COLLECTIVES_DIFFER = Words("{difference}", ALL_CALL, See.HANG)
    COLLECTIVES_ALIKE = Words("{calls:n call}, the same on all ranks")
    FILE_OF_SEVERAL_RANKS = Words(OPENED, WRITE_ONCE, See.FILES)
    FILE_THAT_GROWS = Words(
        OPENED, f"{WRITE_ONCE}; meant so only if lines of all ranks may mix", See.FILES
    )
    FILE_BEFORE_TRAINING = Words(
        OPENED,
        f"{WRITE_ONCE}; harmless if all ranks write the same, and none reads it meanwhile",
        See.FILES,
    )
    FILES_OF_ONE_RANK = Words("{files} written, each by one rank")
    REDUCTION_UNFINISHED = Words(
        "on rank {ranks}, some parameters got no gradient in the step before, so DDP stops it "
        "after {steps:n step} ({at})",
        "let all parameters take part on every rank, also where a batch has no targets "
        "(+ 0 * output.sum()); or find_unused_parameters=True",
        See.UNUSED,
    )
    PRINTED_BY_ALL = Words(
        "all ranks print {lines}",
        "if dist.get_rank() == 0; meant so only if each rank reports on itself",
        See.PRINTS,
    )

    # judge_data: samples
    NO_INPUTS = Words("no step in a pass over a DataLoader, nor inputs that differ")
    SAME_INPUTS = Words(
        "all ranks call the model with the same tensors, {calls} times",
        "seed by rank, or split the data by rank",
        See.LOSS,
    )
    DIFFERENT_INPUTS = Words("no DataLoader; the ranks call the model with different tensors")
    ROWS_SPLIT = Words(f"all ranks load the same batches, and each takes its part ({LOADER})")
    SAME_SAMPLES = Words(
        f"all ranks draw the same samples in the same order: {LOADER}", SHARD, See.LOSS
    )
    SUBSETS_DIFFER = Words(
        "the ranks split the data set differently: of {own} samples that rank 0 may draw, all "
        f"ranks may draw {{common}} ({LOADER})",
        "give random_split a generator with the same seed on all ranks",
        See.LOSS,
    )
    WITH_REPLACEMENT = Words("{sampler} draws with replacement, other samples per rank")
    SAMPLES_LEFT_OUT = Words(
        f"{{together}} of {{size}} samples are in an epoch, {{lost}} in that of no rank ({LOADER})",
        "meant so only if the others are left out on purpose",
    )
    SAMPLES_SPLIT = Words(f"{{counts: + }} of {{size}} samples, {{twice}} of them twice ({LOADER})")
    ALL_SAMPLES_EACH = Words(
        "each rank draws all {size} samples, in another order: an epoch is {world_size} epochs "
        f"({LOADER})",
        f"{SHARD}; meant so only if the number of epochs was divided, too",
        See.LOSS,
    )
    SAMPLERS_DISAGREE = Words(
        OVERLAP,
        "the same seed for the sampler of all ranks, and the right num_replicas and rank",
        See.LOSS,
    )
    SAMPLES_OVERLAP = Words(
        OVERLAP,
        SHARD,
        See.LOSS,
    )
    SAME_CONTENTS = Words(
        f"all ranks draw the same {{seen}} samples in the same order ({LOADER}; {{kind}})",
        SHARD,
        See.LOSS,
    )
    CONTENTS_UNKNOWN = Words(f"samples cannot be told apart ({LOADER}; {{kind}})")
    CONTENTS_SHARED = Words(
        "{share:.0%} of the first {seen} samples are those of another rank, by content "
        f"({LOADER}; {{kind}})",
        SHARD_STREAM,
        See.LOSS,
    )
    CONTENTS_SPLIT = Words("{share:.0%} of {seen} samples are shared ({kind})")
    WORKERS_ALIKE = Words(
        f"each of the {{workers}} workers of a rank yields the same samples ({LOADER})",
        SHARD_STREAM,
        See.LOSS,
    )
    FIELDS_DIFFER = Words(
        f"sample 0 has the same input on all ranks, and another {{names}} ({LOADER})",
        "number the labels in an order that all ranks share: sorted(set(names)), and zlib.crc32 or "
        "hashlib where the script calls hash(), which each process salts anew",
        See.LOSS,
    )
    DATA_SETS_DIFFER = Words(
        f"sample 0 differs between the ranks, and DistributedSampler splits it again ({LOADER})",
        "make the data with the same seed on all ranks, or load it from a file",
        See.LOSS,
    )

    # judge_data: batches, order, draws
    NO_END_OF_DATA = Words("no rank reached the end of its data")
    UNEQUAL_BUT_JOINED = Words("{batches!s}, and Join lets the shorter ones wait")
    UNEQUAL_BUT_CUT = Words("{batches!s}, but the script ends its epochs earlier")
    UNEQUAL_BATCHES = Words(
        "{batches!s} batches on the ranks: whoever has more waits for ever ({at})",
        "DistributedSampler makes them equal; or drop_last; or Join",
        See.UNEVEN,
    )
    UNEQUAL_BATCH_SIZES = Words(
        "{batches} on each rank, but local batches of {sizes!s} samples weigh the same ({at})",
        "equal local batches, or a mean over the global batch",
        See.LOSS,
    )
    EQUAL_BATCHES = Words("{batches} on each rank")
    NO_SECOND_EPOCH = Words("there was no second epoch")
    ORDER_CHANGES = Words("epochs 1 and 2 differ")
    DATA_CHANGES = Words("the data set itself changes from epoch to epoch")
    EPOCH_NOT_SET = Words(
        "epochs 1 and 2 have the same order: loader at {at}, sampler {sampler}",
        "sampler.set_epoch(epoch) before each epoch",
        See.SAME_ORDER,
    )
    ORDER_FIXED = Words("fixed, and no shuffling was asked for")
    ORDER_REPEATS = Words(
        "epochs 1 and 2 have the same order: loader at {at}, sampler {sampler}",
        "another order in each epoch; meant so only if the order is part of the data",
        See.SAME_ORDER,
    )
    MASKS_DIFFER = Words("the ranks draw different masks")
    MASKS_ALIKE = Words(
        "all ranks drop the same positions ({at})",
        f"{OWN_SEED}; no mistake, but less noise than one process has",
    )
    WORKER_SEEDS_ALIKE = Words(
        "the workers of all ranks draw the same numbers: one seed (loader at {at})",
        OWN_SEED,
    )
    DRAWS_ALIKE = Words(
        "all ranks draw the same numbers of {generators} while they load ({at})", OWN_SEED
    )
    DRAWS_DIFFER = Words("the ranks draw different random numbers")
    WORKER_SEEDS_DIFFER = Words("the loaders of the ranks give their workers different seeds")
    ORIGINAL_WITHOUT_LENGTH = Words("a loader does not say how many samples it has")
    ORIGINAL_HAS_MORE_SAMPLES = Words(
        LENGTHS,
        "drop_last in the sampler and in the loader only if the original has it; keep a sampler of "
        "its own, and deal out what that draws",
        See.LOSS,
    )
    ORIGINAL_HAS_OTHER_BATCHES = Words(
        LENGTHS,
        "the original's batch size / world_size on each rank, and its drop_last; meant so only if "
        "the learning rate was chosen for this global batch",
        See.RATE,
    )
    ORIGINAL_HAS_THE_SAME_EPOCH = Words(LENGTHS)

    # judge_evaluation
    NO_EVALUATION = Words(
        "no pass over a loader without a backward, after a step; if yours comes later, raise "
        "--batches"
    )
    EVALUATED_BY_SOME = Words("by {ranks} of {world_size} ranks ({at})")
    EVALUATED_UNKNOWN = Words("the samples of {at} cannot be told apart")
    EVALUATED_BY_EACH = Words(
        "each rank evaluates all {size} samples ({at})",
        "each rank a part, then all_reduce; no mistake if the results are not added up",
        See.ACCURACY,
    )
    EVALUATED_TWICE = Words(
        "{twice} of {size} samples are counted twice ({at}, {sampler})",
        "Subset(dataset, range(rank, len(dataset), world_size))",
        See.ACCURACY,
    )
    EVALUATED_NOT_ALL = Words(
        "{lost} of {size} samples are left out ({at})", "no drop_last for evaluation", See.ACCURACY
    )
    EVALUATED_NOT_SUMMED = Words(
        "each rank evaluates a part of the {size} samples, and no collective follows ({at})",
        "all_reduce sums and counts, then divide",
        See.ACCURACY,
    )
    EVALUATED_ONCE = Words("each of {size} samples once ({at})")
    EVALUATED_FIRST_ONES = Words(
        "each rank stops after {given} of {batches} batches: {samples} of {size} samples ({at}), "
        "the first ones, each once"
    )
    EVALUATED_OTHERS = Words(
        "each rank stops after {given} of {batches} batches: {samples} of {size} samples ({at}); "
        "on another number of ranks, others",
        "choose this part before it is dealt out, with the same seed on all ranks",
        See.ACCURACY,
    )

    # judge_model
    CLIPS_SCALED = Words(
        "gradients are clipped while they are multiplied by the loss scale ({at})",
        "scaler.unscale_(optimizer) before clipping",
    )
    CLIPS_UNSCALED = Words("of gradients that are not scaled")
    ZERO_GRADIENTS = Words(
        "all gradients are exactly zero in all steps ({at})",
        "the loss does not depend on the weights: is it a cross-entropy over one class?",
    )
    GRADIENTS_NOT_FINITE = Words(
        "the gradients of {steps:n step} are not finite, first those of step {step} ({at}, ranks "
        "{ranks}): such numbers cannot be compared",
        "find the batch: torch.autograd.set_detect_anomaly(True); and all ranks must leave out "
        "the same step",
        See.NAN,
    )
    PARAMETERS_HELD = Words("it holds the {parameters} parameters of the model")
    NO_PARAMETER_HELD = Words(
        "no optimizer ({optimizers}) holds a parameter of the model that DDP wraps at {at}",
        "make the optimizer from ddp.parameters(), after wrapping",
    )
    PARAMETERS_MISSING = Words(
        "{missing} of {parameters} parameters are in no optimizer: {names}",
        "add them, or requires_grad_(False)",
    )
    PARAMETERS_UNUSED = Words(
        "no gradient ever reached {names}", "use them, or freeze them", See.UNUSED
    )
    LOSS_NOT_DIVIDED = Words(
        "{backwards} backwards at {at} add up, and the loss is not divided",
        "loss / {backwards}; meant so only if the loss is a sum, or the rate is divided",
    )
    MODEL_IS_DIVIDED = Words("the ranks hold different parts of the model, or work in groups")
    WEIGHTS_ALIKE = Words("the same on all ranks after {steps:n step}")
    WEIGHTS_AVERAGED_LATER = Words(
        f"{APART}, and agree again later",
        "meant so only for local SGD, which averages weights now and then",
        See.LOSS,
    )
    WEIGHTS_OUTSIDE_DDP = Words(
        f"{APART}; DDP does not hold {{outside}}",
        "wrap one module that holds all trained parameters",
        See.LOSS,
    )
    WEIGHTS_DIFFER = Words(
        APART, "DDP, or broadcast all weights once and average all gradients in each step", See.LOSS
    )
    LOCAL_STEPS = Words("each rank steps with its own: weights are averaged, it seems")
    GRADIENTS_DIFFER = Words(
        "the ranks step with different gradients in {apart} of {tensors} tensors: {names} (step "
        "{step} at {at})",
        "forward and backward through DDP; no_sync for all micro-batches but the last",
        See.LOSS,
    )
    GRADIENTS_KEPT = Words(
        "at {steps} steps, p.grad still held the gradient of the step before ({at})",
        "optimizer.zero_grad() in each step",
        See.NAN,
    )
    NO_MULTIPLE_OF_MEAN = Words(
        "no multiple of the mean over the ranks: changed between backward and step?"
    )
    MEAN_OF_RANKS = Words("the mean over the ranks, in {steps:n step}")
    CHANGED_BEFORE_STEP = Words(
        "changed before the step: {factor:.4g} times the mean (step {step} at {at})"
    )
    AROUND_DDP = Words(
        "{around} training forwards go around DDP at {places}, {through} through it",
        "call ddp(x), not ddp.module(x) or model(x)",
        See.LOSS,
    )
    THROUGH_DDP = Words("{forwards:n training forward}")
    NO_DDP = Words("no DDP: see whether the gradients are averaged by hand")
    RATES_BY_RANK = Words(
        "{rates!s} on the ranks {when}",
        "the same schedule on all ranks: average what it depends on first",
        See.LOSS,
    )
    METRICS_BY_RANK = Words(
        "{values:each .4g} on the ranks go into ReduceLROnPlateau, after {steps:n step} ({at})",
        "average the metric over the ranks first, so that all lower the rate in the same epoch",
        See.LOSS,
    )
    METRICS_ALIKE = Words("the ranks give ReduceLROnPlateau the same {numbers:n number}")
    LOSS_SCALES_BY_RANK = Words(
        "{scales!s} on the ranks {when}", "the same GradScaler settings on all ranks"
    )
    BUFFERS_DIFFER = Words(
        "{apart} of {buffers} differ between the ranks at {when}: {names}",
        "broadcast them from rank 0 before evaluation, or SyncBatchNorm",
        See.BUFFERS,
    )
    EVALUATED_MODELS_DIFFER = Words(
        "{module} is not the same on all ranks: {apart} of its {tensors} tensors differ after "
        "{steps:n step}, among them {names}",
        "update a copy of the model on every rank, or broadcast it before it is evaluated; meant "
        "so only if each rank has a model of its own",
        See.BUFFERS,
    )
    EVALUATED_BUFFERS_DIFFER = Words(
        "{module} has other buffers on each rank: {apart} of its {tensors} tensors differ after "
        "{steps:n step}, among them {names}",
        "broadcast them from rank 0 before evaluation, or SyncBatchNorm",
        See.BUFFERS,
    )
    EVALUATED_MODELS_ALIKE = Words("{modules}: the same on all ranks")
    BUFFERS_ALIKE = Words("the same on all ranks at {when}")

    # judge_replay: what one rank computes
    EQUAL_TO_ONE = Words(
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
        GLOBAL_DIVISOR,
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
        GLOBAL_DIVISOR,
        See.LOSS,
    )
    WEIGHTS_OF_ONE_DIFFER = Words(
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
        "a mistake from rounding ({at})",
        "if a part of the step computes in float32, --float32 allows for that",
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
        "the gradient differs by {apart:percent} of its length with the numbers that the ranks "
        "drew, and by {apart_of_one_draw:.0e} where all samples get one draw ({places}): a "
        "divisor that "
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
    BEGINS_LATER = Words(
        "this optimizer makes its first step in the second epoch ({at}), and only the first is "
        "replayed: to compare it, let it begin in the first"
    )
    NOT_FINITE = Words("the gradient of step {step} is not finite ({at})")
    NOTHING_TO_COMPARE = Words("all gradients are zero: there is nothing to compare")
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
    DRAWS_NOT_GIVEN = Words(
        "without a DataLoader, the original draws its own random numbers: {places}; switch dropout "
        "and noise off in both scripts to compare them"
    )
    CANNOT_MERGE = Words("the batches of the ranks cannot be put together: {what}")
    NOT_KEPT = Words("{message}")
    REPLAY_FAILS = Words(
        "one rank, with the samples of all ranks in its batches, cannot run it: {kind} at {at}: "
        "{message}",
        "if the command names the number of ranks, --alone 'COMMAND' says how one is started; if "
        "the script fixes the number of samples, take it from the batch: x.shape[0]",
    )
    REPLAY_SAYS = Words("one rank made no step with the recorded batches: {message}")
    NO_REPLAYED_STEP = Words("one rank made no step with the recorded batches")
    NOT_ONE_RANK = Words(
        "the command for one rank started {world_size}: --alone 'COMMAND' says how one is started"
    )
    NO_STEP = Words(
        "no parameter changed in {batches:n batch}: if a step needs more, raise --batches; weights "
        "that are no parameters of a module (torch.func) are not seen"
    )
    NO_BATCH = Words(
        "no optimizer of torch made a step, and what the script itself changes is seen only while "
        "a DataLoader gives the batches"
    )
    ONLY_ONE_RANK = Words("it is the only one: start two to compare")
    WHICH_COMMAND = Words("say how one rank is started: --alone 'COMMAND'")
    MODEL_DIVIDED = Words("each rank holds a part of the model")
    OTHER_ROWS = Words(
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
    SAME_NOISE = Words("all ranks draw the same numbers for their samples: {places}", OWN_SEED)
    NOISE_BY_SAMPLE = Words("the ranks draw different numbers for their samples: {places}")

    # judge_replay: beside the gradients
    RATES_OF_ONE_RANK = Words("the learning rates of one rank")
    SCHEDULE_FOLLOWS_LOADER = Words(
        "it takes {batches} batches on {world_size} ranks and {batches_of_one} on one, which are "
        "{epochs:.3g} and {epochs_of_one:.3g} epochs"
    )
    SCHEDULE_IGNORES_LOADER = Words(
        "it takes {batches} batches on any number of ranks: {epochs:.3g} epochs of {epoch} batches "
        "on {world_size} ranks, {epochs_of_one:.3g} of {epoch_of_one} on one ({at})",
        "count its steps by len(loader) of a rank; meant so only if training ends after a number "
        "of steps, and not of epochs",
        See.RATE,
    )
    HIGHEST_RATE_DIFFERS = Words(
        "highest learning rate {of_ranks:.4g} on {world_size} ranks and {of_one:.4g} on one ({at})",
        "meant so only if you scale the rate with the global batch on purpose",
        See.RATE,
    )
    RATE_DIFFERS = Words(
        "learning rate {of_ranks:.4g} on {world_size} ranks and {of_one:.4g} on one, {when}",
        "meant so only if you scale the rate with the global batch on purpose, or step a schedule "
        "for one rank once per rank",
        See.RATE,
    )
    RATE_AFTER_EPOCH_DIFFERS = Words(
        "learning rate {of_ranks:.4g} on {world_size} ranks and {of_one:.4g} on one, {when}",
        "one scheduler.step() per epoch or step on each rank, not one per rank; meant so only if "
        "you scale the rate with the global batch on purpose",
        See.RATE,
    )
    NUMBERS_DIFFER = Words(
        "after the same steps, {numbers}",
        "add sums and counts up over the ranks, then divide; meant so only if each rank reports on "
        "its own samples, or on some that it has drawn",
        See.ACCURACY,
    )
    NUMBERS_OF_ONE_RANK = Words("they are those of one rank ({numbers} compared)")
    BATCHNORM_OF_EACH_RANK = Words("{layers} per rank, over at least {values} values")
    BATCHNORM_OF_FEW = Words(
        "{layers} normalizes {values} values on each rank; with those of all ranks, the gradient "
        "differs by {apart:percent}",
        "SyncBatchNorm; meant so if the local batch on the real machine is larger",
        See.LOSS,
    )
