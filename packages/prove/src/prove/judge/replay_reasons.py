"""The sentences of a replay, in the order of the judges."""

from enum import unique

from prove.judge.reasons import OWN_SEED, Heading, Reason

GLOBAL_DIVISOR = "what the loss divides by must be a number of all ranks, not of one; or a layer "
GLOBAL_DIVISOR += "mixes the samples of a batch (attention over the batch)"
FAILS = "one rank, with the samples of all ranks in its batches, cannot run it: {kind} at {at}: "
FAILS += "{message}"
ALONE = "--alone 'COMMAND' says how one rank is started, with the batch size of all for example"
LENGTHS = "{samples} samples in {batches} batches on {world_size} ranks together, "
LENGTHS += "{samples_of_original} in {batches_of_original} in the original ({at})"


@unique
class ReplayReason(Reason):
    """A result of a replay, in the order of the modules that report it."""

    # compare_steps.py: does one rank compute the same?
    EQUAL_TO_ONE = (
        "gradient of step 1 equal to {apart:.0e} of its length, weights after step {steps} to "
        "{weights_apart:.0e} of their change"
    )
    EQUAL_LESS_PRECISE = (
        "gradient of step 1 equal to {apart:.0e} of its length (not all in float64: less than "
        "{limit:percent} is not seen), weights after step {steps} to {weights_apart:.0e} of their "
        "change"
    )
    EQUAL_BUT_ROUNDING = (
        "gradient of step 1 equal to {apart:.0e} of its length, weights after step {steps} to "
        "{weights_apart:.0e} of their change, though all gradients agree to {gradients_apart:.0e}, "
        "and the weights after step 1 to {first_apart:.0e}: rounding, divided by rounding"
    )
    EQUAL_AFTER_STEP = (
        "weights after {steps} steps equal to {weights_apart:.0e} of their change: the ranks "
        "average in the step or after it, and not the gradients before it"
    )
    STEP_DIFFERS = (
        "the ranks average in the step ({at}), and what step {step} leaves behind differs by "
        "{weights_apart:percent} of its change from the weights of one rank, most in {most_in}",
        "the mean of the gradients of all ranks must reach the update of every parameter",
        Heading.LOSS,
    )
    AVERAGED_WEIGHTS_DIFFER = (
        "each rank steps with its own gradient, and the weights are averaged then: after step "
        "{step}, they differ by {weights_apart:percent} of its change from those of one rank, most "
        "in {most_in} ({at})",
        "average the gradients before the step; meant so only for local SGD",
        Heading.LOSS,
    )
    HIDDEN_FACTOR = (
        "what the step averages ({at}) is {times} that of one rank, by what the optimizer keeps of "
        "it; it divides by its size, so that the weights hide it to {weights_apart:.0e}",
        "divide by the number of ranks once: clipping, weight decay and another optimizer would "
        "show it",
        Heading.LOSS,
    )
    TOO_FEW_STEPS = (
        "the ranks average in the step ({at}) or after it, so that only weights tell, and {steps} "
        "of the steps that were seen moved them",
        "raise --batches, or leave a warm-up from 0 out for this proof",
    )
    TENSOR_KIND = (
        "parameters or gradients of a kind that prove cannot compare: {kinds} ({at})",
        "if a flag of the script turns that off, prove it so",
    )
    FIRST_GRADIENT_EQUAL = "gradient of step 1 equal to {apart:.0e} of its length"
    GRADIENT_DIFFERS = (
        "the gradient of step {step} differs by {apart:percent} of its length from that of one "
        "rank, most in {most_in} ({at}){place}",
        GLOBAL_DIVISOR,
        Heading.LOSS,
    )
    GRADIENT_DIFFERS_GATHER = (
        "the gradient of step {step} differs by {apart:percent} of its length from that of one "
        "rank, most in {most_in} ({at}){place}; the step gathers tensors of all ranks",
        "a gather must send gradients back to all ranks, summed: "
        "torch.distributed.nn.functional.all_gather; and the loss must be a mean over all samples",
        Heading.LOSS,
    )
    CHANGE_DIFFERS = (
        "what step {step} changes differs by {apart:percent} of its length from what one rank "
        "changes, most in {most_in} ({at}){place}",
        "the mean of the gradients of all ranks must reach the update",
        Heading.LOSS,
    )
    WEIGHTS_CHANGED_BETWEEN = (
        "the gradient of step {step} differs by {apart:percent} of its length from that of one "
        "rank, most in {most_in}: the weights differ before it, but no gradient before them ({at})",
        "whatever changes weights beside the gradient (decay, a mean, a copy) must not count ranks",
        Heading.LOSS,
    )
    LATER_GRADIENT_DIFFERS = (
        "the gradient of step {step} differs by {apart:percent} of its length from that of one "
        "rank, most in {most_in} ({at})",
        GLOBAL_DIVISOR,
        Heading.LOSS,
    )
    OTHER_BATCH = (
        "all ranks make step {step} with batch {batch}, and one rank with batch {other}: whether a "
        "step is made depends on numbers that one rank does not have ({at})",
        "decide by a number of all samples, such as the mean loss of all ranks; meant so if one "
        "rank with a bad batch shall stop all",
    )
    WEIGHTS_OF_ONE_DIFFER = (
        "gradient of step 1 equal to {apart:.0e} of its length, weights after step {steps} to "
        "{weights_apart:.0e} of their change, most in {most_in} ({at})",
        "something between backward and step depends on the ranks",
        Heading.LOSS,
    )
    FACTOR = (
        "the gradient is {times} that of one rank ({at})",
        "DDP takes the mean over the ranks: the loss must be a mean over the samples of a rank, "
        "or a sum times world_size, divided by a number of all ranks",
        Heading.LOSS,
    )
    FACTOR_IN_SOME = (
        "the gradient is {times} that of one rank in {agreeing} of {parameters} parameters ({at})",
        "look for what is scaled, gathered or averaged once more on the way to these parameters",
        Heading.LOSS,
    )
    ONE_NTH = (
        "the gradient is {times} that of one rank ({at}): a sum where a mean belongs, or divided "
        "by the number of ranks once more",
        "DDP divides by the number of ranks already",
        Heading.LOSS,
    )
    ONE_NTH_OF_A_SUM = (
        "the gradient is {times} that of one rank ({at}): the all_reduce at {reduced_at} sums the "
        "loss over the ranks, but has no backward, and DDP takes the mean",
        "torch.distributed.nn.functional.all_reduce has one; or multiply the loss by world_size",
        Heading.LOSS,
    )
    SUM_OVER_LOCAL_BATCH = (
        "the gradient is {times} that of one rank ({at}): the loss is a sum, or is divided by a "
        "constant, and DDP takes the mean of it",
        "take the mean; meant so only if the rate was chosen for the sum over one rank",
        Heading.LOSS,
    )
    TOO_CLOSE = (
        "step {step} differs by {apart:.0e} of its length from that of one rank: too close to tell "
        "a mistake from rounding ({at})",
        "{advice}",
    )
    TOO_CLOSE_IN_FLOAT32 = (
        "step {step} differs by {apart:.0e} of its length from that of one rank: not all in "
        "float64, too close to tell a mistake from rounding ({at})",
        "{advice}",
    )
    LITTLE_PRECISION = (
        "gradient of step 1 equal to {apart:.0e} of its length, weights after step {steps} to "
        "{weights_apart:.0e} of their change: too little precision to tell",
        "{advice}",
    )
    AS_ABOVE = (
        "the gradient differs by {apart:percent}, as follows from the rows above ({at})",
        "cure those first, then prove it again",
    )
    NOT_REPRODUCED = (
        "the gradient differs by {apart:percent} from that of one rank, but rank {rank} does not "
        "reproduce its own either: fed its own batches and draws again, step {step} differs by "
        "{noise:percent} ({at}). Something that prove does not see differs from run to run",
        "seed each generator; torch.use_deterministic_algorithms(True); no clock, no set's order",
    )
    LATER_EPOCH = (
        "from epoch {number} on, the gradient differs by {apart:percent} from that of one rank, "
        "which may not have had what the ranks had before that epoch: {why}",
        "draw with the global generators, or leave it out while prove watches; meant so if nothing "
        "of it decides about the training",
    )
    CONTROL_FAILS = (
        "the gradient differs by {apart:percent} from that of one rank, but the ranks could not be "
        "run again with their own records: {message}",
        "prove it again; if this comes back, switch off what raises it for this proof",
    )
    FORCED_DRAWS_FAIL = (
        "the gradient differs by {apart:percent} from that of one rank, but the ranks do not run "
        "with {draws}: {places}",
        "switch what is drawn there off for this proof",
    )
    EQUAL_WITH_ONE_DRAW = (
        "the gradient differs by {apart:percent} of its length with the numbers that the ranks "
        "drew, and by {apart_of_one_draw:.0e} where all samples get one draw ({places}): a "
        "divisor that depends on the draws, or samples that changed places before",
        "all_reduce a count that the loss divides by; else switch these draws off for this proof",
    )
    OTHER_SHAPE = (
        "the one rank's optimizer holds other parameters: {name} has the shape {of_ranks!s}, and "
        "{of_one!s} on one rank",
        "its shape must not depend on the batch size or on the number of ranks",
    )
    OTHER_PARAMETERS = (
        "the one rank's optimizer holds other parameters",
        "what it holds must not depend on the batch size or on the number of ranks",
    )
    OTHER_DTYPES = "the ranks have gradients of {of_ranks}, and one rank of {of_one}: {advice}"
    NO_GRADIENTS = (
        "the two runs have no gradient in common",
        "before the first step, a backward must reach the same parameters, on one rank, too",
    )
    NOT_FINITE = (
        "the gradient of step {step} is not finite ({at})",
        "torch.autograd.set_detect_anomaly(True) finds where; a loss scale may begin lower",
    )
    NOTHING_TO_COMPARE = (
        "all gradients are zero: there is nothing to compare",
        "is the loss detached? If weights begin at 0, prove it from others",
    )
    TOO_SHORT = (
        "the gradient has a length of {length:.0e}: that is rounding ({at})",
        "prove it from other first weights, where the loss still has a slope",
    )
    BATCHNORM_ROWS = (
        "BatchNorm gets a number of rows that is no multiple of the samples, so nobody knows which "
        "rows are those of which rank",
        "call the model once per batch of a loader, or prove the rest with nn.Identity() instead",
    )
    BATCHNORM_ROWS_GUESSED = (
        "the gradient differs by {apart:percent}, but BatchNorm gets several rows of each sample, "
        "and which of them belong to which rank is a guess ({at})",
        "one row per sample, or prove the rest with nn.Identity() instead",
    )
    DRAWS_IN_KERNEL = (
        "random numbers are drawn inside a kernel, where nobody can record them: {places}",
        "--cpu, where fewer kernels draw, or switch dropout off there for this proof",
    )
    TOO_MANY_DRAWS = (
        "more random numbers are drawn than can be kept: {places}",
        "--batches 1, a smaller batch, or this noise switched off for this proof",
    )
    DRAWS_ESCAPED = (
        "random numbers are drawn by a library that prove does not watch, {places}",
        "draw them by a function of torch, or switch that off for this proof",
    )
    DRAWS_NOT_MATCHED = (
        "one rank draws other random numbers, or more of them, than all ranks together: {places}",
        "draw one row per sample, as torch.randn_like(x), or switch it off for this proof",
    )
    DRAWS_NOT_GIVEN = (
        "without a DataLoader, the original draws its own random numbers: {places}",
        "switch dropout and noise off in both scripts to compare them",
    )
    CANNOT_MERGE = (
        "the batches of the ranks cannot be put together: {what} ({at})",
        "samples in the first dimension of each tensor, or a collate_fn that draws nothing",
    )
    NOT_KEPT = (
        "{message}",
        "tensors, lists and dicts, or a class that pickle can copy",
    )
    REPLAY_FAILS = (
        FAILS,
        f"if {{at}} counts on other ranks or on the length of an epoch, {ALONE}",
    )
    REPLAY_FAILS_BY_SHAPE = (
        FAILS,
        "if {at} fixes the number of samples, take it from the batch: x.shape[0]",
    )
    REPLAY_FAILS_BY_DTYPE = (FAILS, "--float32 leaves the dtypes as the script has them")
    REPLAY_SAYS = (
        "one rank made no step with the recorded batches: {message}",
        ALONE,
    )
    NO_REPLAYED_STEP = (
        "one rank made no step with the recorded batches",
        f"raise --batches, if a step needs more; else {ALONE}",
    )
    NOT_ONE_RANK = ("the command for one rank started {world_size}", ALONE)
    NO_STEP = (
        "no parameter changed in {batches:n batch} of the loader at {places}",
        "raise --batches, if a step needs more",
    )
    NO_BATCH = (
        "no optimizer of torch made a step, and no parameter of a model that was called changed "
        "before its next call",
        "is this the command that trains? If so, call the model as model(x) in each step",
    )
    ONLY_ONE_RANK = ("it is the only one", "start two to compare: --nproc-per-node=2")
    WHICH_COMMAND = ("the command has no number of ranks that prove could set to 1", ALONE)
    MODEL_DIVIDED = (
        "each rank holds a part of the model ({at})",
        "switch tensor and pipeline parallelism off for this proof; fully_shard can be compared",
    )
    OTHER_ROWS = (
        "each rank takes its rows of a batch that all load, with other random numbers ({at})",
        "load with the same seed on all ranks, or deal samples out by a DistributedSampler",
    )
    NO_LOADER = (
        "no DataLoader, and nothing that differs between the ranks was seen where data meet "
        "gradients, so there is nothing to replay",
        "read a batch from a DataLoader, or as x[indices] right before the loss",
    )
    TOO_MUCH_DATA = (
        "no DataLoader, and more data meet gradients than can be kept: {places}",
        "--batches 1, a smaller batch, or a DataLoader",
    )
    DATA_NOT_MERGED = (
        "the gradient differs by {apart:percent}, but without a DataLoader, what meets a gradient "
        "at {places} cannot be put together for one rank",
        "read a batch as x[indices] with one row per sample, and draw inside the model",
    )
    DATA_COME_LATE = (
        "the gradient differs by {apart:percent}, but without a DataLoader, prove knows the data "
        "at {places} only there, after the script has computed with those of one rank",
        "read a batch as x[indices] right before the loss, or from a DataLoader",
    )
    LOCAL_NUMBER = (
        "the gradient differs by {apart:percent}, but the loss is multiplied or divided by a "
        "number that may be that of the samples of one rank ({places})",
        "without a DataLoader, prove knows it as x.shape[0] of what x[indices] has read, and not "
        "as len() of a list of indices or as a constant",
    )
    LOSS_KNOWS_RANKS = (
        "the gradient agrees with that of one rank, but one rank had its data late, or a number "
        "that may be that of its samples ({late}), and a number at {changed} is another one than "
        "on all ranks: this may be chance",
        "read a batch as x[indices] right before the loss, and its size as x.shape[0]",
    )
    OTHER_DATA = (
        "the gradient agrees with that of one rank only where it gets the data at {places} as each "
        "rank has computed them: from the same rows, one rank computes others, as with a mean over "
        "the samples of a rank, or a draw that prove does not see",
        "take such a mean over all ranks: all_reduce sums and counts, then divide",
    )
    EQUAL_BUT_STATISTICS = (
        "the gradient agrees with that of one rank only where that uses the {name} at {at}, "
        "which each rank has taken over its own samples",
        "take it over all ranks: all_reduce sums and counts, then divide",
    )
    STATISTICS_BY_RANK = (
        "the gradient of step {step} differs by {apart:percent} of its length from that of one "
        "rank, because the {name} at {at} is that of the samples of each rank",
        "take it over all ranks: all_reduce sums and counts, then divide",
        Heading.LOSS,
    )
    ORIGINAL_GETS_NO_DATA = (
        "the gradient differs by {apart:percent}, but without a DataLoader, prove cannot tell what "
        "the original reads from what the ranks have read",
        "see the row one rank; a DataLoader in both scripts lets them be compared",
    )
    RUN_HANGS = ("no replay of a run that hangs", "cure the row hang, then prove it again")
    RUN_FAILS = (
        "no replay of a run that ends with an error: {message}",
        "cure this error, or the rows above that lead to it, then prove it again",
    )
    RECORDS_MISSING = (
        "{present} of {world_size} wrote records",
        "start all ranks on this machine, and let each end by itself, without os._exit",
    )
    COIN_BY_RANK = (
        "each rank draws its own for its whole batch: {places}",
        "meant so if it only mixes or augments the batch, as mixup's lambda; where it decides what "
        "is computed (a layer left out, an image size, whether to step), draw it from a generator "
        "with the same seed on all ranks",
        Heading.LOSS,
    )
    COIN_LEAVES_STEP = (
        "the ranks draw the same for their whole batches at first, and later each its own: "
        "{places}",
        "one seed, it seems, but the ranks draw from it a different number of times: a generator "
        "of its own for what all must decide alike; meant so if it only mixes or augments the "
        "batch, and the first draws agree by chance",
        Heading.LOSS,
    )
    SHARE_BY_RANK = "each rank mixes its own batch: {places}"
    SAME_NOISE = ("all ranks draw the same numbers for their samples: {places}", OWN_SEED)
    NOISE_BY_SAMPLE = "the ranks draw different numbers for their samples: {places}"

    # replay_checks: beside the gradients
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
        Heading.RATE,
    )
    ONE_CYCLE_ENDS_EARLY = (
        "OneCycleLR has {total} steps, {epochs:.3g} epochs of {steps} steps: a run of {run} epochs "
        'ends with "Tried to step {more} times" ({at})',
        "epochs * len(loader), divided by the batches of a step and rounded as the loop does it; "
        "meant so only if training ends after {total} steps",
        Heading.RATE,
    )
    HIGHEST_RATE_DIFFERS = (
        "highest learning rate {of_ranks:.4g} on {world_size} ranks and {of_one:.4g} on one ({at})",
        "meant so only if you scale the rate with the global batch on purpose",
        Heading.RATE,
    )
    RATE_DIFFERS = (
        "learning rate {of_ranks:.4g} on {world_size} ranks and {of_one:.4g} on one, {when}",
        "meant so only if you scale the rate with the global batch on purpose, or step a schedule "
        "for one rank once per rank",
        Heading.RATE,
    )
    RATE_AFTER_EPOCH_DIFFERS = (
        "learning rate {of_ranks:.4g} on {world_size} ranks and {of_one:.4g} on one, {when}",
        "one scheduler.step() per epoch or step on each rank, not one per rank; meant so only if "
        "you scale the rate with the global batch on purpose",
        Heading.RATE,
    )
    MOMENTUM_DIFFERS = (
        "momentum {of_ranks:.4g} on {world_size} ranks and {of_one:.4g} on one, {when}",
        "meant so only if you change it with the global batch on purpose",
        Heading.RATE,
    )
    ENDS_EARLIER = (
        "after {of_ranks} batches, {world_size} ranks still train, and one has ended after "
        "{of_one}",
        "what ends the training must count the samples of all ranks, and not those of one",
        Heading.RATE,
    )
    NUMBERS_DIFFER = (
        "after the same steps, {numbers}",
        "add sums and counts up over the ranks, then divide; meant so only if each rank reports on "
        "its own samples, or on some that it has drawn",
        Heading.ACCURACY,
    )
    NUMBERS_OF_ONE_RANK = "they are those of one rank ({numbers} compared)"
    BATCHNORM_OF_EACH_RANK = "{layers} per rank, over at least {values} values"
    BATCHNORM_OF_FEW = (
        "{layers} normalizes {values} values on each rank; with those of all ranks, the gradient "
        "differs by {apart:percent}",
        "SyncBatchNorm; meant so if the local batch on the real machine is larger",
        Heading.LOSS,
    )

    # original_epoch
    ORIGINAL_WITHOUT_LENGTH = (
        "the loader at {at} does not say how many samples it has",
        "__len__ of its data set would; else compare the samples of an epoch by hand",
    )
    ORIGINAL_HAS_MORE_SAMPLES = (
        LENGTHS,
        "drop_last in the sampler and in the loader only if the original has it; keep a sampler of "
        "its own, and deal out what that draws",
        Heading.LOSS,
    )
    ORIGINAL_HAS_OTHER_BATCHES = (
        LENGTHS,
        "the original's batch size / world_size on each rank, and its drop_last; meant so only if "
        "the learning rate was chosen for this global batch",
        Heading.RATE,
    )
    ORIGINAL_HAS_THE_SAME_EPOCH = LENGTHS
