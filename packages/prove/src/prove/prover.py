"""The runs of one proof, and in which order they are needed.

All ranks are observed once, and one rank replays what they got. Only where the two differ, more
runs find out whether that is a mistake of the script: a control (do the ranks reproduce
themselves?), and runs in which a coin falls alike on all ranks, or all samples get one draw.
"""

import re
import shlex
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from prove import (
    NotJudgedError,
    judge_data,
    judge_numbers,
    judge_replay,
    judge_schedule,
    processes,
)
from prove.draws import Finding
from prove.judge_effects import effect_rows, error_of
from prove.judge_evaluation import evaluation_rows
from prove.judge_model import model_rows
from prove.judge_replay import Comparison, Outcome, Replay
from prove.rank_record import Ended, Mode, Note, ReplayVariant, Settings
from prove.reasons import Reason
from prove.replay import forced_file
from prove.table import (
    NOT_SEEN,
    RIGHT,
    WARNING,
    WRONG,
    Check,
    NotObservedError,
    ReportRow,
    not_seen,
)
from prove.watch_effects import restore_files

NUMBER_OF_RANKS = (
    r"(--nproc[-_]per[-_]node[= ])\S+",
    r"(--num[-_]processes[= ])\d+",
    r"(--devices[= ])\d+",
    r"(--world[-_]size[= ])\d+",
)
FLAG_FOR_RANKS = re.compile(
    r"""["'](--(?:world[-_]size|num[-_]gpus|n?gpus|nprocs?|num[-_]processes|devices))["']"""
)
LEAST_SECONDS = 20.0  # that a script gets to fail by itself


def command_of_one_rank(args: Namespace) -> list[str] | None:
    """The command that starts one rank: the same, with a 1 for the number of ranks."""
    if args.alone:
        return shlex.split(args.alone)
    for pattern in NUMBER_OF_RANKS:
        text, count = re.subn(pattern, r"\g<1>1", shlex.join(args.command))
        if count:
            return shlex.split(text)
    if processes.as_torchrun(args.command):
        return None
    # mp.spawn: the script may have a flag of its own, or it will see one GPU.
    scripts = [word for word in args.command if word.endswith(".py") and Path(word).is_file()]
    flag = FLAG_FOR_RANKS.search(Path(scripts[0]).read_text()) if scripts else None
    return [*args.command, flag[1], "1"] if flag else list(args.command)


class Prover:
    """The runs share a folder, and leave the user's files as they were."""

    def __init__(
        self,
        args: Namespace,
        folder: str,
        say: Callable[[str], None],
        spare: processes.SpareProcess | None,
    ) -> None:
        self.args, self.say, self.spare = args, say, spare
        torchrun = processes.as_torchrun(args.command)
        if torchrun and not Path(torchrun.script[0]).is_file():
            raise NotJudgedError(f"{torchrun.script[0]}: no such script")
        world_size = torchrun.world_size if torchrun else 2
        self.settings = Settings(
            folder, Mode.OBSERVE, not args.float32, args.cpu, args.batches, world_size, world_size
        )
        self.observed: processes.RunOutcome

    def run(self, settings: Settings, command: list[str]) -> processes.RunOutcome:
        self.say(f"{settings.name}: {shlex.join(command)}")
        try:
            return processes.execute(command, settings, self.args.timeout, spare=self.spare)
        except FileNotFoundError as error:
            raise NotJudgedError(f"{error.filename}: no such command") from None
        finally:
            restore_files(Path(settings.folder))

    def run_all_ranks(self, variant: str) -> processes.RunOutcome:
        """Again, each rank fed its own records."""
        return self.run(self.settings_of(Mode.CONTROL, variant), self.args.command)

    def settings_of(self, mode: str, variant: str) -> Settings:
        dropout = variant != ReplayVariant.NO_DROPOUT
        return replace(self.settings, mode=mode, variant=variant, dropout=dropout)

    def replay(self, mode: str, command: list[str], variant: str = "", gpus: int = 1) -> Replay:
        settings = replace(self.settings, mode=mode, variant=variant, gpus=gpus)
        outcome = self.run(settings, command)
        names = (Mode.OBSERVE, settings.name)
        return Replay(self.observed, outcome, settings.folder, names)

    def replay_of_control(self, command: list[str], variant: str) -> Replay | None:
        """All ranks and one rank, both with the draws of this variant. None: they do not run."""
        control = self.run_all_ranks(variant)
        if len(control.records) < len(self.observed.records) or control.status:
            return None
        settings = replace(self.settings_of(Mode.REPLAY, variant), gpus=1)
        outcome = self.run(settings, command)
        names = (Mode.CONTROL + variant, settings.name)
        return Replay(control, outcome, settings.folder, names)

    def observe(self) -> None:
        """In float64, if the script runs so; then in its own precision; then only watched."""
        attempts = [self.settings]
        if self.settings.float64:
            attempts.append(replace(self.settings, float64=False))
        attempts.append(replace(self.settings, float64=False, emulate=False))
        bare: processes.RunOutcome | None = None
        for number, settings in enumerate(attempts):
            for file in Path(self.settings.folder).glob(f"{Mode.OBSERVE}.*"):
                file.unlink()
            if number:
                kind = "in its own precision" if settings.emulate else "watched from outside only"
                self.say(f"it ends with {error_of(self.observed)}: again, {kind}")
            outcome = self.run(settings, self.args.command)
            self.observed, self.settings = outcome, settings
            if not failed(outcome):
                break
            if bare is None:
                bare = self.run_bare(outcome)
                if failed(bare):
                    break  # it fails by itself: no attempt of ours will help
        else:
            raise NotObservedError(error_of(outcome))
        self.observed = replace(outcome, records=judge_data.with_samples(outcome.records))
        self.settings = replace(
            self.settings,
            world_size=len(outcome.records) or self.settings.world_size,
            rows_are_split=judge_data.rows_are_split(self.observed.records),
        )

    def run_bare(self, outcome: processes.RunOutcome) -> processes.RunOutcome:
        """Does the script fail by itself? It gets a little more time than it took to fail here."""
        seconds = max(LEAST_SECONDS, 3 * outcome.seconds)
        settings = replace(self.settings, mode=Mode.BARE)
        self.say(f"{settings.name}: {shlex.join(self.args.command)}")
        try:
            return processes.execute(self.args.command, settings, self.args.timeout, seconds)
        finally:
            restore_files(Path(settings.folder))

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
            rows = effect_rows(outcome) + judge_data.data_rows(records)
            if not any(row.verdict == WRONG for row in rows):
                raise NotJudgedError(f"the script fails by itself: {error_of(outcome)}")
        elif not any(
            record.steps or record.loader_runs or record.model_calls for record in records
        ):
            raise NotJudgedError("no optimizer step was made, and no model was called")

    def judge(self) -> list[ReportRow]:
        self.observe()
        self.check_that_something_was_seen()
        observed, records = self.observed, self.observed.records
        rows = effect_rows(observed)
        if any(record.world_size > len(records) for record in records):
            facts = {"present": len(records), "world_size": records[0].world_size}
            return [*rows, not_seen("ranks", Reason.RECORDS_MISSING, **facts)]
        rows += judge_data.data_rows(records)
        rows += evaluation_rows(records)
        if observed.hang:
            return [*rows, not_seen(Check.ONE_RANK, Reason.RUN_HANGS)]
        if not all(record.ended in Ended.WELL for record in records):
            return [*rows, not_seen(Check.ONE_RANK, Reason.RUN_FAILS, message=error_of(observed))]
        if not any(record.steps for record in records):
            batches = sum(loader_run.given for loader_run in records[0].loader_runs)
            why = Reason.NO_STEP if batches else Reason.NO_BATCH
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
        replayed = self.replay(Mode.ORIGINAL, shlex.split(self.args.original))
        if obstacle := judge_replay.why_not_replayed(replayed):
            return [obstacle.row(Check.ORIGINAL)]
        compared = judge_replay.comparisons(replayed)
        if judge_replay.worst(compared) == Outcome.DIFFERENT:
            unsure = judge_replay.unsure_draws(replayed) or judge_replay.draws_not_given(
                replayed, rows
            )
            compared = [unsure] if unsure else compared
        records, original = self.observed.records, replayed.replayed
        result = [each.row(Check.ORIGINAL) for each in compared]
        return result + judge_data.original_epoch_rows(records, original)

    def why_not_replayed(self, command: list[str] | None) -> Comparison | None:
        """None: one rank can compute from the batches of all."""
        records = self.observed.records
        reason: Reason | None = None
        if len(records) == 1:
            reason = Reason.ONLY_ONE_RANK
        elif command is None:
            reason = Reason.WHICH_COMMAND
        elif Note.MODEL_IS_DIVIDED in records[0].notes:
            reason = Reason.MODEL_DIVIDED
        elif self.settings.rows_are_split and not judge_data.same_contents(records):
            reason = Reason.OTHER_ROWS
        elif any(record.not_kept for record in records):
            texts = [record.not_kept for record in records if record.not_kept]
            return Comparison(Outcome.NOT_COMPARED, Reason.NOT_KEPT, {"message": texts[0]})
        return reason and Comparison(Outcome.NOT_COMPARED, reason)

    def best_replay(self, command: list[str]) -> Replay:
        """Which gives one rank the batches in the order in which the script takes them."""
        replayed = self.replay(Mode.REPLAY, command)
        if self.args.cpu and not replayed.wrote_record:  # some scripts refuse to run on one GPU
            gpus = len(self.observed.records)
            replayed = self.replay(Mode.REPLAY, command, gpus=gpus)
        if replayed.takes_more_batches():
            replayed = self.replay(Mode.SEQUENCE, command)
        return replayed

    def one_rank_rows(self, rows: list[ReportRow]) -> list[ReportRow]:
        """What one rank computes from the batches of all; rows: what is known without it."""
        command = command_of_one_rank(self.args)
        obstacle = self.why_not_replayed(command)
        if command is None or obstacle:
            return [obstacle.row(Check.ONE_RANK)] if obstacle else []
        replayed = self.best_replay(command)
        if obstacle := judge_replay.why_not_replayed(replayed):
            return [obstacle.row(Check.ONE_RANK)]
        compared = judge_replay.comparisons(replayed)
        examination = Examination(self, command, replayed, compared, rows)
        if judge_replay.worst(compared) == Outcome.DIFFERENT:
            compared = examination.result()
        result = [each.row(Check.ONE_RANK) for each in compared]
        result += judge_replay.draw_rows(replayed)
        if all(each.outcome == Outcome.EQUAL for each in compared):
            result += self.number_rows(examination.replayed, examination.variant)
        result += judge_schedule.schedule_rows(replayed)
        values = judge_replay.smallest_batchnorm(replayed.observed)
        is_small = 0 < values < judge_replay.SMALL_BATCH
        whole_batch_replay = self.replay(Mode.WHOLE, command) if is_small else None
        return result + judge_replay.batchnorm_rows(replayed, whole_batch_replay)

    def number_rows(self, replayed: Replay, variant: str) -> list[ReportRow]:
        """What is printed; the control tells results from times."""
        if not judge_numbers.need_control(replayed):
            return judge_numbers.printed_rows(replayed)
        control = self.run_all_ranks(variant)
        return judge_numbers.printed_rows(replayed, control.records)


class Examination:
    """One rank computes something else. Is that a mistake of the script? No WRONG without a
    control; and what one rank could not be given is no mistake."""

    def __init__(
        self,
        prover: Prover,
        command: list[str],
        replayed: Replay,
        compared: list[Comparison],
        rows: list[ReportRow],
    ) -> None:
        """rows: what is known without this replay."""
        self.prover, self.command, self.rows = prover, command, rows
        self.replayed, self.compared = replayed, compared  # the first, or one with other draws
        self.variant = ReplayVariant.USUAL  # of these draws
        self.coins = replayed.coins
        self.at = compared[0].facts.get("at", "?")

    def result(self) -> list[Comparison]:
        """That of the first question which has an answer."""
        questions = (
            self.with_one_coin,
            self.with_batchnorm_in_blocks,
            self.explained_by_other_rows,
            self.without_unsure_draws,
            self.without_loader,
            self.with_one_draw,
            self.control,
        )
        for question in questions:
            if (answer := question()) is not None:
                return answer
        return [self.sum_or_mistake(each) for each in self.compared]

    def no_verdict(self, reason: Reason, **facts: object) -> list[Comparison]:
        apart = judge_replay.farthest(self.compared)
        return [Comparison(Outcome.NOT_COMPARED, reason, {"apart": apart, "at": self.at} | facts)]

    def take(
        self, variant: str, replayed: Replay, compared: list[Comparison]
    ) -> list[Comparison] | None:
        """From now on this replay counts. None: it differs, too."""
        self.variant, self.replayed, self.compared = variant, replayed, compared
        return compared if judge_replay.worst(compared) != Outcome.DIFFERENT else None

    def with_one_coin(self) -> list[Comparison] | None:
        """What each rank decides for its whole batch, rank 0 decides for all."""
        if not self.coins:
            return None
        found = self.with_draws(ReplayVariant.COIN, self.coins)
        if found is None:
            message = "with rank 0's decisions on all ranks, they do not run"
            return self.no_verdict(Reason.CONTROL_FAILS, message=message)
        return self.take(ReplayVariant.COIN, *found)

    def with_batchnorm_in_blocks(self) -> list[Comparison] | None:
        """BatchNorm gets several rows of a sample, and nobody says in which order."""
        if not self.replayed.replayed.batchnorm_rows_guessed:
            return None
        blocks = self.prover.replay(Mode.REPLAY, self.command, ReplayVariant.BLOCKS)
        compared = judge_replay.comparisons(blocks)
        if judge_replay.worst(compared) != Outcome.EQUAL:
            return self.no_verdict(Reason.BATCHNORM_ROWS_GUESSED)
        self.replayed = blocks
        return compared

    def explained_by_other_rows(self) -> list[Comparison] | None:
        return self.no_verdict(Reason.AS_ABOVE) if is_explained(self.rows) else None

    def without_unsure_draws(self) -> list[Comparison] | None:
        """Numbers that one rank was not given: are they only those of dropout?"""
        unsure = judge_replay.unsure_draws(self.replayed)
        if unsure is None:
            return None
        found = None
        if self.replayed.observed.dropout:
            found = self.with_draws(ReplayVariant.NO_DROPOUT, self.coins)
        if found is None or judge_replay.unsure_draws(found[0]):
            return [unsure]
        return self.take(ReplayVariant.NO_DROPOUT, *found)

    def without_loader(self) -> list[Comparison] | None:
        observed = self.replayed.observed
        has_batches = any(run.steps for run in observed.loader_runs)
        if has_batches or observed.model_returns_loss:
            return None
        return self.no_verdict(Reason.NO_LOADER)

    def with_one_draw(self) -> list[Comparison] | None:
        """All samples of a batch get the same numbers, so that their order cannot matter."""
        if not (rows := self.replayed.rows):
            return None
        found = self.with_draws(ReplayVariant.ONE_DRAW, self.coins | rows)
        if found is None:
            message = "with one draw for all samples, they do not run"
            return self.no_verdict(Reason.CONTROL_FAILS, message=message)
        _, compared = found
        if judge_replay.worst(compared) == Outcome.DIFFERENT:
            return None
        if equal := self.with_rows_in_blocks():
            return equal
        places = list(dict.fromkeys(key.at for key in rows))
        apart = judge_replay.farthest(compared)
        return self.no_verdict(Reason.EQUAL_WITH_ONE_DRAW, apart_of_one_draw=apart, places=places)

    def with_rows_in_blocks(self) -> list[Comparison] | None:
        """Several draws for each sample: nobody says which of them are those of which rank, but
        only the right order makes all gradients equal."""
        if not self.replayed.places_of_draws(Finding.SEVERAL):
            return None
        blocks = self.prover.replay(Mode.REPLAY, self.command, ReplayVariant.BLOCKS)
        if judge_replay.why_not_replayed(blocks):
            return None
        compared = judge_replay.comparisons(blocks)
        if judge_replay.worst(compared) != Outcome.EQUAL:
            return None
        self.replayed = blocks
        return compared

    def with_draws(self, variant: str, draws: dict) -> tuple[Replay, list[Comparison]] | None:
        torch.save(draws, forced_file(self.prover.settings.folder, variant))
        replayed = self.prover.replay_of_control(self.command, variant)
        if replayed is None or judge_replay.why_not_replayed(replayed):
            return None
        return replayed, judge_replay.comparisons(replayed)

    def control(self) -> list[Comparison] | None:
        """The same ranks, fed their own records. None: they reproduce themselves."""
        outcome = self.prover.run_all_ranks(ReplayVariant.USUAL)
        observed = self.prover.observed.records
        reproduced = judge_replay.reproduction(observed, outcome.records)
        if reproduced is None:
            message = "they hang" if outcome.hang else error_of(outcome)
            return self.no_verdict(Reason.CONTROL_FAILS, message=message)
        limit = judge_replay.FLOAT64_LIMIT if self.prover.settings.float64 else 1e-3
        if reproduced.apart <= limit:
            return None
        facts = {"noise": reproduced.apart, "rank": reproduced.rank, "step": reproduced.step}
        return self.no_verdict(Reason.NOT_REPRODUCED, **facts)

    def sum_or_mistake(self, comparison: Comparison) -> Comparison:
        if comparison.reason != Reason.ONE_NTH:
            return comparison
        sequence = self.prover.replay(Mode.SEQUENCE, self.command)
        if not judge_replay.is_sum_over_local_batch(self.replayed, sequence):
            return comparison
        return Comparison(Outcome.MEANT_SO, Reason.SUM_OVER_LOCAL_BATCH, comparison.facts)


def is_explained(rows: list[ReportRow]) -> bool:
    """By rows above: the ranks do not train one model."""
    of_the_model = (Check.WEIGHTS, Check.AVERAGED_GRADIENTS, Check.ZERO_GRAD, Check.FORWARD)
    explained = any(row.verdict == WRONG and row.check in of_the_model for row in rows)
    return explained or any(row.verdict == WARNING and row.check == Check.WEIGHTS for row in rows)


def advice_without_group(command: list[str]) -> str:
    """With a script that makes no process group."""
    if processes.as_torchrun(command):
        return "each process trains for itself. Must it be told, as in Fabric(devices=2)?"
    return "is it started by torchrun?"


def failed(outcome: processes.RunOutcome) -> bool:
    if outcome.hang or outcome.silent:
        return False
    ended = [record.ended == Ended.WITH_ERROR for record in outcome.records]
    return bool(outcome.status) or any(ended)


def prove(
    args: Namespace, say: Callable[[str], None], spare: processes.SpareProcess | None = None
) -> list[ReportRow]:
    """The rows of the table. spare: becomes one of the ranks.

    Raises NotJudgedError: there is none. NotObservedError: prove cannot watch this script.
    """
    folder = tempfile.mkdtemp(prefix="prove-")
    try:
        return Prover(args, folder, say, spare).judge()
    finally:
        restore_files(Path(folder))
        shutil.rmtree(folder, ignore_errors=True)  # a rank that was ended may still write
