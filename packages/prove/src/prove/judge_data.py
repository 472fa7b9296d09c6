"""Do the ranks train on the samples of one process, each on its own part?

A LoaderRun is what the record of a rank says of one pass over a loader.
"""

from collections import Counter

import torch

from prove import generators
from prove.record import LoaderRun, RankRecord
from prove.table import ReportRow, See, not_seen, right, warning, wrong

ALL_BUT_A_FEW = 0.98  # the share of a data set that counts as the whole
SHARD = "DataLoader(dataset, sampler=DistributedSampler(dataset)), or split the data by rank"
OWN_SEED = "torch.manual_seed(seed + rank) after the model is built; numpy and random alike"


def load_samples(records: list[RankRecord]) -> None:
    """Read from the files beside the records which samples each pass drew, and may draw."""
    loader_runs = [loader_run for rank in records for loader_run in rank.loader_runs]
    for loader_run in [loader_run for loader_run in loader_runs if loader_run.samples_file]:
        listed = torch.load(loader_run.samples_file, weights_only=True)
        loader_run.indices = listed["indices"].tolist()
        may_draw = listed["may_draw"]
        loader_run.may_draw = None if may_draw is None else set(may_draw.tolist())


def trained_loader_runs(records: list[RankRecord]) -> list[list[LoaderRun]]:
    """For each pass in which all ranks made steps: the records of the ranks."""
    trained = [
        [loader_run for loader_run in rank.loader_runs if loader_run.steps] for rank in records
    ]
    return [list(of_ranks) for of_ranks in zip(*trained, strict=False)]


def alike(loader_runs: list[LoaderRun], name: str) -> bool:
    return all(
        getattr(loader_run, name) == getattr(loader_runs[0], name) for loader_run in loader_runs
    )


def same_dataset(loader_runs: list[LoaderRun]) -> bool:
    known = bool(loader_runs[0].fingerprint)
    return known and alike(loader_runs, "fingerprint") and alike(loader_runs, "dataset_length")


def sample_count(loader_runs: list[LoaderRun]) -> int:
    """How many samples the ranks may draw together."""
    parts = [loader_run.may_draw for loader_run in loader_runs if loader_run.may_draw is not None]
    return (
        len(set().union(*parts))
        if len(parts) == len(loader_runs)
        else loader_runs[0].dataset_length or 0
    )


def rows_are_split(records: list[RankRecord]) -> bool:
    """The script gives each rank a part of the rows of a batch that all have loaded."""
    loader_runs = trained_loader_runs(records)
    if not loader_runs or not alike(loader_runs[0], "indices"):
        return False
    loaded: dict[tuple, int] = {}  # rows of each batch of each rank
    used: Counter = Counter()  # those that went into the model
    for rank in records:
        for call in rank.model_calls:
            if call.batch_size and call.batch_size > 1:
                loaded.setdefault((rank.rank, call.batch), call.batch_size)
                used[rank.rank, call.batch] += call.rows
    n = len(records)
    shares = [used[batch] in (rows // n, -(-rows // n)) for batch, rows in loaded.items()]
    return bool(shares) and all(shares)


def same_contents(records: list[RankRecord]) -> bool:
    loader_runs = trained_loader_runs(records)
    return bool(loader_runs) and all(alike(of_ranks, "checksums") for of_ranks in loader_runs)


def data_rows(records: list[RankRecord]) -> list[ReportRow]:
    if len(records) < 2 or "groups of some ranks" in records[0].notes:
        return []
    loader_runs = trained_loader_runs(records)
    if not loader_runs:
        return forward_input_rows(records)
    rows = (
        sample_rows(records, loader_runs[0])
        + length_rows(records, loader_runs[0])
        + order_rows(loader_runs)
    )
    return rows + dropout_rows(records) + augmentation_rows(loader_runs[0])


def forward_input_rows(records: list[RankRecord]) -> list[ReportRow]:
    """A script without a DataLoader: do the ranks call the model with different tensors?"""
    check = "samples"
    inputs = [[call.checksum for call in rank.model_calls] for rank in records]
    if not all(inputs) or not records[0].steps or len({*inputs[0]}) < 2:
        return [not_seen(check, "no step in a pass over a DataLoader, nor inputs that differ")]
    if all(of_rank == inputs[0] for of_rank in inputs):
        text = f"all ranks call the model with the same tensors, {len(inputs[0])} times"
        return [wrong(check, text, "seed by rank, or split the data by rank", See.LOSS)]
    return [right(check, "no DataLoader; the ranks call the model with different tensors")]


def sample_rows(records: list[RankRecord], loader_runs: list[LoaderRun]) -> list[ReportRow]:
    first, are_split = loader_runs[0], rows_are_split(records)
    at = f"the loader at {first.at}, sampler {first.sampler}"
    if (
        first.is_stream
        or not all(loader_run.indices for loader_run in loader_runs)
        or not same_dataset(loader_runs)
    ):
        return sample_rows_by_content(loader_runs, at, are_split)
    if are_split:
        text = f"all ranks load the same batches, and each takes its part ({at})"
        return [right("samples", text)]
    return [sample_row_by_index(loader_runs, at)]


def sample_row_by_index(loader_runs: list[LoaderRun], at: str) -> ReportRow:
    first, records, check = loader_runs[0], len(loader_runs), "samples"
    trained = [
        loader_run.indices[: sum(loader_run.sizes[: loader_run.given])]
        for loader_run in loader_runs
    ]
    if all(indices == trained[0] for indices in trained) and len({*trained[0]}) > 1:
        text = f"all ranks draw the same samples in the same order: {at}"
        return wrong(check, text, SHARD, See.LOSS)
    drawn = [{*loader_run.indices} for loader_run in loader_runs]
    together, size = len(set().union(*drawn)), sample_count(loader_runs)
    twice, lost = sum(map(len, drawn)) - together, size - together
    parts = [loader_run.may_draw for loader_run in loader_runs if loader_run.may_draw is not None]
    if len(parts) == records and len(drawn[0] & drawn[1]) > 1:
        common = len(set.intersection(*parts))
        if common < len(parts[0]):
            text = f"the ranks split the data set differently: of {len(parts[0])} samples that "
            text += f"rank 0 may draw, all ranks may draw {common} ({at})"
            cure = "give random_split a generator with the same seed on all ranks"
            return wrong(check, text, cure, See.LOSS)
    repeats = any(
        len({*loader_run.indices}) < 0.9 * len(loader_run.indices) for loader_run in loader_runs
    )
    if repeats or "Weighted" in first.sampler:
        return right(check, f"{first.sampler} draws with replacement, other samples per rank")
    padding = records * (1 + max(first.sizes))
    if twice <= padding and lost > 2 * padding:
        text = f"{together} of {size} samples are in an epoch, {lost} in that of no rank ({at})"
        return warning(check, text, "meant so only if the others are left out on purpose")
    if twice <= padding:
        counts = " + ".join(str(len(indices)) for indices in drawn)
        return right(check, f"{counts} of {size} samples, {twice} of them twice ({at})")
    if min(map(len, drawn)) >= ALL_BUT_A_FEW * size:
        text = f"each rank draws all {size} samples, in another order: an epoch is {records} epochs"
        cure = f"{SHARD}; meant so only if the number of epochs was divided, too"
        return warning(check, f"{text} ({at})", cure, See.LOSS)
    text = f"{together} of {size} samples are seen in an epoch, {twice} of them twice ({at})"
    if first.sampler == "DistributedSampler":
        cure = "the same seed for the sampler of all ranks, and the right num_replicas and rank"
        return wrong(check, text, cure, See.LOSS)
    return warning(check, text, SHARD, See.LOSS)


def sample_rows_by_content(
    loader_runs: list[LoaderRun], at: str, are_split: bool
) -> list[ReportRow]:
    """For streams, and for data sets of which each rank holds another: no indices to compare."""
    first, check = loader_runs[0], "samples"
    kind = "an IterableDataset" if first.is_stream else "another data set on each rank"
    if not first.is_stream and same_dataset(loader_runs):
        kind = f"{first.sampler} is too long to list"
    seen, different = len(first.checksums), len({*first.checksums})  # samples may come again
    all_alike = alike(loader_runs, "checksums") and not are_split
    if different >= 5 and seen >= 20 and all_alike:
        text = f"all ranks draw the same {seen} samples in the same order ({at}; {kind})"
        return [wrong(check, text, SHARD, See.LOSS)]
    if not seen or different < seen / 2:
        return [not_seen(check, f"samples cannot be told apart ({at}; {kind})")]
    share = max(share_in_common(first.checksums, other.checksums) for other in loader_runs[1:])
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
    sampler_splits = first.sampler == "DistributedSampler" and alike(loader_runs, "dataset_length")
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


def length_rows(records: list[RankRecord], loader_runs: list[LoaderRun]) -> list[ReportRow]:
    check, first = "batches per epoch", loader_runs[0]
    listed = [loader_run.batches for loader_run in loader_runs if loader_run.batches is not None]
    counts = (
        listed
        if len(listed) == len(loader_runs)
        else [loader_run.given for loader_run in loader_runs]
    )
    if counts is not listed and not any(loader_run.ended for loader_run in loader_runs):
        return [not_seen(check, "no rank reached the end of its data")]
    if len({*counts}) > 1:
        if "join" in records[0].notes:
            return [right(check, f"{counts}, and Join lets the shorter ones wait")]
        if any(
            loader_run.given < min(n, loader_run.limit)
            for loader_run, n in zip(loader_runs, counts, strict=True)
        ):
            return [not_seen(check, f"{counts}, but the script ends its epochs earlier")]
        text = f"{counts} batches on the ranks: whoever has more waits for ever ({first.at})"
        cure = "DistributedSampler makes them equal; or drop_last; or Join"
        return [wrong(check, text, cure, See.UNEVEN)]
    for sizes in zip(
        *(loader_run.sizes[: loader_run.given] for loader_run in loader_runs), strict=False
    ):
        if len({*sizes}) > 1:
            text = f"{counts[0]} on each rank, but local batches of {sizes} samples weigh the same"
            cure = "equal local batches, or a mean over the global batch"
            return [warning(check, f"{text} ({first.at})", cure, See.LOSS)]
    return [right(check, f"{counts[0]} on each rank")]


def order_rows(loader_runs: list[list[LoaderRun]]) -> list[ReportRow]:
    check, first = "order of an epoch", loader_runs[0]
    later = [of_ranks for of_ranks in loader_runs[1:] if of_ranks[0].dataset == first[0].dataset]
    if not later:
        return [not_seen(check, "there was no second epoch")]
    epochs = list(zip(first, later[0], strict=True))  # the first two, of each rank
    by_index = all(loader_run.samples_file for loader_run in (*first, *later[0]))
    if by_index and any(one.indices != two.indices for one, two in epochs):
        return [right(check, "epochs 1 and 2 differ")]
    loader_run = first[0]
    if any(one.checksums != two.checksums for one, two in epochs):
        if not by_index:
            return [right(check, "epochs 1 and 2 differ")]
        if not any(loader_run.drew) and not loader_run.workers:
            return [right(check, "the data set itself changes from epoch to epoch")]
    place = f"loader at {loader_run.at}, sampler {loader_run.sampler}"
    text = f"epochs 1 and 2 have the same order: {place}"
    asked = loader_run.sampler == "DistributedSampler" and loader_run.shuffle
    if asked or loader_run.sampler == "RandomSampler":
        return [wrong(check, text, "sampler.set_epoch(epoch) before each epoch", See.SAME_ORDER)]
    if loader_run.shuffle is False or (
        by_index and loader_run.indices == sorted(loader_run.indices)
    ):
        return [right(check, "fixed, and no shuffling was asked for")]
    cure = "another order in each epoch; meant so only if the order is part of the data"
    return [warning(check, text, cure, See.SAME_ORDER)]


def dropout_rows(records: list[RankRecord]) -> list[ReportRow]:
    for at in set.intersection(*({*rank.dropout} for rank in records)):
        if len({rank.dropout[at] for rank in records}) > 1:
            return [right("dropout", "the ranks draw different masks")]
        cure = f"{OWN_SEED}; no mistake, but less noise than one process has"
        return [warning("dropout", f"all ranks drop the same positions ({at})", cure)]
    return []


def augmentation_rows(loader_runs: list[LoaderRun]) -> list[ReportRow]:
    """Random numbers that a rank draws while it loads, in this process or in its workers."""
    check, first = "augmentation", loader_runs[0]
    drew = [
        number
        for number in range(len(generators.NAMES))
        if all(loader_run.drew[number] for loader_run in loader_runs)
    ]
    same = [
        generators.NAMES[number]
        for number in drew
        if len({loader_run.generators[number] for loader_run in loader_runs}) == 1
    ]
    seeds_workers = first.workers and first.base_seed is not None
    if seeds_workers and alike(loader_runs, "base_seed"):
        if first.is_stream or not same_dataset(loader_runs):
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


def original_epoch_rows(records: list[RankRecord], original: RankRecord) -> list[ReportRow]:
    """Do all ranks together train on as many samples, in as many batches, as the original would?
    It got our batches, but its loader has a length of its own."""
    check, loader_runs = "the original's epoch", trained_loader_runs(records)
    loader_runs_of_original = [
        loader_run for loader_run in original.loader_runs if loader_run.steps
    ]
    if not loader_runs or not loader_runs_of_original:
        return []
    epochs = [
        loader_run.batches_and_samples
        for loader_run in (loader_runs_of_original[0], *loader_runs[0])
    ]
    known = [epoch for epoch in epochs if epoch is not None]
    if len(known) < len(epochs):
        return [not_seen(check, "a loader does not say how many samples it has")]
    (batches_of_original, samples_of_original), (batches, samples), *others = known
    if not rows_are_split(records):
        samples += sum(of_rank for _, of_rank in others)
    text = f"{samples} samples in {batches} batches on {len(records)} ranks together, "
    text += (
        f"{samples_of_original} in {batches_of_original} in the original ({loader_runs[0][0].at})"
    )
    if samples < samples_of_original:
        cure = "drop_last in the sampler and in the loader only if the original has it; keep a "
        cure += "sampler of its own, and deal out what that draws"
        return [warning(check, text, cure, See.LOSS)]
    accumulates = any(
        loader_run.steps < loader_run.given
        for loader_run in (loader_runs[0][0], loader_runs_of_original[0])
    )
    if batches != batches_of_original and not accumulates:
        cure = "the original's batch size / world_size on each rank, and its drop_last; "
        cure += "meant so only if the learning rate was chosen for this global batch"
        return [warning(check, text, cure, See.RATE)]
    return [right(check, text)]
