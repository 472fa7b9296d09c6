"""If one rank computes something else than all ranks, is that a mistake of the script?

More runs answer this: a control (do the ranks reproduce themselves?), and runs in which all ranks
follow the decisions of rank 0, or all samples get one draw.
"""

import torch

from prove.checks import averaged_gradients, forward_through_ddp, weights, zero_grad
from prove.judge import replay_checks
from prove.judge.compare_steps import FLOAT64_LIMIT, comparison_rows, largest_relative_error
from prove.judge.rank_exits import error_of
from prove.judge.reasons import Reason
from prove.judge.replay import Replay
from prove.judge.replay_reasons import ReplayReason
from prove.judge.table import RIGHT, WARNING, WRONG, ReportRow, not_seen, warning, worst
from prove.rank_record import DrawFinding, Flag, Mode, ReplayVariant, forced_file
from prove.runs import Runs


class Controls:
    """Makes the control runs that must exclude other causes before a difference is WRONG.

    Data or draws that could not be passed to the one-rank replay never count as a mistake.
    """

    def __init__(
        self,
        runs: Runs,
        command: list[str],
        replay: Replay,
        compared: list[ReportRow],
        rows: list[ReportRow],
    ) -> None:
        """Begin with the usual replay; `rows` are those that did not need a replay."""
        self.runs, self.command, self.rows = runs, command, rows
        self.replay, self.compared = replay, compared  # the usual replay, or a later one
        self.variant = ReplayVariant.USUAL  # how self.replay was made
        self.batch_decisions = replay.batch_decisions
        self.source_line = compared[0].facts.get("at", "?")

    def result(self) -> list[ReportRow]:
        """Ask in order; the first answer wins."""
        questions = (
            self.try_rank_0_decisions,
            self.try_batchnorm_in_blocks,
            self.excuse_known_cause,
            self.try_without_unsure_draws,
            self.excuse_later_epoch,
            self.excuse_missing_data,
            self.try_one_draw,
            self.run_control,
        )
        for question in questions:
            if (answer := question()) is not None:
                return answer
        return [self.sum_or_mistake(each) for each in self.compared]

    def no_verdict(self, reason: Reason, **facts: object) -> list[ReportRow]:
        facts |= {"apart": largest_relative_error(self.compared), "at": self.source_line}
        return [not_seen(self.replay.check, reason, **facts)]

    def forced_draws_fail(self, draws: str, forced: dict) -> list[ReportRow]:
        places = source_lines_of(forced)
        return self.no_verdict(ReplayReason.FORCED_DRAWS_FAIL, draws=draws, places=places)

    def use_replay(
        self, variant: ReplayVariant, replay: Replay, compared: list[ReportRow]
    ) -> list[ReportRow] | None:
        """Use this replay from now on; return its comparisons, or None if it differs, too."""
        self.variant, self.replay, self.compared = variant, replay, compared
        return compared if worst(compared) != WRONG else None

    def try_rank_0_decisions(self) -> list[ReportRow] | None:
        """Let rank 0 decide for all ranks what each of them decides for its whole batch."""
        if not self.batch_decisions:
            return None
        found = self.replay_with_draws(ReplayVariant.RANK_0_DECIDES, self.batch_decisions)
        if found is None:
            return self.forced_draws_fail("rank 0's decisions on all ranks", self.batch_decisions)
        return self.use_replay(ReplayVariant.RANK_0_DECIDES, *found)

    def try_batchnorm_in_blocks(self) -> list[ReportRow] | None:
        """Try the other order of rows if BatchNorm gets several rows of each sample."""
        if Flag.BATCHNORM_ROWS_GUESSED not in self.replay.one_rank_record.flags:
            return None
        return self.equal_in_blocks() or self.no_verdict(ReplayReason.BATCHNORM_ROWS_GUESSED)

    def excuse_known_cause(self) -> list[ReportRow] | None:
        """Give no verdict if a row of an earlier check explains each difference."""
        different = [each for each in self.compared if each.verdict == WRONG]
        if not all(is_explained(each.facts.get("step", 1), self.rows) for each in different):
            return None
        return self.no_verdict(ReplayReason.AS_ABOVE)

    def excuse_later_epoch(self) -> list[ReportRow] | None:
        """Give no verdict if only a later epoch differs and one rank lacks what came before it."""
        epochs = [
            int(each.facts.get("epoch", 0)) for each in self.compared if each.verdict == WRONG
        ]
        why = replay_checks.missing_before_a_later_epoch(self.replay)
        if not all(epochs) or not why:
            return None
        return self.no_verdict(ReplayReason.LATER_EPOCH, number=min(epochs) + 1, why=why)

    def try_without_unsure_draws(self) -> list[ReportRow] | None:
        """Try without dropout if one rank could not be given all draws: perhaps dropout drew them.

        If the ranks draw for different shares of their samples, this run would not show it.
        """
        unsure = replay_checks.unsure_draws(self.replay)
        if unsure is None:
            return None
        found = None
        other_shares = self.replay.source_lines_of_draws(DrawFinding.OTHER_SHARES)
        if self.replay.rank_0_record.dropout and not other_shares:
            found = self.replay_with_draws(ReplayVariant.NO_DROPOUT, self.batch_decisions)
        if found is None or replay_checks.unsure_draws(found[0]):
            return [unsure]
        return self.use_replay(ReplayVariant.NO_DROPOUT, *found)

    def excuse_missing_data(self) -> list[ReportRow] | None:
        """Give no verdict if a loop without a loader could not be given its data."""
        if self.replay.rank_0_record.trained_passes:
            return None
        if obstacle := replay_checks.data_not_given(self.replay, self.compared):
            return [obstacle]
        self.compared = [replay_checks.by_statistics(self.replay, each) for each in self.compared]
        return None

    def try_one_draw(self) -> list[ReportRow] | None:
        """Try one draw for all samples of a batch, so that their order cannot matter."""
        if not (draws := self.replay.per_sample_draws):
            return None
        found = self.replay_with_draws(ReplayVariant.ONE_DRAW, self.batch_decisions | draws)
        if found is None:
            return self.forced_draws_fail("one draw for all samples", draws)
        _, compared = found
        if worst(compared) == WRONG:
            return None
        if self.replay.source_lines_of_draws(DrawFinding.SEVERAL) and (
            equal := self.equal_in_blocks()
        ):
            return equal
        facts = {
            "apart_of_one_draw": largest_relative_error(compared),
            "places": source_lines_of(draws),
        }
        return self.no_verdict(ReplayReason.EQUAL_WITH_ONE_DRAW, **facts)

    def equal_in_blocks(self) -> list[ReportRow] | None:
        """Try the other order of rows or draws, of which each sample has several.

        Only the right order makes all gradients equal. Returns None if this one does not.
        """
        blocks = self.runs.replay(Mode.REPLAY, self.command, ReplayVariant.ROWS_IN_BLOCKS)
        if replay_checks.why_not_replayed(blocks):
            return None
        compared = comparison_rows(blocks)
        if worst(compared) != RIGHT:
            return None
        self.replay = blocks
        return compared

    def replay_with_draws(
        self, variant: ReplayVariant, draws: dict
    ) -> tuple[Replay, list[ReportRow]] | None:
        """Run all ranks and one rank with these draws; return None if that fails."""
        torch.save(draws, forced_file(self.runs.settings.folder, variant))
        replay = self.runs.replay_of_control(self.command, variant)
        if replay is None or replay_checks.why_not_replayed(replay):
            return None
        return replay, comparison_rows(replay)

    def run_control(self) -> list[ReportRow] | None:
        """Run the same ranks with their own records; return None if they reproduce themselves."""
        outcome = self.runs.run_all_ranks(ReplayVariant.USUAL)
        observed_records = self.runs.observed_outcome.records
        reproduced = replay_checks.reproduction(observed_records, outcome.records)
        if reproduced is None:
            message = "they hang" if outcome.hang else error_of(outcome)
            return self.no_verdict(ReplayReason.CONTROL_FAILS, message=message)
        limit = FLOAT64_LIMIT if self.runs.settings.float64 else 1e-3
        if reproduced.relative_error <= limit:
            return None
        facts = {
            "noise": reproduced.relative_error,
            "rank": reproduced.rank,
            "step": reproduced.step,
        }
        return self.no_verdict(ReplayReason.NOT_REPRODUCED, **facts)

    def sum_or_mistake(self, row: ReportRow) -> ReportRow:
        """Accept a factor of 1/N if the script sums its loss over the local batch."""
        if row.reason != ReplayReason.ONE_NTH:
            return row
        sequence = self.runs.replay(Mode.SEQUENCE, self.command)
        if not replay_checks.is_sum_over_local_batch(self.replay, sequence):
            return row
        return warning(row.check, ReplayReason.SUM_OVER_LOCAL_BATCH, **row.facts)


def source_lines_of(draws: dict) -> list[str]:
    """List the source lines of these draws, each once."""
    return list(dict.fromkeys(key.source_line for key in draws))


def is_explained(step: int, rows: list[ReportRow]) -> bool:
    """Does a row of an earlier check explain a difference that begins in this step?"""
    for row in rows:
        begin = row.facts.get("step", 0)
        if row.check == weights.NAME and row.verdict == WRONG and begin < step:
            return True
        if row.check == weights.NAME and row.verdict == WARNING and begin <= step:
            return True
        of_the_step = (averaged_gradients.NAME, zero_grad.NAME, forward_through_ddp.NAME)
        if row.check in of_the_step and row.verdict == WRONG and begin <= step:
            return True
    return False
