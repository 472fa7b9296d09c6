"""Why does a row say what it says? Each reason has the words for its evidence, and one cure.

A judge finds a reason and its facts; only here are the sentences that they become. Braces name the
facts, and say how wording.py writes them.
"""

from enum import Enum, unique


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


class Phrase:
    """Parts of a sentence that have facts of their own: see wording.part."""

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
    """Evidence, cure, and where cures.md says more (one of See), in the order of the judges."""

    def __init__(self, evidence: str, cure: str = "", link: str = "") -> None:
        self.evidence, self.cure, self.link = evidence, cure, link

    # judge_effects: together
    HANG = ("{ranks:; }", ALL_CALL, See.HANG)
    HANG_BY_DIFFERENCE = ("{ranks:; }. The first difference: {difference}", ALL_CALL, See.HANG)
    COLLECTIVES_DIFFER = ("{difference}", ALL_CALL, See.HANG)
    COLLECTIVES_ALIKE = "{calls:n call}, the same on all ranks"
    FILE_OF_SEVERAL_RANKS = (OPENED, WRITE_ONCE, See.FILES)
    FILE_THAT_GROWS = (
        OPENED,
        f"{WRITE_ONCE}; meant so only if lines of all ranks may mix",
        See.FILES,
    )
    FILE_BEFORE_TRAINING = (
        OPENED,
        f"{WRITE_ONCE}; harmless if all ranks write the same, and none reads it meanwhile",
        See.FILES,
    )
    FILES_OF_ONE_RANK = "{files} written, each by one rank"
    REDUCTION_UNFINISHED = (
        "on rank {ranks}, some parameters got no gradient in the step before, so DDP stops it "
        "after {steps:n step} ({at})",
        "let all parameters take part on every rank, also where a batch has no targets "
        "(+ 0 * output.sum()); or find_unused_parameters=True",
        See.UNUSED,
    )
    PRINTED_BY_ALL = (
        "all ranks print {lines}",
        "if dist.get_rank() == 0; meant so only if each rank reports on itself",
        See.PRINTS,
    )

    # judge_data: samples
    NO_INPUTS = "no step in a pass over a DataLoader, nor inputs that differ"
    SAME_INPUTS = (
        "all ranks call the model with the same tensors, {calls} times",
        "seed by rank, or split the data by rank",
        See.LOSS,
    )
    DIFFERENT_INPUTS = "no DataLoader; the ranks call the model with different tensors"
    ROWS_SPLIT = f"all ranks load the same batches, and each takes its part ({LOADER})"
    SAME_SAMPLES = (f"all ranks draw the same samples in the same order: {LOADER}", SHARD, See.LOSS)
    SUBSETS_DIFFER = (
        "the ranks split the data set differently: of {own} samples that rank 0 may draw, all "
        f"ranks may draw {{common}} ({LOADER})",
        "give random_split a generator with the same seed on all ranks",
        See.LOSS,
    )
    WITH_REPLACEMENT = "{sampler} draws with replacement, other samples per rank"
    SAMPLES_LEFT_OUT = (
        f"{{together}} of {{size}} samples are in an epoch, {{lost}} in that of no rank ({LOADER})",
        "meant so only if the others are left out on purpose",
    )
    SAMPLES_SPLIT = f"{{counts: + }} of {{size}} samples, {{twice}} of them twice ({LOADER})"
    ALL_SAMPLES_EACH = (
        "each rank draws all {size} samples, in another order: an epoch is {world_size} epochs "
        f"({LOADER})",
        f"{SHARD}; meant so only if the number of epochs was divided, too",
        See.LOSS,
    )
    SAMPLERS_DISAGREE = (
        OVERLAP,
        "the same seed for the sampler of all ranks, and the right num_replicas and rank",
        See.LOSS,
    )
    SAMPLES_OVERLAP = (
        OVERLAP,
        SHARD,
        See.LOSS,
    )
    SAME_CONTENTS = (
        f"all ranks draw the same {{seen}} samples in the same order ({LOADER}; {{kind}})",
        SHARD,
        See.LOSS,
    )
    CONTENTS_UNKNOWN = f"samples cannot be told apart ({LOADER}; {{kind}})"
    CONTENTS_SHARED = (
        "{share:.0%} of the first {seen} samples are those of another rank, by content "
        f"({LOADER}; {{kind}})",
        SHARD_STREAM,
        See.LOSS,
    )
    CONTENTS_SPLIT = "{share:.0%} of {seen} samples are shared ({kind})"
    WORKERS_ALIKE = (
        f"each of the {{workers}} workers of a rank yields the same samples ({LOADER})",
        SHARD_STREAM,
        See.LOSS,
    )
    FIELDS_DIFFER = (
        f"sample 0 has the same input on all ranks, and another {{names}} ({LOADER})",
        "number the labels in an order that all ranks share: sorted(set(names)), and zlib.crc32 or "
        "hashlib where the script calls hash(), which each process salts anew",
        See.LOSS,
    )
    DATA_SETS_DIFFER = (
        f"sample 0 differs between the ranks, and DistributedSampler splits it again ({LOADER})",
        "make the data with the same seed on all ranks, or load it from a file",
        See.LOSS,
    )

    # judge_data: batches, order, draws
    NO_END_OF_DATA = "no rank reached the end of its data"
    UNEQUAL_BUT_JOINED = "{batches!s}, and Join lets the shorter ones wait"
    UNEQUAL_BUT_CUT = "{batches!s}, but the script ends its epochs earlier"
    UNEQUAL_BATCHES = (
        "{batches!s} batches on the ranks: whoever has more waits for ever ({at})",
        "DistributedSampler makes them equal; or drop_last; or Join",
        See.UNEVEN,
    )
    UNEQUAL_BATCH_SIZES = (
        "{batches} on each rank, but local batches of {sizes!s} samples weigh the same ({at})",
        "equal local batches, or a mean over the global batch",
        See.LOSS,
    )
    EQUAL_BATCHES = "{batches} on each rank"
    NO_SECOND_EPOCH = "there was no second epoch"
    ORDER_CHANGES = "epochs 1 and 2 differ"
    DATA_CHANGES = "the data set itself changes from epoch to epoch"
    EPOCH_NOT_SET = (
        "epochs 1 and 2 have the same order: loader at {at}, sampler {sampler}",
        "sampler.set_epoch(epoch) before each epoch",
        See.SAME_ORDER,
    )
    ORDER_FIXED = "fixed, and no shuffling was asked for"
    ORDER_REPEATS = (
        "epochs 1 and 2 have the same order: loader at {at}, sampler {sampler}",
        "another order in each epoch; meant so only if the order is part of the data",
        See.SAME_ORDER,
    )
    MASKS_DIFFER = "the ranks draw different masks"
    MASKS_ALIKE = (
        "all ranks drop the same positions ({at})",
        f"{OWN_SEED}; no mistake, but less noise than one process has",
    )
    WORKER_SEEDS_ALIKE = (
        "the workers of all ranks draw the same numbers: one seed (loader at {at})",
        OWN_SEED,
    )
    DRAWS_ALIKE = (
        "all ranks draw the same numbers of {generators} while they load ({at})",
        OWN_SEED,
    )
    DRAWS_DIFFER = "the ranks draw different random numbers"
    WORKER_SEEDS_DIFFER = "the loaders of the ranks give their workers different seeds"
    ORIGINAL_WITHOUT_LENGTH = "a loader does not say how many samples it has"
    ORIGINAL_HAS_MORE_SAMPLES = (
        LENGTHS,
        "drop_last in the sampler and in the loader only if the original has it; keep a sampler of "
        "its own, and deal out what that draws",
        See.LOSS,
    )
    ORIGINAL_HAS_OTHER_BATCHES = (
        LENGTHS,
        "the original's batch size / world_size on each rank, and its drop_last; meant so only if "
        "the learning rate was chosen for this global batch",
        See.RATE,
    )
    ORIGINAL_HAS_THE_SAME_EPOCH = LENGTHS

    # judge_evaluation
    NO_EVALUATION = (
        "no pass over a loader without a backward, after a step; if yours comes later, raise "
        "--batches"
    )
    EVALUATED_BY_SOME = "by {ranks} of {world_size} ranks ({at})"
    EVALUATED_OWN_DATASETS = "each rank evaluates a data set of its own ({at})"
    EVALUATED_UNKNOWN = "the samples of {at} cannot be told apart"
    EVALUATED_BY_EACH = (
        "each rank evaluates all {size} samples ({at})",
        "each rank a part, then all_reduce; no mistake if the results are not added up",
        See.ACCURACY,
    )
    EVALUATED_TWICE = (
        "{twice} of {size} samples are counted twice ({at}, {sampler})",
        "Subset(dataset, range(rank, len(dataset), world_size))",
        See.ACCURACY,
    )
    EVALUATED_NOT_ALL = (
        "{lost} of {size} samples are left out ({at})",
        "no drop_last for evaluation",
        See.ACCURACY,
    )
    EVALUATED_NOT_SUMMED = (
        "each rank evaluates a part of the {size} samples, and no collective follows ({at})",
        "all_reduce sums and counts, then divide",
        See.ACCURACY,
    )
    EVALUATED_ONCE = "each of {size} samples once ({at})"
    EVALUATED_FIRST_ONES = (
        "each rank stops after {given} of {batches} batches: {samples} of {size} samples ({at}), "
        "the first ones, each once"
    )
    EVALUATED_OTHERS = (
        "each rank stops after {given} of {batches} batches: {samples} of {size} samples ({at}); "
        "on another number of ranks, others",
        "choose this part before it is dealt out, with the same seed on all ranks",
        See.ACCURACY,
    )

    # judge_model
    CLIPS_SCALED = (
        "gradients are clipped while they are multiplied by the loss scale ({at})",
        "scaler.unscale_(optimizer) before clipping",
    )
    CLIPS_UNSCALED = "of gradients that are not scaled"
    ZERO_GRADIENTS = (
        "all gradients are exactly zero in all steps ({at})",
        "the loss does not depend on the weights: is it a cross-entropy over one class?",
    )
    GRADIENTS_NOT_FINITE = (
        "the gradients of {steps:n step} are not finite, first those of step {step} ({at}, ranks "
        "{ranks}): such numbers cannot be compared",
        "find the batch: torch.autograd.set_detect_anomaly(True); and all ranks must leave out "
        "the same step",
        See.NAN,
    )
    PARAMETERS_HELD = "it holds the {parameters} parameters of the model"
    NO_PARAMETER_HELD = (
        "no optimizer ({optimizers}) holds a parameter of the model that DDP wraps at {at}",
        "make the optimizer from ddp.parameters(), after wrapping",
    )
    PARAMETERS_MISSING = (
        "{missing} of {parameters} parameters are in no optimizer: {names}",
        "add them, or requires_grad_(False)",
    )
    PARAMETERS_UNUSED = ("no gradient ever reached {names}", "use them, or freeze them", See.UNUSED)
    LOSS_NOT_DIVIDED = (
        "{backwards} backwards at {at} add up, and the loss is not divided",
        "loss / {backwards}; meant so only if the loss is a sum, or the rate is divided",
    )
    MODEL_IS_DIVIDED = "the ranks hold different parts of the model, or work in groups"
    WEIGHTS_ALIKE = "the same on all ranks after {steps:n step}"
    WEIGHTS_AVERAGED_LATER = (
        f"{APART}, and agree again later",
        "meant so only for local SGD, which averages weights now and then",
        See.LOSS,
    )
    WEIGHTS_OUTSIDE_DDP = (
        f"{APART}; DDP does not hold {{outside}}",
        "wrap one module that holds all trained parameters",
        See.LOSS,
    )
    WEIGHTS_DIFFER = (
        APART,
        "DDP, or broadcast all weights once and average all gradients in each step",
        See.LOSS,
    )
    LOCAL_STEPS = "each rank steps with its own: weights are averaged, it seems"
    GRADIENTS_DIFFER = (
        "the ranks step with different gradients in {apart} of {tensors} tensors: {names} (step "
        "{step} at {at})",
        "forward and backward through DDP; no_sync for all micro-batches but the last",
        See.LOSS,
    )
    GRADIENTS_KEPT = (
        "at {steps} steps, p.grad still held the gradient of the step before ({at})",
        "optimizer.zero_grad() in each step",
        See.NAN,
    )
    NO_MULTIPLE_OF_MEAN = (
        "no multiple of the mean over the ranks: changed between backward and step?"
    )
    MEAN_OF_RANKS = "the mean over the ranks, in {steps:n step}"
    CHANGED_BEFORE_STEP = (
        "changed before the step: {factor:.4g} times the mean (step {step} at {at})"
    )
    AROUND_DDP = (
        "{around} training forwards go around DDP at {places}, {through} through it",
        "call ddp(x), not ddp.module(x) or model(x)",
        See.LOSS,
    )
    THROUGH_DDP = "{forwards:n training forward}"
    NO_DDP = "no DDP: see whether the gradients are averaged by hand"
    RATES_BY_RANK = (
        "{rates!s} on the ranks {when}",
        "the same schedule on all ranks: average what it depends on first",
        See.LOSS,
    )
    METRICS_BY_RANK = (
        "{values:each .4g} on the ranks go into ReduceLROnPlateau, after {steps:n step} ({at})",
        "average the metric over the ranks first, so that all lower the rate in the same epoch",
        See.LOSS,
    )
    METRICS_ALIKE = "the ranks give ReduceLROnPlateau the same {numbers:n number}"
    LOSS_SCALES_BY_RANK = (
        "{scales!s} on the ranks {when}",
        "the same GradScaler settings on all ranks",
    )
    BUFFERS_DIFFER = (
        "{apart} of {buffers} differ between the ranks at {when}: {names}",
        "broadcast them from rank 0 before evaluation, or SyncBatchNorm",
        See.BUFFERS,
    )
    EVALUATED_MODELS_DIFFER = (
        "{module} is not the same on all ranks: {apart} of its {tensors} tensors differ after "
        "{steps:n step}, among them {names}",
        "update a copy of the model on every rank, or broadcast it before it is evaluated; meant "
        "so only if each rank has a model of its own",
        See.BUFFERS,
    )
    EVALUATED_BUFFERS_DIFFER = (
        "{module} has other buffers on each rank: {apart} of its {tensors} tensors differ after "
        "{steps:n step}, among them {names}",
        "broadcast them from rank 0 before evaluation, or SyncBatchNorm",
        See.BUFFERS,
    )
    EVALUATED_MODELS_ALIKE = "{modules}: the same on all ranks"
    BUFFERS_ALIKE = "the same on all ranks at {when}"

    # judge_replay: what one rank computes
    EQUAL_TO_ONE = (
        "gradient of step 1 equal to {apart:.0e} of its length, weights after step {steps} to "
        "{weights_apart:.0e} of their change"
    )
    EQUAL_LESS_PRECISE = (
        "gradient of step 1 equal to {apart:.0e} of its length (not in float64: less than "
        "{limit:percent} is not seen), weights after step {steps} to {weights_apart:.0e} of their "
        "change"
    )
    EQUAL_BUT_ROUNDING = (
        "gradient of step 1 equal to {apart:.0e} of its length, weights after step {steps} to "
        "{weights_apart:.0e} of their change, though all gradients agree to {gradients_apart:.0e}, "
        "and the weights after step 1 to {first_apart:.0e}: rounding, divided by rounding"
    )
    FIRST_GRADIENT_EQUAL = "gradient of step 1 equal to {apart:.0e} of its length"
    GRADIENT_DIFFERS = (
        "the gradient of step {step} differs by {apart:percent} of its length from that of one "
        "rank, most in {most_in} ({at})",
        GLOBAL_DIVISOR,
        See.LOSS,
    )
    GRADIENT_DIFFERS_GATHER = (
        "the gradient of step {step} differs by {apart:percent} of its length from that of one "
        "rank, most in {most_in} ({at}); the step gathers tensors of all ranks",
        "a gather must send gradients back to all ranks, summed: "
        "torch.distributed.nn.functional.all_gather; and the loss must be a mean over all samples",
        See.LOSS,
    )
    CHANGE_DIFFERS = (
        "what step {step} changes differs by {apart:percent} of its length from what one rank "
        "changes, most in {most_in} ({at})",
        "the mean of the gradients of all ranks must reach the update",
        See.LOSS,
    )
    LATER_GRADIENT_DIFFERS = (
        "the gradient of step {step} differs by {apart:percent} of its length from that of one "
        "rank ({at})",
        GLOBAL_DIVISOR,
        See.LOSS,
    )
    WEIGHTS_OF_ONE_DIFFER = (
        "gradient of step 1 equal to {apart:.0e} of its length, weights after step {steps} to "
        "{weights_apart:.0e} of their change ({at})",
        "something between backward and step depends on the ranks",
        See.LOSS,
    )
    FACTOR = (
        "the gradient is {times} that of one rank ({at})",
        "DDP takes the mean over the ranks: the loss must be a mean over the samples of a rank, "
        "or a sum times world_size, divided by a number of all ranks",
        See.LOSS,
    )
    FACTOR_IN_SOME = (
        "the gradient is {times} that of one rank in {agreeing} of {parameters} parameters ({at})",
        "look for what is scaled, gathered or averaged once more on the way to these parameters",
        See.LOSS,
    )
    ONE_NTH = (
        "the gradient is {times} that of one rank ({at}): a sum where a mean belongs, or divided "
        "by the number of ranks once more",
        "DDP divides by the number of ranks already",
        See.LOSS,
    )
    SUM_OVER_LOCAL_BATCH = (
        "the gradient is {times} that of one rank ({at}): the loss is a sum, or is divided by a "
        "constant, and DDP takes the mean of it",
        "take the mean; meant so only if the rate was chosen for the sum over one rank",
        See.LOSS,
    )
    TOO_CLOSE = (
        "step {step} differs by {apart:.0e} of its length from that of one rank: too close to tell "
        "a mistake from rounding ({at})",
        "if a part of the step computes in float32, --float32 allows for that",
    )
    TOO_CLOSE_IN_FLOAT32 = (
        "step {step} differs by {apart:.0e} of its length from that of one rank: in float32, too "
        "close to tell a mistake from rounding ({at})",
        "what is said above the table kept it from running in float64",
    )
    LITTLE_PRECISION = (
        "gradient of step 1 equal to {apart:.0e} of its length, weights after step {steps} to "
        "{weights_apart:.0e} of their change: too little precision to tell"
    )
    AS_ABOVE = "the gradient differs by {apart:percent}, as follows from the rows above ({at})"
    NOT_REPRODUCED = (
        "the gradient differs by {apart:percent} from that of one rank, but rank {rank} does not "
        "reproduce its own either: fed its own batches and draws again, step {step} differs by "
        "{noise:percent} ({at}). Something that prove does not see differs from run to run"
    )
    CONTROL_FAILS = (
        "the gradient differs by {apart:percent} from that of one rank, but the ranks could not be "
        "run again with their own records: {message}"
    )
    EQUAL_WITH_ONE_DRAW = (
        "the gradient differs by {apart:percent} of its length with the numbers that the ranks "
        "drew, and by {apart_of_one_draw:.0e} where all samples get one draw ({places}): a "
        "divisor that "
        "depends on the draws, or samples that changed places before"
    )
    OTHER_SHAPE = (
        "the one rank's optimizer holds other parameters: {name} has the shape {of_ranks!s}, and "
        "{of_one!s} on one rank; it must not depend on the batch size"
    )
    OTHER_PARAMETERS = "the one rank's optimizer holds other parameters"
    OTHER_DTYPES = "the ranks have gradients of {of_ranks}, and one rank of {of_one}: try --float32"
    NO_GRADIENTS = "the two runs have no gradient in common"
    BEGINS_LATER = (
        "this optimizer makes its first step in the second epoch ({at}), and only the first is "
        "replayed: to compare it, let it begin in the first"
    )
    NOT_FINITE = "the gradient of step {step} is not finite ({at})"
    NOTHING_TO_COMPARE = "all gradients are zero: there is nothing to compare"
    TOO_SHORT = "the gradient has a length of {length:.0e}: that is rounding ({at})"
    BATCHNORM_ROWS = (
        "BatchNorm gets a number of rows that is no multiple of the samples, so nobody knows which "
        "rows are those of which rank"
    )
    BATCHNORM_ROWS_GUESSED = (
        "the gradient differs by {apart:percent}, but BatchNorm gets several rows of each sample, "
        "and which of them belong to which rank is a guess ({at})"
    )
    DRAWS_IN_KERNEL = (
        "random numbers are drawn inside a kernel, where nobody can record them: {places}"
    )
    TOO_MANY_DRAWS = "more random numbers are drawn than can be kept: {places}"
    DRAWS_ESCAPED = "random numbers are drawn by a library that prove does not watch, {places}"
    DRAWS_NOT_MATCHED = (
        "one rank draws other random numbers, or more of them, than all ranks together: {places}"
    )
    DRAWS_NOT_GIVEN = (
        "without a DataLoader, the original draws its own random numbers: {places}; switch dropout "
        "and noise off in both scripts to compare them"
    )
    CANNOT_MERGE = "the batches of the ranks cannot be put together: {what}"
    NOT_KEPT = "{message}"
    REPLAY_FAILS = (
        "one rank, with the samples of all ranks in its batches, cannot run it: {kind} at {at}: "
        "{message}",
        "if the command names the number of ranks, --alone 'COMMAND' says how one is started; if "
        "the script fixes the number of samples, take it from the batch: x.shape[0]",
    )
    REPLAY_SAYS = "one rank made no step with the recorded batches: {message}"
    NO_REPLAYED_STEP = "one rank made no step with the recorded batches"
    NOT_ONE_RANK = (
        "the command for one rank started {world_size}: --alone 'COMMAND' says how one is started"
    )
    NO_STEP = (
        "no parameter changed in {batches:n batch}: if a step needs more, raise --batches; weights "
        "that are no parameters of a module (torch.func) are not seen"
    )
    NO_BATCH = (
        "no optimizer of torch made a step, and what the script itself changes is seen only while "
        "a DataLoader gives the batches"
    )
    ONLY_ONE_RANK = "it is the only one: start two to compare"
    WHICH_COMMAND = "say how one rank is started: --alone 'COMMAND'"
    MODEL_DIVIDED = "each rank holds a part of the model"
    OTHER_ROWS = "each rank takes its rows of a batch that all load, with other random numbers"
    NO_LOADER = "no DataLoader, and the loss is computed outside of the model: nothing to replay"
    RUN_HANGS = "no replay of a run that hangs"
    RUN_FAILS = "no replay of a run that ends with an error: {message}"
    RECORDS_MISSING = "{present} of {world_size} wrote records"
    COIN_BY_RANK = (
        "each rank tosses a coin for its whole batch: {places}",
        "what is decided for a whole batch must be the same on all ranks: a generator with the "
        "same seed on all of them",
        See.LOSS,
    )
    SAME_NOISE = ("all ranks draw the same numbers for their samples: {places}", OWN_SEED)
    NOISE_BY_SAMPLE = "the ranks draw different numbers for their samples: {places}"

    # judge_replay: beside the gradients
    RATES_OF_ONE_RANK = "the learning rates of one rank"
    SCHEDULE_FOLLOWS_LOADER = (
        "it takes {batches} batches on {world_size} ranks and {batches_of_one} on one, which are "
        "{epochs:.3g} and {epochs_of_one:.3g} epochs"
    )
    SCHEDULE_IGNORES_LOADER = (
        "it takes {batches} batches on any number of ranks: {epochs:.3g} epochs of {epoch} batches "
        "on {world_size} ranks, {epochs_of_one:.3g} of {epoch_of_one} on one ({at})",
        "count its steps by len(loader) of a rank; meant so only if training ends after a number "
        "of steps, and not of epochs",
        See.RATE,
    )
    HIGHEST_RATE_DIFFERS = (
        "highest learning rate {of_ranks:.4g} on {world_size} ranks and {of_one:.4g} on one ({at})",
        "meant so only if you scale the rate with the global batch on purpose",
        See.RATE,
    )
    RATE_DIFFERS = (
        "learning rate {of_ranks:.4g} on {world_size} ranks and {of_one:.4g} on one, {when}",
        "meant so only if you scale the rate with the global batch on purpose, or step a schedule "
        "for one rank once per rank",
        See.RATE,
    )
    RATE_AFTER_EPOCH_DIFFERS = (
        "learning rate {of_ranks:.4g} on {world_size} ranks and {of_one:.4g} on one, {when}",
        "one scheduler.step() per epoch or step on each rank, not one per rank; meant so only if "
        "you scale the rate with the global batch on purpose",
        See.RATE,
    )
    NUMBERS_DIFFER = (
        "after the same steps, {numbers}",
        "add sums and counts up over the ranks, then divide; meant so only if each rank reports on "
        "its own samples, or on some that it has drawn",
        See.ACCURACY,
    )
    NUMBERS_OF_ONE_RANK = "they are those of one rank ({numbers} compared)"
    BATCHNORM_OF_EACH_RANK = "{layers} per rank, over at least {values} values"
    BATCHNORM_OF_FEW = (
        "{layers} normalizes {values} values on each rank; with those of all ranks, the gradient "
        "differs by {apart:percent}",
        "SyncBatchNorm; meant so if the local batch on the real machine is larger",
        See.LOSS,
    )
