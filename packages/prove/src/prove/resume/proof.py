"""The whole of `prove --resume`: make the runs, and fill the table."""

import shlex
from argparse import Namespace
from collections.abc import Callable

from prove.judge.table import NOT_SEEN, WARNING, WRONG, ReportRow, not_seen, warning
from prove.resume import draws, files, later, order, state
from prove.resume.auto import resume_commands
from prove.resume.pairs import Pairs
from prove.resume.runs import ResumeRuns

AUTO = "auto"
PROOF = (files.CHECKPOINT, order.SAMPLES, state.WEIGHTS, state.OPTIMIZER)


def prove_resume(
    args: Namespace, report: Callable[[str], None], rows: list[ReportRow]
) -> list[ReportRow]:
    """Run the script straight, stopped and resumed, and append each verdict to `rows`.

    Raises NotJudgedError if the script fails by itself, or nobody knows how it resumes.
    """
    is_auto = args.resume == AUTO
    commands = resume_commands(args.command) if is_auto else [shlex.split(args.resume)]
    runs = ResumeRuns(args, report, commands)
    try:
        runs.run_all()
        rows += files.rows_without_resume(runs)
        if rows:
            return rows
        rows += judge(runs)
    finally:
        runs.put_all_back()
    return rows


def undecided(rows: list[ReportRow]) -> list[str]:
    """List the rows of the proof that were not seen, unless something is WRONG anyway."""
    if any(row.verdict == WRONG for row in rows):
        return []
    decided = {row.check for row in rows if row.verdict != NOT_SEEN}
    return [check for check in PROOF if check not in decided]


def judge(runs: ResumeRuns) -> list[ReportRow]:
    """Judge the runs; resume once more if the samples may differ because nobody seeds them."""
    pairs = Pairs(runs)
    samples = order.sample_rows(pairs)
    if not any(row.verdict in (WRONG, WARNING) for row in samples):
        return rows_of(pairs, samples)
    first = samples
    resumed = runs.resumed
    runs.report("it trains on other samples: again, with the seed of the run without a stop")
    runs.run_resumed(runs.seed)
    pairs = Pairs(runs)
    samples = order.sample_rows(pairs)
    if any(row.verdict in (WRONG, WARNING) for row in samples):
        pairs = Pairs(runs, resumed)  # the seed is not the reason: judge as it was
        return rows_of(pairs, order.sample_rows(pairs))
    unseeded = warning(order.SAMPLES, order.Sentence.UNSEEDED, at=first[0].facts["at"])
    return rows_of(pairs, [unseeded])


def rows_of(pairs: Pairs, samples: list[ReportRow]) -> list[ReportRow]:
    if not pairs.resumed.steps:
        return [*files.checkpoint_rows(pairs), *order.epoch_rows(pairs), *files.log_rows(pairs)]
    checkpoint = files.checkpoint_rows(pairs)
    if checkpoint[0].verdict == NOT_SEEN:
        return checkpoint  # if nothing is read, all else follows from that
    rows = [
        *checkpoint, *state.state_rows(pairs), *samples, *order.epoch_rows(pairs),
        *draws.draw_rows(pairs),
    ]  # fmt: skip
    is_known = any(row.check == state.WEIGHTS and row.verdict != NOT_SEEN for row in rows)
    # If something is WRONG, what comes later only follows from it.
    if is_known and not any(row.verdict == WRONG for row in rows):
        rows += later.later_rows(pairs)
    elif is_known:
        rows.append(not_seen(later.LATER_WEIGHTS, later.Sentence.FOLLOWS))
    return [*rows, *files.log_rows(pairs), *files.file_rows(pairs)]
