"""Make the runs of one proof: observe all ranks, then replay what they recorded."""

import re
import shlex
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from prove import processes
from prove.errors import NotJudgedError, NotObservedError
from prove.judge import epoch_ends, loader_passes
from prove.judge.rank_exits import error_of, excuse_connections_we_closed
from prove.judge.replay import Precision, Replay
from prove.judge.wording import number_with_noun
from prove.progress_line import ProgressLine
from prove.rank_record import (
    Ended,
    Flag,
    Mode,
    RankRecord,
    ReplayVariant,
    RunOutcome,
    Settings,
)
from prove.watch.process_io import restore_files

NUMBER_OF_RANKS = (
    r"(--nproc[-_]per[-_]node[= ])\S+",
    r"(--num[-_]processes[= ])\d+",
    r"(--devices[= ])\d+",
    r"(--world[-_]size[= ])\d+",
)
FLAG_FOR_RANKS = re.compile(
    r"""["'](--(?:world[-_]size|num[-_]gpus|n?gpus|nprocs?|num[-_]processes|devices))["']"""
)
MAX_LONGER_RUNS = 2  # longer runs that may be tried to see how an epoch ends
SECONDS_OF_SMALL_STEPS = 5  # threads help one rank only in runs longer than this
MAX_BATCHES_TO_THE_END = 64  # longer epochs are not observed to their end
MIN_BARE_SECONDS = 20.0  # time that a script gets to fail by itself


def command_of_one_rank(args: Namespace) -> list[str] | None:
    """Make the command for one rank: the same command with 1 as the number of ranks."""
    if args.alone:
        return shlex.split(args.alone)
    if processes.names_ranks(args.command):
        return processes.with_numbers(args.command, 0, 1)
    for pattern in NUMBER_OF_RANKS:
        text, count = re.subn(pattern, r"\g<1>1", shlex.join(args.command))
        if count:
            return shlex.split(text)
    if processes.as_torchrun(args.command):
        return None
    # A script with mp.spawn may have a flag of its own; otherwise it will see one GPU.
    scripts = [word for word in args.command if word.endswith(".py") and Path(word).is_file()]
    flag = FLAG_FOR_RANKS.search(Path(scripts[0]).read_text()) if scripts else None
    return [*args.command, flag[1], "1"] if flag else list(args.command)


class Runs:
    """Makes runs of the user's command that share a folder, and puts the user's files back."""

    def __init__(
        self,
        args: Namespace,
        folder: str,
        report: Callable[[str], None],
        spare: processes.SpareProcess | None,
    ) -> None:
        self.args, self.report, self.spare = args, report, spare
        self.number, self.line = 0, ProgressLine()  # of the present run
        torchrun = processes.as_torchrun(args.command)
        if torchrun and not Path(torchrun.script[0]).is_file():
            raise NotJudgedError(f"{torchrun.script[0]}: no such script")
        world_size = torchrun.world_size if torchrun else 2
        self.settings = Settings(
            folder, Mode.OBSERVE, not args.float32, args.cpu, args.batches, world_size, world_size
        )
        self.observed_outcome: RunOutcome

    def run(
        self, settings: Settings, command: list[str], most_seconds: float = float("inf")
    ) -> RunOutcome:
        self.report(f"{settings.name}: {shlex.join(command)}")
        self.number += 1
        timeout = self.args.timeout
        try:
            return processes.run_command(
                command, settings, timeout, most_seconds, self.spare, self.tell
            )
        except FileNotFoundError as error:
            raise NotJudgedError(f"{error.filename}: no such command") from None
        finally:
            self.line.erase()
            restore_files(Path(settings.folder))

    def tell(self, seconds: float, records: list[RankRecord]) -> None:
        """Tell in a terminal which run this is, and how far it has come."""
        which = f"run {self.number}" + (" of 2 or more" if self.number <= 2 else "")
        steps = max((record.step_count for record in records), default=0)
        self.line.write(f"{which}, {seconds:.0f} s, {number_with_noun(steps, 'step')}")

    @property
    def precision(self) -> Precision:
        if self.args.float32:
            return Precision.AS_ASKED
        return Precision.FLOAT64 if self.settings.float64 else Precision.AS_FAILED

    def run_all_ranks(self, variant: ReplayVariant) -> RunOutcome:
        """Run all ranks again, each fed its own records."""
        settings = replace(self.settings, mode=Mode.CONTROL, variant=variant)
        return self.run(settings, self.args.command)

    def replay(
        self,
        mode: Mode,
        command: list[str],
        variant: ReplayVariant = ReplayVariant.USUAL,
        gpus: int = 1,
        control: RunOutcome | None = None,
    ) -> Replay:
        """Let one rank replay the observed run, or its control with the draws of a variant."""
        settings = replace(self.settings, mode=mode, variant=variant, gpus=gpus)
        outcome = self.run(settings, command)
        names = (Mode.CONTROL + variant if control else Mode.OBSERVE, settings.name)
        return Replay(
            control or self.observed_outcome, outcome, settings.folder, names, self.precision
        )

    def replay_of_control(self, command: list[str], variant: ReplayVariant) -> Replay | None:
        """Run all ranks, then one rank, with the draws of this variant; return None on failure."""
        control = self.run_all_ranks(variant)
        if len(control.records) < len(self.observed_outcome.records) or control.status:
            return None
        return self.replay(Mode.REPLAY, command, variant, control=control)

    def observe(self) -> None:
        """Observe all ranks: in float64, else in the script's own precision, else from outside."""
        attempts = [self.settings]
        if self.settings.float64:
            attempts.append(replace(self.settings, float64=False))
        attempts.append(replace(self.settings, float64=False, watches_operations=False))
        bare: RunOutcome | None = None
        for number, settings in enumerate(attempts):
            if number:
                kind = (
                    "in its own precision"
                    if settings.watches_operations
                    else "watched from outside only"
                )
                self.report(f"it ends with {error_of(self.observed_outcome)}: again, {kind}")
            outcome = self.observe_once(settings)
            if not failed(outcome):
                break
            if bare is None:
                bare = self.run_bare(outcome)
                if failed(bare):
                    break  # the script fails by itself, so no other attempt will help
            outcome = excuse_connections_we_closed(outcome)
            if not failed(outcome):
                break
        else:
            raise NotObservedError(error_of(outcome))
        outcome = self.observe_last_window(outcome)
        self.observe_shortest_epoch(outcome.records)
        self.observed_outcome = replace(
            outcome, records=loader_passes.with_samples(outcome.records)
        )
        self.settings = replace(
            self.settings,
            world_size=len(outcome.records) or self.settings.world_size,
            shares_out_cores=outcome.seconds > SECONDS_OF_SMALL_STEPS,
            rows_are_split=loader_passes.rows_are_split(self.observed_outcome.records),
        )

    def observe_once(self, settings: Settings) -> RunOutcome:
        for file in Path(settings.folder).glob(f"{Mode.OBSERVE}.*"):
            file.unlink()
        self.settings, self.observed_outcome = settings, self.run(settings, self.args.command)
        return self.observed_outcome

    def observe_last_window(self, outcome: RunOutcome) -> RunOutcome:
        """If several batches make one step, observe longer until an epoch ends as the whole one."""
        for _ in range(MAX_LONGER_RUNS):
            if failed(outcome) or outcome.hang or not outcome.records:
                break
            batches = epoch_ends.batches_up_to_last_window(outcome.records[0])
            if not batches:
                break
            self.report(f"several batches make one step: again, with {batches} in an epoch")
            outcome = self.observe_once(replace(self.settings, batches=batches))
        return outcome

    def observe_shortest_epoch(self, records: list[RankRecord]) -> None:
        """Note whether ranks with unequal numbers of batches stop together."""
        shortest = epoch_ends.shortest_of_unequal_epochs(records)
        if not 0 < shortest <= MAX_BATCHES_TO_THE_END:
            return
        batches = shortest + 1
        self.report(f"the ranks have unequal numbers of batches: again, with {batches} in an epoch")
        settings = replace(self.settings, batches=batches, variant=ReplayVariant.LONGER)
        if epoch_ends.stop_together(self.run(settings, self.args.command)):
            records[0].flags[Flag.STOP_TOGETHER] = ""

    def run_bare(self, outcome: RunOutcome) -> RunOutcome:
        """Run the script unobserved, a little longer than it ran here: does it fail by itself?"""
        seconds = max(MIN_BARE_SECONDS, 3 * outcome.seconds)
        settings = replace(self.settings, mode=Mode.BARE)
        return self.run(settings, self.args.command, seconds)

    def best_replay(self, command: list[str]) -> Replay:
        """Make the replay that gives one rank its batches in the order the script takes them."""
        replay = self.replay(Mode.REPLAY, command)
        if self.args.cpu and not replay.wrote_record:  # some scripts refuse to run on one GPU
            gpus = len(self.observed_outcome.records)
            replay = self.replay(Mode.REPLAY, command, gpus=gpus)
        if replay.takes_more_batches():
            replay = self.replay(Mode.SEQUENCE, command)
        return replay


def fails_by_itself(error: str, on_cpu: bool) -> NotJudgedError:
    """Make the error that says so, with advice if the script asks for a GPU."""
    needs_gpu = not on_cpu and ("NVIDIA" in error or "CUDA" in error)
    advice = "; --cpu runs it without a GPU for each rank" if needs_gpu else ""
    return NotJudgedError(f"the script fails by itself: {error}{advice}")


def failed(outcome: RunOutcome) -> bool:
    """Did the script end with an error, other than by a hang?"""
    if outcome.hang or outcome.silent:
        return False
    ended = [record.ended == Ended.WITH_ERROR for record in outcome.records]
    return bool(outcome.status) or any(ended)
