"""One proof, from the first run to the rows of the table.

All ranks are observed once, and one rank replays their batches. Controls makes more runs only if
the two differ.
"""

import shlex
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from prove import processes
from prove.checks import CHECKS, rows_of_phase, zero_gradients
from prove.checks.base import CheckContext, Phase
from prove.controls import Controls
from prove.errors import NotJudgedError
from prove.judge import printed_numbers, replay_checks, replay_schedule
from prove.judge.compare_steps import comparison_rows, largest_relative_error
from prove.judge.loader_passes import same_contents, trained_loader_passes
from prove.judge.original_epoch import original_epoch_rows
from prove.judge.rank_exits import error_of, what_ranks_do
from prove.judge.replay import Replay
from prove.judge.replay_reasons import ReplayReason
from prove.judge.table import RIGHT, WRONG, ReplayCheck, ReportRow, not_seen, worst
from prove.rank_record import (
    Flag,
    Mode,
    OptimizerRecord,
    RankRecord,
    ReplayVariant,
    RunOutcome,
)
from prove.runs import Runs, command_of_one_rank, failed, fails_by_itself
from prove.watch.process_io import restore_files


class Prover:
    """Makes the runs that a proof needs, and fills the table."""

    def __init__(self, runs: Runs, rows: list[ReportRow]) -> None:
        """Append each verdict to `rows`, the table, as soon as it is known."""
        self.runs, self.args, self.rows = runs, runs.args, rows

    @property
    def observed_outcome(self) -> RunOutcome:
        return self.runs.observed_outcome

    def check_that_something_was_seen(self) -> None:
        outcome, records = self.observed_outcome, self.observed_outcome.records
        if outcome.silent:
            doing = what_ranks_do(outcome)
            raise NotJudgedError(
                f"no progress for {self.args.timeout:g} s or more ({doing}): try a larger --timeout"
            )
        if not records and not outcome.status and "Traceback" not in outcome.log:
            raise NotJudgedError(
                f"the script made no process group: {advice_without_group(self.args.command)}"
            )
        if outcome.hang:
            return
        if failed(outcome) or not records:
            context = CheckContext(outcome)
            rows = rows_of_phase(Phase.ANY_RUN, context) + rows_of_phase(Phase.ALL_RECORDS, context)
            if not any(row.verdict == WRONG for row in rows):
                raise fails_by_itself(error_of(outcome), self.args.cpu)
        elif not any(
            record.step_count or record.loader_passes or record.model_calls for record in records
        ):
            raise NotJudgedError("no optimizer step was made, and no model was called")

    def judge(self) -> None:
        """Make the whole proof and add its rows to the table.

        A run that hangs or fails, or makes no step, ends the proof early with a row that says so.
        """
        self.runs.observe()
        self.check_that_something_was_seen()
        observed_outcome, rows = self.observed_outcome, self.rows
        records = observed_outcome.records
        context = CheckContext(observed_outcome)
        rows += rows_of_phase(Phase.ANY_RUN, context)
        if any(record.world_size > len(records) for record in records):
            facts = {"present": len(records), "world_size": records[0].world_size}
            rows.append(not_seen(ReplayCheck.RANKS, ReplayReason.RECORDS_MISSING, **facts))
            return
        rows += rows_of_phase(Phase.ALL_RECORDS, context)
        if observed_outcome.hang:
            rows.append(not_seen(ReplayCheck.ONE_RANK, ReplayReason.RUN_HANGS))
            return
        if not all(record.ended.is_well for record in records):
            message = error_of(observed_outcome)
            rows.append(not_seen(ReplayCheck.ONE_RANK, ReplayReason.RUN_FAILS, message=message))
            return
        if not any(record.step_count for record in records):
            batches = sum(loader_pass.batches_given for loader_pass in records[0].loader_passes)
            why = ReplayReason.NO_STEP if batches else ReplayReason.NO_BATCH
            places = list(dict.fromkeys(each.source_line for each in records[0].loader_passes))
            rows.append(not_seen(ReplayCheck.ONE_RANK, why, batches=batches, places=places))
            return
        context.outcome = self.runs.observed_outcome = replace(
            observed_outcome, records=steps_of_all_ranks(records)
        )
        rows += rows_of_phase(Phase.STEPS, context)
        if trains_one_model(context):
            rows += rows_of_phase(Phase.ONE_MODEL, context)
        rows += self.one_rank_rows(rows)
        if any(row.check == ReplayCheck.ONE_RANK and row.verdict == RIGHT for row in rows):
            moot = {reason for check in CHECKS for reason in check.moot_if_proven}
            rows[:] = [row for row in rows if row.reason not in moot]
        rows += self.original_rows(rows)

    def original_rows(self, rows: list[ReportRow]) -> list[ReportRow]:
        """Compare with the original script for one GPU, which --original names."""
        if not self.args.original:
            return []
        replay = self.runs.replay(Mode.ORIGINAL, shlex.split(self.args.original))
        if obstacle := replay_checks.why_not_replayed(replay):
            return [obstacle]
        compared = comparison_rows(replay)
        if worst(compared) == WRONG:
            unsure = replay_checks.unsure_draws(replay)
            unsure = unsure or replay_checks.draws_not_given(replay, rows)
            if not replay.rank_0_record.trained_passes:
                reason, apart = ReplayReason.ORIGINAL_GETS_NO_DATA, largest_relative_error(compared)
                unsure = unsure or not_seen(replay.check, reason, apart=apart)
            compared = [unsure] if unsure else compared
        elif unsure := replay_checks.data_not_given(replay, compared):
            compared = [unsure]
        records, original = self.observed_outcome.records, replay.one_rank_record
        return compared + original_epoch_rows(records, original)

    def why_no_replay(self, command: list[str] | None) -> ReportRow | None:
        """Say why one rank cannot replay the batches of all; return None if it can."""
        records = self.observed_outcome.records
        if len(records) == 1:
            return not_seen(ReplayCheck.ONE_RANK, ReplayReason.ONLY_ONE_RANK)
        if command is None:
            return not_seen(ReplayCheck.ONE_RANK, ReplayReason.WHICH_COMMAND)
        if at := records[0].flags.get(Flag.MODEL_IS_DIVIDED):
            return not_seen(ReplayCheck.ONE_RANK, ReplayReason.MODEL_DIVIDED, at=at)
        if self.runs.settings.rows_are_split and not same_contents(records):
            at = trained_loader_passes(records)[0][0].source_line
            return not_seen(ReplayCheck.ONE_RANK, ReplayReason.OTHER_ROWS, at=at)
        if texts := [record.why_not_kept for record in records if record.why_not_kept]:
            return not_seen(ReplayCheck.ONE_RANK, ReplayReason.NOT_KEPT, message=texts[0])
        return None

    def one_rank_rows(self, rows: list[ReportRow]) -> list[ReportRow]:
        """Compare with one rank that replays all batches; `rows` are those without a replay."""
        command = command_of_one_rank(self.args)
        obstacle = self.why_no_replay(command)
        if command is None or obstacle:
            return [obstacle] if obstacle else []
        replay = self.runs.best_replay(command)
        if obstacle := replay_checks.why_not_replayed(replay):
            return [obstacle]
        compared = comparison_rows(replay)
        controls = Controls(self.runs, command, replay, compared, rows)
        if worst(compared) == WRONG:
            compared = controls.result()
        elif unsure := replay_checks.data_not_given(replay, compared):
            compared = [unsure]
        result = compared + replay_checks.draw_rows(replay)
        if worst(compared) == RIGHT:
            result += self.number_rows(controls.replay, controls.variant)
        result += replay_schedule.schedule_rows(replay)
        values = replay_checks.smallest_batchnorm(replay.rank_0_record)
        is_small = 0 < values < replay_checks.SMALL_BATCH
        whole_batch_replay = self.runs.replay(Mode.GLOBAL_BATCHNORM, command) if is_small else None
        return result + replay_checks.batchnorm_rows(replay, whole_batch_replay)

    def number_rows(self, replay: Replay, variant: ReplayVariant) -> list[ReportRow]:
        """Compare the printed numbers; a control run tells results from times."""
        if not printed_numbers.need_control(replay):
            return printed_numbers.printed_rows(replay)
        control = self.runs.run_all_ranks(variant)
        return printed_numbers.printed_rows(replay, control.records)


def trains_one_model(context: CheckContext) -> bool:
    """Do all ranks train one model, and does each of them hold all of it?"""
    if len(context.records) == 1 or context.rows_of(zero_gradients.CHECK):
        return False
    return not context.model_is_divided()


def steps_of_all_ranks(records: list[RankRecord]) -> list[RankRecord]:
    """Under Join, keep only the steps before the first rank runs out of batches.

    From then on, that rank makes no steps and gets the weights only later.
    """
    passes = [rank.trained_passes for rank in records]
    if Flag.JOINS not in records[0].flags or not all(passes):
        return records
    batches = [of_rank[0].batches_given for of_rank in passes]
    if len({*batches}) == 1:
        return records

    def cut(optimizer: OptimizerRecord) -> OptimizerRecord:
        numbers = [step.batch for step in optimizer.steps]
        first_epoch = next(
            (i for i in range(1, len(numbers)) if numbers[i] < numbers[i - 1]), len(numbers)
        )
        steps = [step for step in optimizer.steps[:first_epoch] if step.batch <= min(batches)]
        return replace(optimizer, steps=steps)

    return [
        replace(
            rank,
            optimizers=[cut(each) for each in rank.optimizers],
            weights={n: held for n, held in rank.weights.items() if n < min(batches)},
        )
        for rank in records
    ]


def advice_without_group(command: list[str]) -> str:
    """Advise on a script that makes no process group."""
    if processes.as_torchrun(command):
        return "each process trains for itself. Must it be told, as in Fabric(devices=2)?"
    return "is it started by torchrun?"


def prove(
    args: Namespace,
    report: Callable[[str], None],
    spare: processes.SpareProcess | None = None,
    rows: list[ReportRow] | None = None,
) -> list[ReportRow]:
    """Run the whole proof and return its table.

    spare: a process that imports torch in advance, and then becomes rank 1.
    rows: a list to which each row is added as soon as it is known.

    Raises NotJudgedError if nothing can be judged, and NotObservedError if prove cannot watch this
    script.
    """
    rows = [] if rows is None else rows
    folder = tempfile.mkdtemp(prefix="prove-")
    try:
        Prover(Runs(args, folder, report, spare), rows).judge()
        return rows
    finally:
        restore_files(Path(folder))
        shutil.rmtree(folder, ignore_errors=True)  # a rank that was just killed may still write
