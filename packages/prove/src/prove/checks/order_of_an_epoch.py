"""Does each epoch have its own order?"""

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import NO_SET_EPOCH, SAMPLER, iterable, plain
from prove.judge.reasons import Heading, Reason
from prove.judge.table import WARNING, WRONG, ReportRow, not_seen, right, warning, wrong

NAME = "order of an epoch"


class Sentence(Reason):
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


def judge(context: CheckContext) -> list[ReportRow]:
    if not context.epochs:
        return []
    first, *others = context.epochs
    later = [
        ranks_passes
        for ranks_passes in others
        if ranks_passes[0].dataset_number == first[0].dataset_number
    ]
    if not later:
        return [not_seen(NAME, Sentence.NO_SECOND_EPOCH, at=first[0].source_line)]
    epochs = list(zip(first, later[0], strict=True))  # the first two epochs of each rank
    by_index = all(loader_pass.samples_file for loader_pass in (*first, *later[0]))
    if by_index and any(one.indices != two.indices for one, two in epochs):
        return [right(NAME, Sentence.ORDER_CHANGES)]
    loader_pass = first[0]
    if any(one.checksums != two.checksums for one, two in epochs):
        if not by_index:
            return [right(NAME, Sentence.ORDER_CHANGES)]
        if not any(loader_pass.drew) and not loader_pass.workers:
            return [right(NAME, Sentence.DATA_CHANGES)]
    loader = {"at": loader_pass.source_line, "sampler": loader_pass.sampler}
    asked = loader_pass.sampler == "DistributedSampler" and loader_pass.shuffle
    if asked or loader_pass.sampler == "RandomSampler":
        return [wrong(NAME, Sentence.EPOCH_NOT_SET, **loader)]
    if loader_pass.shuffle is False or (
        by_index and loader_pass.indices == sorted(loader_pass.indices)
    ):
        return [right(NAME, Sentence.ORDER_FIXED)]
    return [warning(NAME, Sentence.ORDER_REPEATS, **loader)]


PLANTED = (
    plain(
        "no set_epoch", WRONG, NAME,
        NO_SET_EPOCH,
    ),
    plain(
        "an order of its own, the same in each epoch", WARNING, NAME,
        (
            SAMPLER,
            "order = torch.randperm(96, "
            "generator=torch.Generator().manual_seed(3)).tolist()\n"
            "    sampler = Subset(order, range(rank, 96, world_size))",
        ),
        NO_SET_EPOCH,
    ),
    iterable(
        "a stream in the same order in each epoch", WARNING, NAME,
        ("        dataset.epoch = epoch\n", ""),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ALL_RECORDS, planted=PLANTED)
