"""Do the ranks train on the samples of one process, each on its own part?"""

from collections import Counter
from typing import Any

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import LOADING, NO_SET_EPOCH, SAMPLER, amp, iterable, plain
from prove.judge.loader_passes import (
    NEARLY_ALL,
    compared_by_index,
    compute_the_same,
    passes_by_data_set,
    place_of,
    rows_are_split,
    same_dataset,
    same_on_all_ranks,
    sample_count,
    share_one_data_set,
)
from prove.judge.reasons import Heading, Reason
from prove.judge.table import ORDER, WARNING, WRONG, ReportRow, not_seen, right, warning, wrong
from prove.judge.wording import phrase
from prove.rank_record import LoaderPass, RankRecord

NAME = "samples"
BY_CHANCE = 1e-6  # if equal labels are less likely than this, they are no chance
LOADER = "the loader at {at}, sampler {sampler}"
OVERLAP = (
    f"{{together}} of {{size}} samples are seen in an epoch, {{twice}} of them twice ({LOADER})"
)
SHARED = "{share:.0%} of the first {seen} samples are those of another rank, by content "
SHARED += f"({LOADER}; {{kind}})"
SHARD = "DataLoader(dataset, sampler=DistributedSampler(dataset)), or split the data by rank"
SHARD_STREAM = (  # test_prove_data.py computes it
    "split by rank and by worker in __iter__, from the same order in all workers of all ranks: "
    "islice(source, worker * ranks + rank, None, ranks * workers)"
)
SAME_ORDER_FIRST = "before the split, shuffle files or samples with a seed that all ranks share, "
SAME_ORDER_FIRST += "such as the epoch without the rank"
OTHER_GRADIENTS = ", but compute other gradients from them"
OWN_DRAWS = (
    "meant so if each rank draws its own completions, actions or noise for them, as GRPO does"
)
TOLD_APART = "prove it with samples that differ, or with a data set that is read by index"


class Sentence(Reason):
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


def judge(context: CheckContext) -> list[ReportRow]:
    if not share_one_data_set(context.records):
        return []
    data_sets = passes_by_data_set(context.records)
    if not data_sets:
        return [row_of_inputs(context.records)]
    return [row_of_data_set(context.records, epochs) for epochs in data_sets]


def row_of_inputs(records: list[RankRecord]) -> ReportRow:
    """Judge the inputs of the model, if there is no DataLoader: do they differ by rank?"""
    inputs = [[call.checksum for call in rank.model_calls] for rank in records]
    if not all(inputs) or not records[0].step_count:
        return not_seen(NAME, Sentence.NO_INPUTS)
    if any(of_rank != inputs[0] for of_rank in inputs):
        return right(NAME, Sentence.DIFFERENT_INPUTS)
    if len({*inputs[0]}) < 2:
        return not_seen(NAME, Sentence.ONE_INPUT)
    if compute_the_same(records, []):
        return wrong(NAME, Sentence.SAME_INPUTS, calls=len(inputs[0]))
    return warning(NAME, Sentence.SAME_INPUTS_OTHER_GRADIENTS, calls=len(inputs[0]))


def row_of_data_set(records: list[RankRecord], epochs: list[list[LoaderPass]]) -> ReportRow:
    passes, are_split = epochs[0], rows_are_split(records)
    if not compared_by_index(passes):
        return row_by_content(records, epochs, are_split)
    if are_split:
        return right(NAME, Sentence.ROWS_SPLIT, at=passes[0].source_line, sampler=passes[0].sampler)
    by_epoch = [
        row_by_index(records, ranks_passes, number)
        for number, ranks_passes in enumerate(epochs, start=1)
        if all(loader_pass.indices for loader_pass in ranks_passes)
    ]
    return min(by_epoch, key=lambda row: ORDER.index(row.verdict))


def row_by_index(records: list[RankRecord], passes: list[LoaderPass], number: int) -> ReportRow:
    """Judge one pass of all ranks; `number` counts the passes over its data set."""
    first, world_size = passes[0], len(passes)
    loader = {"at": place_of(first, number), "sampler": first.sampler}
    trained = [
        loader_pass.indices[: sum(loader_pass.sizes[: loader_pass.batches_given])]
        for loader_pass in passes
    ]
    if all(indices == trained[0] for indices in trained) and len({*trained[0]}) > 1:
        # Different draws while loading are augmentation; different draws in a step may be intended.
        is_augmented = not same_on_all_ranks(passes, "checksums")
        if is_augmented or compute_the_same(records, passes):
            return wrong(NAME, Sentence.SAME_SAMPLES, **loader)
        return warning(NAME, Sentence.SAME_SAMPLES_OTHER_GRADIENTS, **loader)
    drawn = [{*loader_pass.indices} for loader_pass in passes]
    together, size = len(set().union(*drawn)), sample_count(passes)
    twice, lost = sum(map(len, drawn)) - together, size - together
    parts = [loader_pass.may_draw for loader_pass in passes if loader_pass.may_draw is not None]
    if len(parts) == world_size and len(drawn[0] & drawn[1]) > 1:
        own = len(parts[0])
        if missing := own - len(set.intersection(*parts)):
            return wrong(NAME, Sentence.SUBSETS_DIFFER, own=own, missing=missing, **loader)
    if any(map(draws_with_replacement, passes)):
        return right(NAME, Sentence.WITH_REPLACEMENT, sampler=first.sampler)
    padding = world_size * (1 + max(first.sizes))
    facts = {"together": together, "size": size, "twice": twice, "lost": lost, **loader}
    if twice <= padding and lost > 2 * padding:
        return warning(NAME, Sentence.SAMPLES_LEFT_OUT, **facts)
    if twice <= padding:
        return right(NAME, Sentence.SAMPLES_SPLIT, counts=[*map(len, drawn)], **facts)
    if min(map(len, drawn)) >= NEARLY_ALL * size:
        return warning(NAME, Sentence.ALL_SAMPLES_EACH, world_size=world_size, **facts)
    if first.sampler == "DistributedSampler":
        return wrong(NAME, Sentence.SAMPLERS_DISAGREE, **facts)
    return warning(NAME, Sentence.SAMPLES_OVERLAP, **facts)


def draws_with_replacement(loader_pass: LoaderPass) -> bool:
    """Do samples repeat by chance? If all come equally often, they do not."""
    if "Weighted" in loader_pass.sampler:
        return True
    times = Counter(loader_pass.indices)
    return len(times) < 0.9 * len(loader_pass.indices) and len({*times.values()}) > 1


def row_by_content(
    records: list[RankRecord], epochs: list[list[LoaderPass]], are_split: bool
) -> ReportRow:
    """Judge by contents: streams, and data sets that differ by rank, have no common indices."""
    passes = epochs[0]
    first, facts = passes[0], facts_by_content(passes)
    if draw_alike(passes) and not are_split:
        if not compute_the_same(records, passes):
            return warning(NAME, Sentence.SAME_CONTENTS_OTHER_GRADIENTS, **facts)
        reason = Sentence.SAME_STREAM if first.is_stream else Sentence.SAME_CONTENTS
        return wrong(NAME, reason, **facts)
    if not contents_tell(passes):
        return not_seen(NAME, Sentence.CONTENTS_UNKNOWN, **facts)
    share = max(
        share_in_common(ranks_passes[0].checksums, other.checksums)
        for ranks_passes in epochs
        for other in ranks_passes[1:]
    )
    if share > 0.05:
        is_same = share > 0.5 and compute_the_same(records, passes)
        says = wrong if is_same and not are_split else warning
        has_ended = all(own.ended for own in passes)
        reason = reason_of_shared_stream(share, has_ended)
        reason = reason if first.is_stream else Sentence.PARTS_SHARED
        return says(NAME, reason, share=share, **facts)
    if have_the_same_labels(passes):
        return warning(NAME, Sentence.SAME_LABELS, **facts)
    return right(NAME, Sentence.CONTENTS_SPLIT, share=share, **facts)


def facts_by_content(passes: list[LoaderPass]) -> dict[str, Any]:
    """Name the loader, the number of compared samples, and why only contents are compared."""
    first = passes[0]
    kind = phrase("an IterableDataset" if first.is_stream else "another data set on each rank")
    if not first.is_stream and same_dataset(passes):
        kind = phrase("{sampler} is too long to list", sampler=first.sampler)
    seen = len(first.checksums)
    return {"at": first.source_line, "sampler": first.sampler, "kind": kind, "seen": seen}


def draw_alike(passes: list[LoaderPass]) -> bool:
    """Do all ranks draw the same samples in the same order, too many for chance?"""
    checksums = passes[0].checksums
    are_many = len(checksums) >= 20 and len({*checksums}) >= 5  # few samples may agree by chance
    return are_many and same_on_all_ranks(passes, "checksums")


def contents_tell(passes: list[LoaderPass]) -> bool:
    checksums = passes[0].checksums
    return bool(checksums) and len({*checksums}) >= len(checksums) / 2


def data_sets_in_parts(records: list[RankRecord]) -> list[list[LoaderPass]]:
    """List the first pass over each data set that is compared by content and not drawn alike."""
    if not share_one_data_set(records):
        return []
    first_passes = [epochs[0] for epochs in passes_by_data_set(records)]
    are_split = rows_are_split(records)
    return [
        passes
        for passes in first_passes
        if not compared_by_index(passes)
        and contents_tell(passes)
        and (are_split or not draw_alike(passes))
    ]


def have_the_same_labels(passes: list[LoaderPass]) -> bool:
    """Are the labels the same, too many for chance, while random draws may change the inputs?"""
    draws = any(own.workers_drew or any(own.drew) for own in passes)
    if not draws or not same_on_all_ranks(passes, "labels"):
        return False
    labels = passes[0].labels
    by_chance = sum((times / len(labels)) ** 2 for times in Counter(labels).values())
    return bool(labels) and by_chance ** len(labels) < BY_CHANCE


def reason_of_shared_stream(share: float, has_ended: bool) -> Sentence:
    """Choose the reason why ranks share samples of a stream.

    Nearly equal first samples mean that the stream is not split at all. If it has ended on all
    ranks, each rank splits it in a different order.
    """
    if share > NEARLY_ALL:
        return Sentence.STREAM_NOT_SPLIT
    return Sentence.STREAM_SPLIT_DIFFERENTLY if has_ended else Sentence.CONTENTS_SHARED


def share_in_common(checksums: list[int], others: list[int]) -> float:
    """Return the share of common samples; 0 if samples are too much alike to tell."""
    own, other = {*checksums}, {*others}
    if not other or len(other) < len(others) / 2:
        return 0.0
    return len(own & other) / min(len(own), len(other))


PLANTED = (
    plain(
        "no sampler, no shuffling", WRONG, NAME,
        (LOADING, "batch_size=12 // world_size)"),
    ),
    plain(
        "shuffled alike on all ranks, no sampler", WRONG, NAME,
        (LOADING, "batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(0))"),
    ),
    plain(
        "shuffled by each rank, no sampler", WARNING, NAME,
        (LOADING, "batch_size=12 // world_size, shuffle=True)"),
    ),
    plain(
        "the sampler of rank 0 on all ranks", WRONG, NAME,
        (SAMPLER, "sampler = DistributedSampler(train_set, world_size, 0, seed=0)"),
    ),
    plain(
        "the sampler's seed differs by rank", WRONG, NAME,
        (SAMPLER, "sampler = DistributedSampler(train_set, seed=rank)"),
    ),
    plain(
        "the sampler divides by too many ranks", WARNING, NAME,
        (SAMPLER, "sampler = DistributedSampler(train_set, 2 * world_size, rank, seed=0)"),
    ),
    amp(
        "random_split differs by rank", WRONG, NAME,
        ("torch.Generator().manual_seed(1)", "torch.Generator().manual_seed(rank)"),
    ),
    iterable(
        "an IterableDataset is not split by rank", WRONG, NAME,
        (
            "part = self.rank * parts + (worker.id if worker else 0)",
            "part = worker.id if worker else 0",
        ),
        ("None, self.world_size * parts)", "None, parts)"),
    ),
    plain(
        "all ranks draw the same few samples, with replacement", WRONG, NAME,
        ("Points(SAMPLES, 0.1)", "Points(SAMPLES, 0.0)"),
        (
            "    sampler = DistributedSampler(train_set, seed=0)\n",
            "    order = torch.Generator().manual_seed(0)\n"
            "    sampler = torch.utils.data.RandomSampler(range(8), True, 10**7, "
            "generator=order)\n",
        ),
        NO_SET_EPOCH,
        (
            "        for points, labels in loader:\n",
            "        batches = iter(loader)\n"
            "        for _ in range(8):\n"
            "            points, labels = next(batches)\n",
        ),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ALL_RECORDS, planted=PLANTED)
