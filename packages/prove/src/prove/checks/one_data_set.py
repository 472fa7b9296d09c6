"""Do the ranks hold the same data set, before a sampler divides it?"""

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import plain
from prove.checks.samples import LOADER, data_sets_in_parts, facts_by_content
from prove.judge.loader_passes import (
    differing_fields,
    passes_by_data_set,
    same_on_all_ranks,
    share_one_data_set,
)
from prove.judge.reasons import Heading, Reason
from prove.judge.table import WARNING, ReportRow, warning, wrong

NAME = "one data set"


class Sentence(Reason):
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


def judge_fields(context: CheckContext) -> list[ReportRow]:
    """Report fields, such as labels, that differ although the inputs are the same."""
    rows = []
    for epochs in (
        passes_by_data_set(context.records) if share_one_data_set(context.records) else []
    ):
        first = epochs[0][0]
        if names := differing_fields(epochs[0]):
            says = wrong if first.sampler == "DistributedSampler" else warning
            facts = {"names": names, "at": first.source_line, "sampler": first.sampler}
            rows.append(says(NAME, Sentence.FIELDS_DIFFER, **facts))
    return rows


def judge_contents(context: CheckContext) -> list[ReportRow]:
    """Report a DistributedSampler that divides a different data set on each rank."""
    return [
        warning(NAME, Sentence.DATA_SETS_DIFFER, **facts_by_content(passes))
        for passes in data_sets_in_parts(context.records)
        if passes[0].fingerprint
        and passes[0].sampler == "DistributedSampler"
        and same_on_all_ranks(passes, "dataset_length")
        and not differing_fields(passes)
    ]


PLANTED = (
    plain(
        "each rank makes other data", WARNING, NAME,
        ("manual_seed(size)", "manual_seed(size + dist.get_rank())"),
    ),
)  # fmt: skip
FIELDS = Check(NAME, judge_fields, Phase.ALL_RECORDS)  # stands before the check of samples
CONTENTS = Check(NAME, judge_contents, Phase.ALL_RECORDS, planted=PLANTED)
