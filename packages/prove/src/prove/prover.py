"""One proof, from the first run to the rows of the table.

All ranks are observed once, and one rank replays what they got. Only where the two differ, an
Examination makes more runs.
"""

import shlex
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from prove import NotJudgedError, processes
from prove.examination import Examination
from prove.judge import printed_numbers, replay_checks, schedule
from prove.judge.compare_steps import Comparison, Outcome, comparisons, farthest, worst
from prove.judge.effects import effect_rows, error_of
from prove.judge.epochs import epoch_rows, original_epoch_rows
from prove.judge.evaluation import evaluation_rows
from prove.judge.model import model_rows
from prove.judge.reasons import Reason
from prove.judge.replay import Replay
from prove.judge.replay_reasons import ReplayReason
from prove.judge.samples import same_contents, sample_rows
from prove.judge.table import NOT_SEEN, RIGHT, WRONG, Check, ReportRow, not_seen
from prove.rank_record import Mode, Note, ReplayVariant
from prove.runs import Runs, command_of_one_rank, failed
from prove.watch.effects import restore_files


class Prover:
    """Which runs are needed, and what they say."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self.args = runs, runs.args

    @property
    def observed(self) -> processes.RunOutcome:
        return self.runs.observed

    def check_that_something_was_seen(self) -> None:
        outcome, records = self.observed, self.observed.records
        if outcome.silent:
            raise NotJudgedError(f"no progress for {self.args.timeout:g} s: try a larger --timeout")
        if not records and not outcome.status and "Traceback" not in outcome.log:
            raise NotJudgedError(
                f"the script made no process group: {advice_without_group(self.args.command)}"
            )
        if outcome.hang:
            return
        if failed(outcome) or not records:
            rows = effect_rows(outcome) + sample_rows(records) + epoch_rows(records)
            if not any(row.verdict == WRONG for row in rows):
                raise NotJudgedError(f"the script fails by itself: {error_of(outcome)}")
        elif not any(
            record.steps or record.loader_passes or record.model_calls for record in records
        ):
            raise NotJudgedError("no optimizer step was made, and no model was called")

    def judge(self) -> list[ReportRow]:
        self.runs.observe()
        self.check_that_something_was_seen()
        observed, records = self.observed, self.observed.records
        rows = effect_rows(observed)
        if any(record.world_size > len(records) for record in records):
            facts = {"present": len(records), "world_size": records[0].world_size}
            return [*rows, not_seen(Check.RANKS, ReplayReason.RECORDS_MISSING, **facts)]
        rows += sample_rows(records) + epoch_rows(records)
        rows += evaluation_rows(records)
        if observed.hang:
            return [*rows, not_seen(Check.ONE_RANK, ReplayReason.RUN_HANGS)]
        if not all(record.ended.is_well for record in records):
            return [
                *rows,
                not_seen(Check.ONE_RANK, ReplayReason.RUN_FAILS, message=error_of(observed)),
            ]
        if not any(record.steps for record in records):
            batches = sum(loader_pass.batches_given for loader_pass in records[0].loader_passes)
            why = ReplayReason.NO_STEP if batches else ReplayReason.NO_BATCH
            return [*rows, not_seen(Check.ONE_RANK, why, batches=batches)]
        rows += model_rows(records)
        rows += self.one_rank_rows(rows)
        if any(row.check == Check.ONE_RANK and row.verdict == RIGHT for row in rows):
            # Whatever changed the gradients before the step was no mistake.
            unexplained = (Check.AVERAGED_GRADIENTS, Check.FORWARD)
            rows = [row for row in rows if row.verdict != NOT_SEEN or row.check not in unexplained]
        return rows + self.original_rows(rows)

    def original_rows(self, rows: list[ReportRow]) -> list[ReportRow]:
        if not self.args.original:
            return []
        replayed = self.runs.replay(Mode.ORIGINAL, shlex.split(self.args.original))
        if obstacle := replay_checks.why_not_replayed(replayed):
            return [obstacle.row(Check.ORIGINAL)]
        compared = comparisons(replayed)
        if worst(compared) == Outcome.DIFFERENT:
            unsure = replay_checks.unsure_draws(replayed)
            unsure = unsure or replay_checks.draws_not_given(replayed, rows)
            if not any(each.steps for each in replayed.observed.loader_passes):
                facts = {"apart": farthest(compared)}
                why = ReplayReason.ORIGINAL_GETS_NO_DATA
                unsure = unsure or Comparison(Outcome.NOT_COMPARED, why, facts)
            compared = [unsure] if unsure else compared
        elif unsure := replay_checks.data_not_given(replayed, compared):
            compared = [unsure]
        records, original = self.observed.records, replayed.replayed
        result = [each.row(Check.ORIGINAL) for each in compared]
        return result + original_epoch_rows(records, original)

    def why_no_replay(self, command: list[str] | None) -> Comparison | None:
        """None: one rank can compute from the batches of all."""
        records = self.observed.records
        reason: Reason | None = None
        if len(records) == 1:
            reason = ReplayReason.ONLY_ONE_RANK
        elif command is None:
            reason = ReplayReason.WHICH_COMMAND
        elif Note.MODEL_IS_DIVIDED in records[0].notes:
            reason = ReplayReason.MODEL_DIVIDED
        elif self.runs.settings.rows_are_split and not same_contents(records):
            reason = ReplayReason.OTHER_ROWS
        elif any(record.why_not_kept for record in records):
            texts = [record.why_not_kept for record in records if record.why_not_kept]
            return Comparison(Outcome.NOT_COMPARED, ReplayReason.NOT_KEPT, {"message": texts[0]})
        return reason and Comparison(Outcome.NOT_COMPARED, reason)

    def one_rank_rows(self, rows: list[ReportRow]) -> list[ReportRow]:
        """What one rank computes from the batches of all; rows: what is known without it."""
        command = command_of_one_rank(self.args)
        obstacle = self.why_no_replay(command)
        if command is None or obstacle:
            return [obstacle.row(Check.ONE_RANK)] if obstacle else []
        replayed = self.runs.best_replay(command)
        if obstacle := replay_checks.why_not_replayed(replayed):
            return [obstacle.row(Check.ONE_RANK)]
        compared = comparisons(replayed)
        examination = Examination(self.runs, command, replayed, compared, rows)
        if worst(compared) == Outcome.DIFFERENT:
            compared = examination.result()
        elif unsure := replay_checks.data_not_given(replayed, compared):
            compared = [unsure]
        result = [each.row(Check.ONE_RANK) for each in compared]
        result += replay_checks.draw_rows(replayed)
        if all(each.outcome == Outcome.EQUAL for each in compared):
            result += self.number_rows(examination.replayed, examination.variant)
        result += schedule.schedule_rows(replayed)
        values = replay_checks.smallest_batchnorm(replayed.observed)
        is_small = 0 < values < replay_checks.SMALL_BATCH
        whole_batch_replay = self.runs.replay(Mode.WHOLE, command) if is_small else None
        return result + replay_checks.batchnorm_rows(replayed, whole_batch_replay)

    def number_rows(self, replayed: Replay, variant: ReplayVariant) -> list[ReportRow]:
        """What is printed; the control tells results from times."""
        if not printed_numbers.need_control(replayed):
            return printed_numbers.printed_rows(replayed)
        control = self.runs.run_all_ranks(variant)
        return printed_numbers.printed_rows(replayed, control.records)


def advice_without_group(command: list[str]) -> str:
    """With a script that makes no process group."""
    if processes.as_torchrun(command):
        return "each process trains for itself. Must it be told, as in Fabric(devices=2)?"
    return "is it started by torchrun?"


def prove(
    args: Namespace, report: Callable[[str], None], spare: processes.SpareProcess | None = None
) -> list[ReportRow]:
    """The rows of the table. spare: becomes one of the ranks.

    Raises NotJudgedError: there is none. NotObservedError: prove cannot watch this script.
    """
    folder = tempfile.mkdtemp(prefix="prove-")
    try:
        return Prover(Runs(args, folder, report, spare)).judge()
    finally:
        restore_files(Path(folder))
        shutil.rmtree(folder, ignore_errors=True)  # a rank that was ended may still write
