"""Do all ranks step with the same learning rates, and from the same metric?"""

from typing import NamedTuple

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import plain
from prove.judge.reasons import Heading, Phrase, Reason
from prove.judge.table import WRONG, ReportRow, right, warning, wrong
from prove.judge.wording import phrase
from prove.watch.rank_run import RankRun, source_line

NAME = "learning rate by rank"
MAX_METRICS = 1000  # further metrics are not recorded


class Sentence(Reason):
    RATES_BY_RANK = (
        "{rates!s} on the ranks {when}",
        "the same schedule on all ranks: average what it depends on first",
        Heading.LOSS,
    )
    METRICS_BY_RANK = (
        "{values:each .4g} on the ranks go into ReduceLROnPlateau, after {steps:n step} ({at})",
        "average the metric over the ranks first, so that all lower the rate in the same epoch",
        Heading.LOSS,
    )
    METRICS_ALIKE = "the ranks give ReduceLROnPlateau the same {numbers:n number}"


class Metric(NamedTuple):
    """A number by which ReduceLROnPlateau decides."""

    value: float
    source_line: str
    steps_before: int


def watch(run: RankRun) -> None:
    given = run.record.notes(Metric)

    def note(value: float) -> None:
        if len(given) < MAX_METRICS:
            given.append(Metric(value, source_line(), run.record.step_count))

    run.events.metrics.append(note)


def judge(context: CheckContext) -> list[ReportRow]:
    return rows_of_rates(context) + rows_of_metrics(context)


def rows_of_rates(context: CheckContext) -> list[ReportRow]:
    rates = [
        (
            [of_rank.learning_rates for of_rank in step.steps],
            phrase(Phrase.AT_STEP, step=step.step_number, at=step.source_line),
        )
        for step in context.steps
    ]
    epochs = zip(*(rank.rates_after_epochs for rank in context.records), strict=False)
    rates += [
        (list(ranks_rates), phrase(Phrase.AFTER_EPOCH, epoch=n))
        for n, ranks_rates in enumerate(epochs, start=1)
    ]
    for ranks_rates, when in rates:
        if all(ranks_rates) and any(of_rank != ranks_rates[0] for of_rank in ranks_rates):
            first_rates = [of_rank[0] for of_rank in ranks_rates]
            return [wrong(NAME, Sentence.RATES_BY_RANK, rates=first_rates, when=when)]
    return []


def rows_of_metrics(context: CheckContext) -> list[ReportRow]:
    """Compare the metric that lowers the rate: is it one number for all ranks?"""
    number = 0
    for metrics in zip(*(rank.notes(Metric) for rank in context.records), strict=False):
        values, first = [metric.value for metric in metrics], metrics[0]
        number += 1
        if max(values) - min(values) > 1e-6 * max(map(abs, values)):
            facts = {"values": values, "steps": first.steps_before, "at": first.source_line}
            return [warning(NAME, Sentence.METRICS_BY_RANK, **facts)]
    return [right(NAME, Sentence.METRICS_ALIKE, numbers=number)] if number else []


PLANTED = (
    plain(
        "the learning rate differs by rank", WRONG, NAME,
        ("lr=0.1", "lr=0.1 * (rank + 1)"),
    ),
    plain(
        "one rank steps the scheduler", WRONG, NAME,
        ("        scheduler.step()\n", "        if rank == 0:\n            scheduler.step()\n"),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ONE_MODEL, watch, planted=PLANTED)
