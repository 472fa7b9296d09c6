"""Which passes over a loader belong together, and what do they have in common on all ranks?

A LoaderPass is the record of one pass on one rank.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from prove.judge.wording import phrase
from prove.rank_record import Flag, LoaderPass, RankRecord

NEARLY_ALL = 0.98  # the share of a data set that counts as the whole


def with_samples(records: list[RankRecord]) -> list[RankRecord]:
    """Complete the records with the indices of each pass, which lie in files of their own."""
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
    """List the passes in which all ranks made steps, each as the records of all ranks."""
    trained = [rank.trained_passes for rank in records]
    return [list(ranks_passes) for ranks_passes in zip(*trained, strict=False)]


def passes_by_data_set(records: list[RankRecord]) -> list[list[list[LoaderPass]]]:
    """Group the trained passes by their data set."""
    passes_of: dict[int, list[list[LoaderPass]]] = {}  # by the number of the data set
    for passes in trained_loader_passes(records):
        passes_of.setdefault(passes[0].dataset_number, []).append(passes)
    return [*passes_of.values()]


def epochs_of_data_set(records: list[RankRecord]) -> list[list[LoaderPass]]:
    """List the passes over the data set that is trained on first."""
    passes = trained_loader_passes(records)
    datasets = [each.dataset_number for each in passes[0]] if passes else []
    return [each for each in passes if [own.dataset_number for own in each] == datasets]


def place_of(loader_pass: LoaderPass, number: int) -> str | dict[str, Any]:
    """Say where the loader was made; `number` counts the passes over its data set."""
    if number == 1:
        return loader_pass.source_line
    return phrase("{at} in pass {number} over it", at=loader_pass.source_line, number=number)


def same_on_all_ranks(passes: list[LoaderPass], *fields: str) -> bool:
    first, *others = passes
    return all(getattr(other, name) == getattr(first, name) for name in fields for other in others)


def same_dataset(passes: list[LoaderPass]) -> bool:
    known = bool(passes[0].fingerprint)
    return known and same_on_all_ranks(passes, "fingerprint", "dataset_length")


def differing_fields(passes: list[LoaderPass]) -> list[str]:
    """Name the fields that differ between the ranks, although the first tensor is the same."""
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


def compared_by_index(passes: list[LoaderPass]) -> bool:
    """Do indices tell which samples two ranks share? Otherwise, only contents do."""
    same = same_dataset(passes) or bool(differing_fields(passes))
    return same and not passes[0].is_stream and all(own.indices for own in passes)


def sample_count(passes: list[LoaderPass]) -> int:
    """Count the samples from which all ranks together may draw."""
    parts = [loader_pass.may_draw for loader_pass in passes if loader_pass.may_draw is not None]
    return len(set().union(*parts)) if len(parts) == len(passes) else passes[0].dataset_length or 0


def rows_are_split(records: list[RankRecord]) -> bool:
    """Do all ranks load the same batches, and does each use only a part of the rows?"""
    passes = trained_loader_passes(records)
    if not passes or not same_on_all_ranks(passes[0], "indices"):
        return False
    if compute_the_same(records, passes[0]):  # all ranks use the same rows
        return False
    loaded: dict[tuple, int] = {}  # number of loaded rows, by rank and batch
    used: Counter = Counter()  # number of rows that went into the model
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
    return bool(passes) and all(
        same_on_all_ranks(ranks_passes, "checksums") for ranks_passes in passes
    )


def share_one_data_set(records: list[RankRecord]) -> bool:
    """Do the ranks train on one data set? With process groups, each may have its own."""
    return len(records) > 1 and Flag.HAS_GROUPS not in records[0].flags


def compute_the_same(records: list[RankRecord], passes: list[LoaderPass]) -> bool:
    """Does each rank compute the same from these passes?

    The gradients decide. With dropout, which differs by rank, or without gradients, the inputs of
    the model decide.
    """
    gradients = [gradients_of(rank, own) for rank, own in zip(records, passes, strict=False)]
    if not records[0].dropout and gradients and all(gradients):
        pairs = zip(*gradients, strict=False)
        return all(max(values) - min(values) <= 1e-9 * max(map(abs, values)) for values in pairs)
    numbers = [own.pass_index for own in passes] or [0] * len(records)
    inputs = [
        [call.checksum for call in rank.model_calls if call.batch[0] == number or not passes]
        for rank, number in zip(records, numbers, strict=True)
    ]
    return all(of_rank == inputs[0] for of_rank in inputs)


def gradients_of(rank: RankRecord, loader_pass: LoaderPass | None) -> list[float]:
    """Return the projected local gradients of a pass, from before any averaging."""
    optimizers = [optimizer.steps for optimizer in rank.optimizers]
    if loader_pass is not None and len(optimizers) == 1:  # with several, a step has no known pass
        before = loader_pass.steps_before
        optimizers = [optimizers[0][before : before + loader_pass.step_count]]
    steps = [step for steps in optimizers for step in steps]
    return [value for step in steps for value in step.local_gradients if value is not None]
