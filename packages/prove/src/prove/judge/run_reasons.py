"""What the run of all ranks says by itself: the sentences, in the order of the judges."""

from enum import unique

from prove.judge.reasons import OWN_SEED, Heading, Reason

LOADER = "the loader at {at}, sampler {sampler}"
OVERLAP = (
    f"{{together}} of {{size}} samples are seen in an epoch, {{twice}} of them twice ({LOADER})"
)
SHARED = "{share:.0%} of the first {seen} samples are those of another rank, by content "
SHARED += f"({LOADER}; {{kind}})"
SHARD = "DataLoader(dataset, sampler=DistributedSampler(dataset)), or split the data by rank"
SHARD_STREAM = (
    "split by rank and by worker in __iter__: islice(all_samples, rank, None, world_size)"
)
SAME_ORDER_FIRST = "before the split, shuffle files or samples with a seed that all ranks share, "
SAME_ORDER_FIRST += "such as the epoch without the rank"
OTHER_GRADIENTS = ", but compute other gradients from them"
OWN_DRAWS = (
    "meant so if each rank draws its own completions, actions or noise for them, as GRPO does"
)
TOLD_APART = "prove it with samples that differ, or with a data set that is read by index"
LENGTHS = "{samples} samples in {batches} batches on {world_size} ranks together, "
LENGTHS += "{samples_of_original} in {batches_of_original} in the original ({at})"


@unique
class RunReason(Reason):
    # samples
    NO_INPUTS = (
        "no step in a pass over a DataLoader, nor a call of a model with tensors",
        "let it make steps on batches of a DataLoader, or on what model(x) gets",
    )
    ONE_INPUT = (
        "no DataLoader; the ranks call the model with one tensor, the same in all calls",
        "if these are the training data, give each rank its rows: x[rank::world_size]",
    )
    SAME_INPUTS = (
        "all ranks call the model with the same tensors, {calls} times",
        "seed by rank, or split the data by rank",
        Heading.LOSS,
    )
    SAME_INPUTS_OTHER_GRADIENTS = (
        f"all ranks call the model with the same tensors, {{calls}} times{OTHER_GRADIENTS}",
        f"{OWN_DRAWS}; else seed by rank, or split the data by rank",
        Heading.LOSS,
    )
    DIFFERENT_INPUTS = "no DataLoader; the ranks call the model with different tensors"
    ROWS_SPLIT = f"all ranks load the same batches, and each takes its part ({LOADER})"
    SAME_SAMPLES = (
        f"all ranks draw the same samples in the same order: {LOADER}",
        SHARD,
        Heading.LOSS,
    )
    SAME_SAMPLES_OTHER_GRADIENTS = (
        f"all ranks draw the same samples in the same order{OTHER_GRADIENTS}: {LOADER}",
        f"{OWN_DRAWS}; else {SHARD}",
        Heading.LOSS,
    )
    SUBSETS_DIFFER = (
        "the ranks split the data set differently: {missing} of the {own} samples in rank 0's "
        f"training set are not in that of another rank, which may test on them ({LOADER})",
        "give random_split a generator with the same seed on all ranks",
        Heading.LOSS,
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
        Heading.LOSS,
    )
    SAMPLERS_DISAGREE = (
        OVERLAP,
        "the same seed for the sampler of all ranks, and the right num_replicas and rank",
        Heading.LOSS,
    )
    SAMPLES_OVERLAP = (
        OVERLAP,
        SHARD,
        Heading.LOSS,
    )
    SAME_CONTENTS = (
        f"all ranks draw the same {{seen}} samples in the same order ({LOADER}; {{kind}})",
        SHARD,
        Heading.LOSS,
    )
    SAME_STREAM = (
        f"all ranks draw the same {{seen}} samples in the same order ({LOADER}; {{kind}})",
        f"{SHARD_STREAM}; if it is split and was resumed, save its position for each rank",
        Heading.LOSS,
    )
    SAME_CONTENTS_OTHER_GRADIENTS = (
        f"all ranks draw the same {{seen}} samples in the same order{OTHER_GRADIENTS} ({LOADER}; "
        "{kind})",
        f"{OWN_DRAWS}; else {SHARD_STREAM}",
        Heading.LOSS,
    )
    CONTENTS_UNKNOWN = (
        f"samples cannot be told apart ({LOADER}; {{kind}})",
        TOLD_APART,
    )
    STREAM_NOT_SPLIT = (
        f"{SHARED}; they only come in another order",
        SHARD_STREAM,
        Heading.LOSS,
    )
    STREAM_SPLIT_DIFFERENTLY = (
        f"{SHARED}; no rank has all of them",
        SAME_ORDER_FIRST,
        Heading.LOSS,
    )
    CONTENTS_SHARED = (
        SHARED,
        f"if nothing splits it yet, {SHARD_STREAM}; else {SAME_ORDER_FIRST}",
        Heading.LOSS,
    )
    PARTS_SHARED = (
        SHARED,
        "shuffle and split with a seed that all ranks share, random_split too; then each rank "
        "takes range(rank, n, world_size) of one list",
        Heading.LOSS,
    )
    SAME_LABELS = (
        "all ranks draw the same {seen} labels in the same order, with other inputs, as the random "
        f"numbers of each rank may make them ({LOADER}; {{kind}})",
        f"if nothing splits it yet, {SHARD_STREAM}; meant so only if the order of the labels is "
        "fixed for every rank",
        Heading.LOSS,
    )
    CONTENTS_SPLIT = "{share:.0%} of {seen} samples are shared ({kind})"
    WORKERS_ALIKE = (
        f"each of the {{workers}} workers of a rank yields the same samples ({LOADER})",
        SHARD_STREAM,
        Heading.LOSS,
    )
    FIELDS_DIFFER = (
        f"sample 0 has the same input on all ranks, and another {{names}} ({LOADER})",
        "number the labels in an order that all ranks share: sorted(set(names)), and zlib.crc32 or "
        "hashlib where the script calls hash(), which each process salts anew",
        Heading.LOSS,
    )
    DATA_SETS_DIFFER = (
        f"sample 0 differs between the ranks, and DistributedSampler splits it again ({LOADER})",
        "if each rank has files of its own, RandomSampler in its place; else make the data with "
        "the same seed on all ranks",
        Heading.LOSS,
    )

    # epochs: batches, order, draws
    NO_END_OF_DATA = (
        "no rank reached the end of its data ({at})",
        "raise --batches, or prove it with less data; an endless stream has nothing to compare",
    )
    UNEQUAL_BUT_JOINED = "{batches!s}, and Join lets the shorter ones wait"
    UNEQUAL_BUT_STOPPED = "{batches!s}, and all ranks stop with the one that has fewest"
    UNEQUAL_BUT_CUT = (
        "{batches!s}, but the script ends its epochs earlier ({at})",
        "harmless if all ranks end them after the same batch",
    )
    UNEQUAL_BATCHES = (
        "{batches!s} batches on the ranks: whoever has more waits for ever ({at})",
        "DistributedSampler makes them equal; or drop_last; or Join",
        Heading.UNEVEN,
    )
    UNEQUAL_BATCH_SIZES = (
        "{batches} on each rank, but local batches of {sizes!s} samples weigh the same ({at})",
        "equal local batches, or a mean over the global batch",
        Heading.LOSS,
    )
    EQUAL_BATCHES = "{batches} on each rank"
    NO_SECOND_EPOCH = (
        "there was no second epoch over the loader at {at}",
        "let the script train for two epochs or more in this proof",
    )
    ORDER_CHANGES = "epochs 1 and 2 differ"
    DATA_CHANGES = "the data set itself changes from epoch to epoch"
    EPOCH_NOT_SET = (
        "epochs 1 and 2 have the same order: loader at {at}, sampler {sampler}",
        "sampler.set_epoch(epoch) before each epoch",
        Heading.SAME_ORDER,
    )
    ORDER_FIXED = "fixed, and no shuffling was asked for"
    ORDER_REPEATS = (
        "epochs 1 and 2 have the same order: loader at {at}, sampler {sampler}",
        "another order in each epoch; meant so only if the order is part of the data",
        Heading.SAME_ORDER,
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

    # evaluation
    NO_EVALUATION = (
        "no pass over the loader at {places}: an evaluation counts that comes within the first two "
        "epochs",
        "to see yours, let it come earlier (fewer epochs), or raise --batches",
    )
    EVALUATED_BY_SOME = "by {ranks} of {world_size} ranks ({at})"
    EVALUATED_OWN_DATASETS = (
        "each rank evaluates a data set of its own ({at})",
        "if these are parts of one, all_reduce sums and counts, then divide",
        Heading.ACCURACY,
    )
    EVALUATED_UNKNOWN = ("the samples of {at} cannot be told apart", TOLD_APART)
    EVALUATED_BY_EACH = (
        "each rank evaluates all {size} samples ({at})",
        "each rank a part, then all_reduce; no mistake if the results are not added up",
        Heading.ACCURACY,
    )
    EVALUATED_TWICE = (
        "{twice} of {size} samples are counted twice ({at}, {sampler})",
        "Subset(dataset, range(rank, len(dataset), world_size))",
        Heading.ACCURACY,
    )
    EVALUATED_SHARED = (
        "of {size} samples, {twice} are evaluated by more than one rank, by content ({at})",
        "each sample on one rank: range(rank, n, world_size) of one list that all ranks have; no "
        "mistake if the results are not added up",
        Heading.ACCURACY,
    )
    EVALUATED_APART = "no sample by more than one rank, by content: {size} samples ({at})"
    EVALUATED_NOT_ALL = (
        "{lost} of {size} samples are left out ({at})",
        "no drop_last for evaluation",
        Heading.ACCURACY,
    )
    EVALUATED_NOT_SUMMED = (
        "each rank evaluates a part of the {size} samples, and no collective follows ({at})",
        "all_reduce sums and counts, then divide",
        Heading.ACCURACY,
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
        Heading.ACCURACY,
    )
