"""Do the ranks train on the samples of one process, each on its own part?

A LoaderPass is what the record of a rank says of one pass over a loader.
"""

from collections import Counter
from dataclasses import replace

import torch

from prove.judge.reasons import Phrase
from prove.judge.run_reasons import RunReason
from prove.judge.table import ORDER, Check, ReportRow, not_seen, right, warning, wrong
from prove.judge.wording import phrase
from prove.rank_record import LoaderPass, Note, RankRecord

NEARLY_ALL = 0.98  # the share of a data set that counts as the whole
BY_CHANCE = 1e-6  # how rarely two ranks may have the same labels in the same order


def with_samples(records: list[RankRecord]) -> list[RankRecord]:
    """The records, and from the files beside them which samples each pass drew, and may draw."""
    return [
        replace(rank, loader_passes=[*map(pass_with_samples, rank.loader_passes)])
        for rank in records
    ]


def pass_with_samples(loader_pass: LoaderPass) -> LoaderPass:
    if not loader_pass.samples_file:
        return loader_pass
    listed = torch.load(loader_pass.samples_file, weights_only=True)
    subset = listed["may_draw"]
    may_draw = None if subset is None else set(subset.tolist())
    return replace(loader_pass, indices=listed["indices"].tolist(), may_draw=may_draw)


def trained_loader_passes(records: list[RankRecord]) -> list[list[LoaderPass]]:
    """For each pass in which all ranks made steps: the records of the ranks."""
    trained = [
        [loader_pass for loader_pass in rank.loader_passes if loader_pass.steps] for rank in records
    ]
    return [list(of_ranks) for of_ranks in zip(*trained, strict=False)]


def same_on_all_ranks(passes: list[LoaderPass], *fields: str) -> bool:
    first, *others = passes
    return all(getattr(other, name) == getattr(first, name) for name in fields for other in others)


def same_dataset(passes: list[LoaderPass]) -> bool:
    known = bool(passes[0].fingerprint)
    return known and same_on_all_ranks(passes, "fingerprint", "dataset_length")


def differing_fields(passes: list[LoaderPass]) -> list[str]:
    """Of samples whose first tensor is the same on all ranks: the fields that are not the same."""
    first, fields = passes[0].fingerprint, passes[0].fields
    if not first or not same_on_all_ranks(passes, "fields", "dataset_length"):
        return []
    inputs = [[of_sample[0] for of_sample in own.fingerprint] for own in passes]
    if any(of_rank != inputs[0] for of_rank in inputs) or len({*inputs[0]}) < 2:
        return []
    return [
        name
        for number, name in enumerate(fields, start=1)
        if name and any(
            own.fingerprint[sample][number] != first[sample][number]
            for own in passes for sample in range(len(first))
        )
    ]  # fmt: skip


def sample_count(passes: list[LoaderPass]) -> int:
    """How many samples the ranks may draw together."""
    parts = [loader_pass.may_draw for loader_pass in passes if loader_pass.may_draw is not None]
    return len(set().union(*parts)) if len(parts) == len(passes) else passes[0].dataset_length or 0


def rows_are_split(records: list[RankRecord]) -> bool:
    """The script gives each rank a part of the rows of a batch that all have loaded."""
    passes = trained_loader_passes(records)
    if not passes or not same_on_all_ranks(passes[0], "indices"):
        return False
    if compute_the_same(records, passes[0]):  # all take the same rows
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
    passes = trained_loader_passes(records)
    return bool(passes) and all(same_on_all_ranks(of_ranks, "checksums") for of_ranks in passes)


def share_one_data_set(records: list[RankRecord]) -> bool:
    """False for one rank, and for groups of ranks, each of which may train on what it likes."""
    return len(records) > 1 and Note.HAS_GROUPS not in records[0].notes


def compute_the_same(records: list[RankRecord], passes: list[LoaderPass]) -> bool:
    """Does each rank compute from these passes what the others do? Dropout alone makes no
    difference: then what the model is given decides, and where there are no gradients."""
    gradients = [gradients_of(rank, own) for rank, own in zip(records, passes, strict=False)]
    if not records[0].dropout and gradients and all(gradients):
        pairs = zip(*gradients, strict=False)
        return all(max(values) - min(values) <= 1e-9 * max(map(abs, values)) for values in pairs)
    numbers = [own.number for own in passes] or [0] * len(records)
    inputs = [
        [call.checksum for call in rank.model_calls if call.batch[0] == number or not passes]
        for rank, number in zip(records, numbers, strict=True)
    ]
    return all(of_rank == inputs[0] for of_rank in inputs)


def gradients_of(rank: RankRecord, loader_pass: LoaderPass | None) -> list[float]:
    """Projected, as backward gave them to this rank in a pass, before anybody averaged them."""
    optimizers = [optimizer.steps for optimizer in rank.optimizers]
    if loader_pass is not None and len(optimizers) == 1:  # else nobody knows which steps are its
        before = loader_pass.steps_before
        optimizers = [optimizers[0][before : before + loader_pass.steps]]
    steps = [step for steps in optimizers for step in steps]
    return [value for step in steps for value in step.local_gradients if value is not None]


def forward_input_rows(records: list[RankRecord]) -> list[ReportRow]:
    """A script without a DataLoader: do the ranks call the model with different tensors?"""
    check = Check.SAMPLES
    inputs = [[call.checksum for call in rank.model_calls] for rank in records]
    if not all(inputs) or not records[0].steps:
        return [not_seen(check, RunReason.NO_INPUTS)]
    if any(of_rank != inputs[0] for of_rank in inputs):
        return [right(check, RunReason.DIFFERENT_INPUTS)]
    if len({*inputs[0]}) < 2:
        return [not_seen(check, RunReason.ONE_INPUT)]
    if compute_the_same(records, []):
        return [wrong(check, RunReason.SAME_INPUTS, calls=len(inputs[0]))]
    return [warning(check, RunReason.SAME_INPUTS_OTHER_GRADIENTS, calls=len(inputs[0]))]


def sample_rows(records: list[RankRecord]) -> list[ReportRow]:
    if not share_one_data_set(records):
        return []
    passes_of: dict[int, list[list[LoaderPass]]] = {}  # by the number of their data set
    for passes in trained_loader_passes(records):
        passes_of.setdefault(passes[0].dataset, []).append(passes)
    if not passes_of:
        return forward_input_rows(records)
    return [row for epochs in passes_of.values() for row in rows_of_dataset(records, epochs)]


def rows_of_dataset(records: list[RankRecord], epochs: list[list[LoaderPass]]) -> list[ReportRow]:
    passes, are_split = epochs[0], rows_are_split(records)
    first, rows, fields = passes[0], [], differing_fields(passes)
    loader = {"at": first.at, "sampler": first.sampler}
    if fields:
        says = wrong if first.sampler == "DistributedSampler" else warning
        rows = [says(Check.ONE_DATA_SET, RunReason.FIELDS_DIFFER, names=fields, **loader)]
    are_the_same = same_dataset(passes) or bool(fields)
    by_index = all(loader_pass.indices for loader_pass in passes) and are_the_same
    if first.is_stream or not by_index:
        return rows + sample_rows_by_content(records, epochs, are_split)
    if are_split:
        return [*rows, right(Check.SAMPLES, RunReason.ROWS_SPLIT, **loader)]
    by_epoch = [
        sample_row_by_index(records, of_ranks, number)
        for number, of_ranks in enumerate(epochs, start=1)
        if all(loader_pass.indices for loader_pass in of_ranks)
    ]
    return [*rows, min(by_epoch, key=lambda row: ORDER.index(row.verdict))]


def sample_row_by_index(
    records: list[RankRecord], passes: list[LoaderPass], number: int
) -> ReportRow:
    """number: of these passes, among those over their data set."""
    first, world_size, check = passes[0], len(passes), Check.SAMPLES
    at = first.at if number == 1 else phrase(Phrase.IN_PASS, at=first.at, number=number)
    loader = {"at": at, "sampler": first.sampler}
    trained = [
        loader_pass.indices[: sum(loader_pass.sizes[: loader_pass.batches_given])]
        for loader_pass in passes
    ]
    if all(indices == trained[0] for indices in trained) and len({*trained[0]}) > 1:
        # What is drawn while they are loaded is augmentation; what a step draws may be its purpose.
        is_augmented = not same_on_all_ranks(passes, "checksums")
        if is_augmented or compute_the_same(records, passes):
            return wrong(check, RunReason.SAME_SAMPLES, **loader)
        return warning(check, RunReason.SAME_SAMPLES_OTHER_GRADIENTS, **loader)
    drawn = [{*loader_pass.indices} for loader_pass in passes]
    together, size = len(set().union(*drawn)), sample_count(passes)
    twice, lost = sum(map(len, drawn)) - together, size - together
    parts = [loader_pass.may_draw for loader_pass in passes if loader_pass.may_draw is not None]
    if len(parts) == world_size and len(drawn[0] & drawn[1]) > 1:
        own = len(parts[0])
        if missing := own - len(set.intersection(*parts)):
            return wrong(check, RunReason.SUBSETS_DIFFER, own=own, missing=missing, **loader)
    if any(map(draws_with_replacement, passes)):
        return right(check, RunReason.WITH_REPLACEMENT, sampler=first.sampler)
    padding = world_size * (1 + max(first.sizes))
    facts = {"together": together, "size": size, "twice": twice, "lost": lost, **loader}
    if twice <= padding and lost > 2 * padding:
        return warning(check, RunReason.SAMPLES_LEFT_OUT, **facts)
    if twice <= padding:
        return right(check, RunReason.SAMPLES_SPLIT, counts=[*map(len, drawn)], **facts)
    if min(map(len, drawn)) >= NEARLY_ALL * size:
        return warning(check, RunReason.ALL_SAMPLES_EACH, world_size=world_size, **facts)
    if first.sampler == "DistributedSampler":
        return wrong(check, RunReason.SAMPLERS_DISAGREE, **facts)
    return warning(check, RunReason.SAMPLES_OVERLAP, **facts)


def draws_with_replacement(loader_pass: LoaderPass) -> bool:
    """A sampler that gives all samples twice, as two epochs in one, does not."""
    if "Weighted" in loader_pass.sampler:
        return True
    times = Counter(loader_pass.indices)
    return len(times) < 0.9 * len(loader_pass.indices) and len({*times.values()}) > 1


def sample_rows_by_content(
    records: list[RankRecord], epochs: list[list[LoaderPass]], are_split: bool
) -> list[ReportRow]:
    """For streams, and for data sets of which each rank holds another: no indices to compare."""
    passes = epochs[0]
    first, check = passes[0], Check.SAMPLES
    kind = phrase(Phrase.STREAM if first.is_stream else Phrase.OTHER_DATA_SET)
    if not first.is_stream and same_dataset(passes):
        kind = phrase(Phrase.TOO_LONG, sampler=first.sampler)
    samples, different = len(first.checksums), len({*first.checksums})  # samples may come again
    loader = {"at": first.at, "sampler": first.sampler, "kind": kind, "seen": samples}
    all_alike = same_on_all_ranks(passes, "checksums") and not are_split
    if different >= 5 and samples >= 20 and all_alike:
        if not compute_the_same(records, passes):
            return [warning(check, RunReason.SAME_CONTENTS_OTHER_GRADIENTS, **loader)]
        reason = RunReason.SAME_STREAM if first.is_stream else RunReason.SAME_CONTENTS
        return [wrong(check, reason, **loader)]
    if not samples or different < samples / 2:
        return [not_seen(check, RunReason.CONTENTS_UNKNOWN, **loader)]
    share = max(
        share_in_common(of_ranks[0].checksums, other.checksums)
        for of_ranks in epochs
        for other in of_ranks[1:]
    )
    if share > 0.05:
        is_same = share > 0.5 and compute_the_same(records, passes)
        says = wrong if is_same and not are_split else warning
        has_ended = all(own.ended for own in passes)
        reason = reason_of_shared_stream(share, has_ended)
        reason = reason if first.is_stream else RunReason.PARTS_SHARED
        rows = [says(check, reason, share=share, **loader)]
    elif have_the_same_labels(passes):
        rows = [warning(check, RunReason.SAME_LABELS, **loader)]
    else:
        rows = [right(check, RunReason.CONTENTS_SPLIT, share=share, **loader)]
    of_workers = first.contents[: first.workers]  # each gives one batch in turn
    workers_alike = all(batch == of_workers[0] for batch in of_workers)
    if first.is_stream and len(of_workers) > 1 and workers_alike:
        rows.append(wrong(Check.WORKERS, RunReason.WORKERS_ALIKE, workers=first.workers, **loader))
    sampler_splits = first.sampler == "DistributedSampler" and same_on_all_ranks(
        passes, "dataset_length"
    )
    if first.fingerprint and sampler_splits and not differing_fields(passes):
        rows.append(warning(Check.ONE_DATA_SET, RunReason.DATA_SETS_DIFFER, **loader))
    return rows


def have_the_same_labels(passes: list[LoaderPass]) -> bool:
    """In the same order, which is no chance; and the inputs may differ by what a rank draws."""
    draws = any(own.workers_drew or any(own.drew) for own in passes)
    if not draws or not same_on_all_ranks(passes, "labels"):
        return False
    labels = passes[0].labels
    by_chance = sum((times / len(labels)) ** 2 for times in Counter(labels).values())
    return bool(labels) and by_chance ** len(labels) < BY_CHANCE


def reason_of_shared_stream(share: float, has_ended: bool) -> RunReason:
    """Is it not split at all, or in another order on each rank? Of a split one, no rank has all,
    and the first samples of two ranks are not nearly the same."""
    if share > NEARLY_ALL:
        return RunReason.STREAM_NOT_SPLIT
    return RunReason.STREAM_SPLIT_DIFFERENTLY if has_ended else RunReason.CONTENTS_SHARED


def share_in_common(checksums: list[int], others: list[int]) -> float:
    """The share of samples with the same content; 0 if the samples are too much alike to tell."""
    own, other = {*checksums}, {*others}
    if not other or len(other) < len(others) / 2:
        return 0.0
    return len(own & other) / min(len(own), len(other))
