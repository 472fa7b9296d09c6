"""Do the ranks train on the samples of one process, each on its own part?

A Pass is what the record of a rank says of one pass over a loader.
"""

from collections import Counter

import torch

from prove import generators
from prove.record import Pass, RankRecord
from prove.table import ReportRow, See, not_seen, right, warning, wrong

ALL_BUT_A_FEW = 0.98  # the share of a data set that counts as the whole
SHARD = "DataLoader(dataset, sampler=DistributedSampler(dataset)), or split the data by rank"
OWN_SEED = "torch.manual_seed(seed + rank) after the model is built; numpy and random alike"


def load_samples(ranks: list[RankRecord]) -> None:
    """Read from the files beside the records which samples each pass drew, and may draw."""
    passes = [this_pass for rank in ranks for this_pass in rank.passes]
    for this_pass in [this_pass for this_pass in passes if this_pass.samples_file]:
        listed = torch.load(this_pass.samples_file, weights_only=True)
        this_pass.indices = listed["indices"].tolist()
        may_draw = listed["may_draw"]
        this_pass.may_draw = None if may_draw is None else set(may_draw.tolist())


def trained_passes(ranks: list[RankRecord]) -> list[list[Pass]]:
    """For each pass in which all ranks made steps: the records of the ranks."""
    trained = [[this_pass for this_pass in rank.passes if this_pass.steps] for rank in ranks]
    return [list(of_ranks) for of_ranks in zip(*trained, strict=False)]


def alike(passes: list[Pass], name: str) -> bool:
    return all(getattr(this_pass, name) == getattr(passes[0], name) for this_pass in passes)


def same_dataset(passes: list[Pass]) -> bool:
    known = bool(passes[0].fingerprint)
    return known and alike(passes, "fingerprint") and alike(passes, "dataset_length")


def sample_count(passes: list[Pass]) -> int:
    """How many samples the ranks may draw together."""
    parts = [this_pass.may_draw for this_pass in passes if this_pass.may_draw is not None]
    return len(set().union(*parts)) if len(parts) == len(passes) else passes[0].dataset_length or 0


def rows_are_split(ranks: list[RankRecord]) -> bool:
    """The script gives each rank a part of the rows of a batch that all have loaded."""
    passes = trained_passes(ranks)
    if not passes or not alike(passes[0], "indices"):
        return False
    loaded: dict[tuple, int] = {}  # rows of each batch of each rank
    used: Counter = Counter()  # those that went into the model
    for rank in ranks:
        for call in rank.model_calls:
            if call.batch_size and call.batch_size > 1:
                loaded.setdefault((rank.rank, call.batch), call.batch_size)
                used[rank.rank, call.batch] += call.rows
    n = len(ranks)
    shares = [used[batch] in (rows // n, -(-rows // n)) for batch, rows in loaded.items()]
    return bool(shares) and all(shares)


def same_contents(ranks: list[RankRecord]) -> bool:
    passes = trained_passes(ranks)
    return bool(passes) and all(alike(of_ranks, "checksums") for of_ranks in passes)


def data_rows(ranks: list[RankRecord]) -> list[ReportRow]:
    if len(ranks) < 2 or "groups of some ranks" in ranks[0].notes:
        return []
    passes = trained_passes(ranks)
    if not passes:
        return forward_input_rows(ranks)
    rows = sample_rows(ranks, passes[0]) + length_rows(ranks, passes[0]) + order_rows(passes)
    return rows + dropout_rows(ranks) + augmentation_rows(passes[0])


def forward_input_rows(ranks: list[RankRecord]) -> list[ReportRow]:
    """A script without a DataLoader: do the ranks call the model with different tensors?"""
    check = "samples"
    inputs = [[call.checksum for call in rank.model_calls] for rank in ranks]
    if not all(inputs) or not ranks[0].steps or len({*inputs[0]}) < 2:
        return [not_seen(check, "no step in a pass over a DataLoader, nor inputs that differ")]
    if all(of_rank == inputs[0] for of_rank in inputs):
        text = f"all ranks call the model with the same tensors, {len(inputs[0])} times"
        return [wrong(check, text, "seed by rank, or split the data by rank", See.LOSS)]
    return [right(check, "no DataLoader; the ranks call the model with different tensors")]


def sample_rows(ranks: list[RankRecord], passes: list[Pass]) -> list[ReportRow]:
    first, are_split = passes[0], rows_are_split(ranks)
    at = f"the loader at {first.at}, sampler {first.sampler}"
    if (
        first.is_stream
        or not all(this_pass.indices for this_pass in passes)
        or not same_dataset(passes)
    ):
        return sample_rows_by_content(passes, at, are_split)
    if are_split:
        text = f"all ranks load the same batches, and each takes its part ({at})"
        return [right("samples", text)]
    return [sample_row_by_index(passes, at)]


def sample_row_by_index(passes: list[Pass], at: str) -> ReportRow:
    first, ranks, check = passes[0], len(passes), "samples"
    trained = [this_pass.indices[: sum(this_pass.sizes[: this_pass.given])] for this_pass in passes]
    if all(indices == trained[0] for indices in trained) and len({*trained[0]}) > 1:
        text = f"all ranks draw the same samples in the same order: {at}"
        return wrong(check, text, SHARD, See.LOSS)
    drawn = [{*this_pass.indices} for this_pass in passes]
    together, size = len(set().union(*drawn)), sample_count(passes)
    twice, lost = sum(map(len, drawn)) - together, size - together
    parts = [this_pass.may_draw for this_pass in passes if this_pass.may_draw is not None]
    if len(parts) == ranks and len(drawn[0] & drawn[1]) > 1:
        common = len(set.intersection(*parts))
        if common < len(parts[0]):
            text = f"the ranks split the data set differently: of {len(parts[0])} samples that "
            text += f"rank 0 may draw, all ranks may draw {common} ({at})"
            cure = "give random_split a generator with the same seed on all ranks"
            return wrong(check, text, cure, See.LOSS)
    repeats = any(len({*this_pass.indices}) < 0.9 * len(this_pass.indices) for this_pass in passes)
    if repeats or "Weighted" in first.sampler:
        return right(check, f"{first.sampler} draws with replacement, other samples per rank")
    padding = ranks * (1 + max(first.sizes))
    if twice <= padding and lost > 2 * padding:
        text = f"{together} of {size} samples are in an epoch, {lost} in that of no rank ({at})"
        return warning(check, text, "meant so only if the others are left out on purpose")
    if twice <= padding:
        counts = " + ".join(str(len(indices)) for indices in drawn)
        return right(check, f"{counts} of {size} samples, {twice} of them twice ({at})")
    if min(map(len, drawn)) >= ALL_BUT_A_FEW * size:
        text = f"each rank draws all {size} samples, in another order: an epoch is {ranks} epochs"
        cure = f"{SHARD}; meant so only if the number of epochs was divided, too"
        return warning(check, f"{text} ({at})", cure, See.LOSS)
    text = f"{together} of {size} samples are seen in an epoch, {twice} of them twice ({at})"
    if first.sampler == "DistributedSampler":
        cure = "the same seed for the sampler of all ranks, and the right num_replicas and rank"
        return wrong(check, text, cure, See.LOSS)
    return warning(check, text, SHARD, See.LOSS)


def sample_rows_by_content(passes: list[Pass], at: str, are_split: bool) -> list[ReportRow]:
    """For streams, and for data sets of which each rank holds another: no indices to compare."""
    first, check = passes[0], "samples"
    kind = "an IterableDataset" if first.is_stream else "another data set on each rank"
    if not first.is_stream and same_dataset(passes):
        kind = f"{first.sampler} is too long to list"
    seen, different = len(first.checksums), len({*first.checksums})  # samples may come again
    all_alike = alike(passes, "checksums") and not are_split
    if different >= 5 and seen >= 20 and all_alike:
        text = f"all ranks draw the same {seen} samples in the same order ({at}; {kind})"
        return [wrong(check, text, SHARD, See.LOSS)]
    if not seen or different < seen / 2:
        return [not_seen(check, f"samples cannot be told apart ({at}; {kind})")]
    share = max(share_in_common(first.checksums, other.checksums) for other in passes[1:])
    text = f"{share:.0%} of the first {seen} samples are those of another rank, by content"
    text += f" ({at}; {kind})"
    cure = "split by rank and by worker in __iter__: islice(all_samples, rank, None, world_size)"
    if share > 0.5:
        rows = [wrong(check, text, cure, See.LOSS)]
    elif share > 0.05:
        rows = [warning(check, text, cure, See.LOSS)]
    else:
        rows = [right(check, f"{share:.0%} of {seen} samples are shared ({kind})")]
    of_workers = first.contents[: first.workers]  # each gives one batch in turn
    workers_alike = all(batch == of_workers[0] for batch in of_workers)
    if first.is_stream and len(of_workers) > 1 and workers_alike:
        text = f"each of the {first.workers} workers of a rank yields the same samples ({at})"
        rows.append(wrong("workers", text, cure, See.LOSS))
    sampler_splits = first.sampler == "DistributedSampler" and alike(passes, "dataset_length")
    if first.fingerprint and sampler_splits:
        text = f"sample 0 differs between the ranks, and DistributedSampler splits it again ({at})"
        cure = "make the data with the same seed on all ranks, or load it from a file"
        rows.append(warning("one data set", text, cure, See.LOSS))
    return rows


def share_in_common(checksums: list[int], others: list[int]) -> float:
    """The share of samples with the same content; 0 if the samples are too much alike to tell."""
    own, other = {*checksums}, {*others}
    if not other or len(other) < len(others) / 2:
        return 0.0
    return len(own & other) / min(len(own), len(other))


def length_rows(ranks: list[RankRecord], passes: list[Pass]) -> list[ReportRow]:
    check, first = "batches per epoch", passes[0]
    listed = [this_pass.batches for this_pass in passes if this_pass.batches is not None]
    counts = listed if len(listed) == len(passes) else [this_pass.given for this_pass in passes]
    if counts is not listed and not any(this_pass.ended for this_pass in passes):
        return [not_seen(check, "no rank reached the end of its data")]
    if len({*counts}) > 1:
        if "join" in ranks[0].notes:
            return [right(check, f"{counts}, and Join lets the shorter ones wait")]
        if any(
            this_pass.given < min(n, this_pass.limit)
            for this_pass, n in zip(passes, counts, strict=True)
        ):
            return [not_seen(check, f"{counts}, but the script ends its epochs earlier")]
        text = f"{counts} batches on the ranks: whoever has more waits for ever ({first.at})"
        cure = "DistributedSampler makes them equal; or drop_last; or Join"
        return [wrong(check, text, cure, See.UNEVEN)]
    for sizes in zip(*(this_pass.sizes[: this_pass.given] for this_pass in passes), strict=False):
        if len({*sizes}) > 1:
            text = f"{counts[0]} on each rank, but local batches of {sizes} samples weigh the same"
            cure = "equal local batches, or a mean over the global batch"
            return [warning(check, f"{text} ({first.at})", cure, See.LOSS)]
    return [right(check, f"{counts[0]} on each rank")]


def order_rows(passes: list[list[Pass]]) -> list[ReportRow]:
    check, first = "order of an epoch", passes[0]
    later = [of_ranks for of_ranks in passes[1:] if of_ranks[0].dataset == first[0].dataset]
    if not later:
        return [not_seen(check, "there was no second epoch")]
    epochs = list(zip(first, later[0], strict=True))  # the first two, of each rank
    by_index = all(this_pass.samples_file for this_pass in (*first, *later[0]))
    if by_index and any(one.indices != two.indices for one, two in epochs):
        return [right(check, "epochs 1 and 2 differ")]
    this_pass = first[0]
    if any(one.checksums != two.checksums for one, two in epochs):
        if not by_index:
            return [right(check, "epochs 1 and 2 differ")]
        if not any(this_pass.drew) and not this_pass.workers:
            return [right(check, "the data set itself changes from epoch to epoch")]
    place = f"loader at {this_pass.at}, sampler {this_pass.sampler}"
    text = f"epochs 1 and 2 have the same order: {place}"
    asked = this_pass.sampler == "DistributedSampler" and this_pass.shuffle
    if asked or this_pass.sampler == "RandomSampler":
        return [wrong(check, text, "sampler.set_epoch(epoch) before each epoch", See.SAME_ORDER)]
    if this_pass.shuffle is False or (by_index and this_pass.indices == sorted(this_pass.indices)):
        return [right(check, "fixed, and no shuffling was asked for")]
    cure = "another order in each epoch; meant so only if the order is part of the data"
    return [warning(check, text, cure, See.SAME_ORDER)]


def dropout_rows(ranks: list[RankRecord]) -> list[ReportRow]:
    for at in set.intersection(*({*rank.dropout} for rank in ranks)):
        if len({rank.dropout[at] for rank in ranks}) > 1:
            return [right("dropout", "the ranks draw different masks")]
        cure = f"{OWN_SEED}; no mistake, but less noise than one process has"
        return [warning("dropout", f"all ranks drop the same positions ({at})", cure)]
    return []


def augmentation_rows(passes: list[Pass]) -> list[ReportRow]:
    """Random numbers that a rank draws while it loads, in this process or in its workers."""
    check, first = "augmentation", passes[0]
    drew = [
        number
        for number in range(len(generators.NAMES))
        if all(this_pass.drew[number] for this_pass in passes)
    ]
    same = [
        generators.NAMES[number]
        for number in drew
        if len({this_pass.generators[number] for this_pass in passes}) == 1
    ]
    seeds_workers = first.workers and first.base_seed is not None
    if seeds_workers and alike(passes, "base_seed"):
        if first.is_stream or not same_dataset(passes):
            return []
        text = f"the workers of all ranks draw the same numbers: one seed (loader at {first.at})"
        return [warning(check, text, f"{OWN_SEED}; harmless without augmentation")]
    if same:
        text = f"all ranks draw the same numbers of {', '.join(same)} while they load"
        return [warning(check, f"{text} ({first.at})", OWN_SEED)]
    if drew:
        return [right(check, "the ranks draw different random numbers")]
    if seeds_workers:
        return [right(check, "the loaders of the ranks give their workers different seeds")]
    return []


def original_epoch_rows(ranks: list[RankRecord], original: RankRecord) -> list[ReportRow]:
    """Do all ranks together train on as many samples, in as many batches, as the original would?
    It got our batches, but its loader has a length of its own."""
    check, passes = "the original's epoch", trained_passes(ranks)
    passes_of_original = [this_pass for this_pass in original.passes if this_pass.steps]
    if not passes or not passes_of_original:
        return []
    epochs = [this_pass.batches_and_samples for this_pass in (passes_of_original[0], *passes[0])]
    known = [epoch for epoch in epochs if epoch is not None]
    if len(known) < len(epochs):
        return [not_seen(check, "a loader does not say how many samples it has")]
    (batches_of_original, samples_of_original), (batches, samples), *others = known
    if not rows_are_split(ranks):
        samples += sum(of_rank for _, of_rank in others)
    text = f"{samples} samples in {batches} batches on {len(ranks)} ranks together, "
    text += f"{samples_of_original} in {batches_of_original} in the original ({passes[0][0].at})"
    if samples < samples_of_original:
        cure = "drop_last in the sampler and in the loader only if the original has it; keep a "
        cure += "sampler of its own, and deal out what that draws"
        return [warning(check, text, cure, See.LOSS)]
    accumulates = any(
        this_pass.steps < this_pass.given for this_pass in (passes[0][0], passes_of_original[0])
    )
    if batches != batches_of_original and not accumulates:
        cure = "the original's batch size / world_size on each rank, and its drop_last; "
        cure += "meant so only if the learning rate was chosen for this global batch"
        return [warning(check, text, cure, See.RATE)]
    return [right(check, text)]
