"""Does each worker of a loader yield different samples?"""

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import iterable
from prove.checks.samples import LOADER, SHARD_STREAM, data_sets_in_parts, facts_by_content
from prove.judge.reasons import Heading, Reason
from prove.judge.table import WRONG, ReportRow, wrong

NAME = "workers"


class Sentence(Reason):
    WORKERS_ALIKE = (
        f"each of the {{workers}} workers of a rank yields the same samples ({LOADER})",
        SHARD_STREAM,
        Heading.LOSS,
    )


def judge(context: CheckContext) -> list[ReportRow]:
    rows = []
    for passes in data_sets_in_parts(context.records):
        first = passes[0]
        of_workers = first.contents[: first.workers]  # workers give batches in turn
        are_alike = all(batch == of_workers[0] for batch in of_workers)
        if first.is_stream and len(of_workers) > 1 and are_alike:
            facts = facts_by_content(passes)
            rows.append(wrong(NAME, Sentence.WORKERS_ALIKE, workers=first.workers, **facts))
    return rows


PLANTED = (
    iterable(
        "an IterableDataset is not split by worker", WRONG, NAME,
        ("WORKERS = 96, 0", "WORKERS = 96, 2"),
        ("parts = worker.num_workers if worker else 1", "parts = 1"),
        (" + (worker.id if worker else 0)", ""),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ALL_RECORDS, planted=PLANTED)
