"""Make the four runs of `prove --resume`: straight, straight again, stopped, and resumed.

The first two and the stopped one begin with the same seed, the resumed one with another, because a
new process would. Each run has a folder of its own for copies of the files that it changes. Those
of the stopped run are put back last, after the resumed run has read them.
"""

import os
import re
import shlex
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from prove import processes
from prove.errors import NotJudgedError, NotObservedError
from prove.judge import loader_passes
from prove.judge.rank_exits import error_of
from prove.judge.wording import number_with_noun
from prove.progress_line import ProgressLine
from prove.rank_record import Ended, Mode, RankRecord, RunOutcome, Settings
from prove.resume.record import ResumeRecord, Saved
from prove.runs import MIN_BARE_SECONDS, failed, fails_by_itself
from prove.watch.process_io import restore_files

EPOCHS = 2  # of the straight run
EPOCHS_IF_RARELY_SAVED = 5  # if two epochs save nothing
OTHER_SEED = 77  # is added to the seed, for the process that resumes
MOST_OF_AN_EPOCH = 4  # times --batches: a longer epoch is not run to its end after a stop inside
STEPS_OF_NEXT_EPOCH = 2  # and then, so many steps show whether it begins well
LONGEST_TEXT = 1_000_000  # bytes; longer logs are not compared
CHECKPOINT, FOLDER = "{checkpoint}", "{folder}"  # in the command that resumes
BEST = re.compile(r"(^|[^a-z])best([^a-z]|$)", re.I)
EVENTS_OF_TENSORBOARD = "events.out.tfevents"


@dataclass
class WrittenFile:
    """A file that a run has left behind, and its last change."""

    path: str
    steps_before: int
    source_line: str
    ranks: list[int]  # that wrote or renamed it
    is_renamed: bool  # written under another name first
    is_text: bool
    modified: float  # seconds, by the file system

    @property
    def is_best(self) -> bool:
        """Does its name say that it is the best model, not the last?"""
        return bool(BEST.search(os.path.basename(self.path)))


class Run:
    """One run of a command, with what its ranks wrote down, until its files are put back."""

    def __init__(self, folder: str, outcome: RunOutcome) -> None:
        self.folder = folder
        self.outcome = replace(outcome, records=loader_passes.with_samples(outcome.records))
        self.written = self.files()
        self.texts = {name: text for name in self.text_files() if (text := text_of(name))}

    @property
    def ranks(self) -> list[RankRecord]:
        return self.outcome.records

    @property
    def parts(self) -> list[ResumeRecord]:
        return [record.part(ResumeRecord) for record in self.ranks]

    @property
    def steps(self) -> int:
        return max((record.step_count for record in self.ranks), default=0)

    @property
    def ended_well(self) -> bool:
        outcome = self.outcome
        well = all(record.ended.is_well for record in self.ranks)
        return bool(self.ranks) and well and not (outcome.status or outcome.hang or outcome.silent)

    @property
    def goes_on(self) -> bool:
        """Did prove end this run, so that more steps would have followed?"""
        return any(record.ended == Ended.WHEN_SEEN for record in self.ranks)

    @property
    def saves(self) -> list[Saved]:
        return [saved for part in self.parts for saved in part.saves]

    def written_over(self, path: str) -> bool:
        """Is this file opened for writing more than once, each time before other steps?"""
        changes = [each for part in self.parts for each in part.changes if each.path == path]
        return len({each.steps_before for each in changes if each.mode is not None}) > 1

    def text_files(self) -> set[str]:
        return {name for part in self.parts for name in part.text_files}

    def files(self) -> dict[str, WrittenFile]:
        """List the files that this run has written and not removed."""
        texts = self.text_files()
        files: dict[str, WrittenFile] = {}
        for rank, part in enumerate(self.parts):
            for change in part.changes:
                if not os.path.isfile(change.path):
                    continue
                old = files.get(change.path)
                if old and change.steps_before < old.steps_before:
                    old.ranks = sorted({rank, *old.ranks})
                    continue
                files[change.path] = WrittenFile(
                    path=change.path,
                    steps_before=change.steps_before,
                    source_line=change.source_line,
                    ranks=sorted({rank, *(old.ranks if old else ())}),
                    is_renamed=change.mode is None,
                    is_text=change.path in texts,
                    modified=os.stat(change.path).st_mtime,
                )
        return files

    def put_files_back(self) -> None:
        restore_files(Path(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)  # a rank just killed may still write


def text_of(name: str) -> str:
    try:
        path = Path(name)
        return path.read_text() if path.stat().st_size < LONGEST_TEXT else ""
    except (OSError, UnicodeDecodeError):
        return ""


class ResumeRuns:
    """Makes the runs, and puts the files of all of them back in the end, the newest first."""

    def __init__(
        self, args: Namespace, report: Callable[[str], None], commands: list[list[str]]
    ) -> None:
        """commands: those that may resume; the first that reads a checkpoint is the one."""
        self.args, self.report, self.commands = args, report, commands
        self.line = ProgressLine()
        self.not_put_back: list[Run] = []
        self.number = 0
        self.seed = int.from_bytes(os.urandom(3), "big")
        self.straight: Run
        self.control: Run
        self.stopped: Run
        self.resumed: Run
        for command in (*commands, args.command):
            torchrun = processes.as_torchrun(command)
            if torchrun and not Path(torchrun.script[0]).is_file():
                raise NotJudgedError(f"{torchrun.script[0]}: no such script")
        ranks = torchrun.world_size if torchrun else 2
        self.settings = Settings(
            "", Mode.OBSERVE, False, args.cpu, args.batches, ranks, ranks,
            watches_operations=False, seed=self.seed, epochs=EPOCHS, keeps_batches=False,
            for_resume=True,
        )  # fmt: skip

    def run(self, name: str, command: list[str], settings: Settings) -> Run:
        folder = tempfile.mkdtemp(prefix="prove-")
        self.report(f"{name}: {shlex.join(command)}")
        self.number += 1

        def tell(seconds: float, records: list[RankRecord]) -> None:
            steps = max((record.step_count for record in records), default=0)
            text = f"run {self.number} of 4 or more, {seconds:.0f} s, "
            self.line.write(text + number_with_noun(steps, "step"))

        settings = replace(settings, folder=folder)
        try:
            outcome = processes.run_command(command, settings, self.args.timeout, tell=tell)
        except BaseException as error:
            restore_files(Path(folder))
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, FileNotFoundError):
                raise NotJudgedError(f"{error.filename}: no such command") from None
            raise
        finally:
            self.line.erase()
        run = Run(folder, outcome)
        self.not_put_back.append(run)
        return run

    def run_straight(self, name: str, settings: Settings) -> Run:
        """Make a run whose files are put back at once."""
        run = self.run(name, self.args.command, settings)
        self.put_back(run)
        if not run.ended_well:
            if run.outcome.hang or run.outcome.silent:
                raise NotJudgedError("the script hangs without a stop: prove it without --resume")
            error = error_of(run.outcome)
            if self.runs_by_itself(run):
                raise NotObservedError(error)
            raise fails_by_itself(error, self.args.cpu)
        if not run.steps:
            raise NotJudgedError(
                "no optimizer step was made: is there a checkpoint of a whole run? Move it away"
            )
        if path := resumed_file(run):
            raise NotJudgedError(
                f"the script resumes already in its first run, from {os.path.relpath(path)}: move "
                "it away, so that the first run begins from the start"
            )
        return run

    def runs_by_itself(self, watched: Run) -> bool:
        """Does the script run well while nobody watches it, a little longer than it ran here?"""
        folder = tempfile.mkdtemp(prefix="prove-")
        settings = replace(self.settings, mode=Mode.BARE, folder=folder)
        seconds = max(MIN_BARE_SECONDS, 3 * watched.outcome.seconds)
        try:
            command, timeout = self.args.command, self.args.timeout
            outcome = processes.run_command(command, settings, timeout, seconds)
        finally:
            restore_files(Path(folder))
            shutil.rmtree(folder, ignore_errors=True)
        return not failed(outcome)

    def run_straight_until_it_saves(self) -> Run:
        """Make the straight run; longer if it saves nothing in two epochs."""
        straight = self.run_straight("straight", self.settings)
        if not first_save(straight) and straight.goes_on and not self.args.stop_after:
            self.report(f"two epochs save nothing: again, with {EPOCHS_IF_RARELY_SAVED}")
            longer = replace(self.settings, epochs=EPOCHS_IF_RARELY_SAVED)
            straight, self.settings = self.run_straight("straight", longer), longer
        return straight

    def run_all(self) -> None:
        self.straight = self.run_straight_until_it_saves()
        save = first_save(self.straight)
        if not save and not self.args.stop_after:
            self.control = self.stopped = self.resumed = self.straight
            return
        stop = self.args.stop_after or (save.steps if save else 0)
        steps = self.straight.steps
        if self.args.stop_after or stop not in ends_of_epochs(self.straight):
            # An epoch that is cut would end for the resumed run where it goes on for this one.
            micro_batches = most_batches_per_step(self.straight)
            steps = stop + self.args.batches
            end = length_of_epoch(self.straight) // micro_batches
            if stop < end <= stop + MOST_OF_AN_EPOCH * self.args.batches:
                steps = max(steps, end + STEPS_OF_NEXT_EPOCH)
            batches = (steps + 1) * micro_batches
            self.report(f"it stops inside an epoch: again, with {batches} batches of each")
            self.settings = replace(self.settings, batches=batches, steps=steps, epochs=steps)
            self.straight = self.run_straight("straight", self.settings)
        self.settings = replace(self.settings, steps=steps)
        self.control = self.run_straight("straight again", self.settings)
        batches = 0 if self.args.stop_after or not save else save.batches
        stopped = replace(self.settings, steps=stop, batches_given=batches)
        self.stopped = self.run("stopped", self.args.command, stopped)
        while self.commands:
            self.run_resumed(self.seed + OTHER_SEED)
            if len(self.commands) == 1 or reads_checkpoint(self.stopped, self.resumed):
                break
            self.commands.pop(0)

    def run_resumed(self, seed: int) -> None:
        """Resume the stopped run with this seed; a run that was resumed before is forgotten."""
        if hasattr(self, "resumed"):
            self.put_back(self.resumed)
        _, command = self.both_commands()
        left = self.straight.steps - self.steps_when_saved(command)
        torchrun = processes.as_torchrun(command)
        ranks = torchrun.world_size if torchrun else self.settings.world_size
        # If the straight run came to its own end, a batch after the last step says nothing: the
        # script may read the training data once more, for the statistics of an averaged model.
        settings = replace(
            self.settings, seed=seed, steps=max(1, left), world_size=ranks, gpus=ranks,
            ends_at_step=not self.straight.goes_on,
        )  # fmt: skip
        self.resumed = self.run("resumed", command, settings)

    def both_commands(self) -> tuple[list[str], list[str]]:
        """Return the command that starts the script, and the one that resumes it."""
        return self.args.command, [self.filled_in(word) for word in self.commands[0]]

    def steps_when_saved(self, command: list[str]) -> int:
        """How many steps were made when the file that the command names was written?"""
        text = " ".join(command)
        named = [file for name, file in self.stopped.written.items() if name in text]
        return max((file.steps_before for file in named), default=self.stopped.steps)

    def filled_in(self, word: str) -> str:
        newest = newest_checkpoint(self.stopped)
        if CHECKPOINT in word or FOLDER in word:
            if not newest:
                raise NotJudgedError(f"the stopped run has written no file to name for {word}")
            word = word.replace(CHECKPOINT, newest).replace(FOLDER, os.path.dirname(newest))
        return word

    def put_back(self, run: Run) -> None:
        if run in self.not_put_back:
            self.not_put_back.remove(run)
            run.put_files_back()

    def put_all_back(self) -> None:
        for run in reversed(self.not_put_back[:]):
            self.put_back(run)


def resumed_file(run: Run) -> str:
    """Name a checkpoint that was there before this run, which reads it and writes it later."""
    reads = {each.path for part in run.parts for each in part.reads}
    texts = run.text_files()
    later = (each for part in run.parts for each in part.changes if each.steps_before)
    return next((each.path for each in later if each.path in reads and each.path not in texts), "")


def checkpoints(run: Run) -> list[WrittenFile]:
    """List the files of this run that may be checkpoints, the oldest first."""
    files = [
        file for file in run.written.values()
        if file.steps_before and not file.is_text and EVENTS_OF_TENSORBOARD not in file.path
    ]  # fmt: skip
    return sorted(files, key=order_of_checkpoints)


def order_of_checkpoints(file: WrittenFile) -> tuple:
    """Put the last one last: of those after the same step not the best, and rank 0's."""
    return file.steps_before, not file.is_best, 0 in file.ranks, file.modified


class SavePoint(NamedTuple):
    """How far a run had come when it saved."""

    steps: int
    batches: int


def first_save(run: Run) -> SavePoint | None:
    """Where does this run save first: inside an epoch, if it ever does, else at the end of one?"""
    paths = {file.path for file in checkpoints(run)}
    changes = [change for part in run.parts for change in part.changes if change.path in paths]
    points = {  # a script may write pictures inside an epoch, and save at its end
        SavePoint(each.steps_before, each.batches_before)
        for each in (run.saves or changes)
        if 0 < each.steps_before < run.steps
    }
    inside = [point for point in points if point.steps not in ends_of_epochs(run)]
    return min(inside or points, default=None)


def ends_of_epochs(run: Run) -> list[int]:
    """List after how many steps the epochs end: the passes that the script itself did not leave."""
    passes = run.ranks[0].trained_passes if run.ranks else []
    return [
        each.steps_before + each.step_count for each in passes
        if each.ended or each.batches_given >= each.most_batches
    ]  # fmt: skip


def reads_checkpoint(stopped: Run, resumed: Run) -> bool:
    read = {each.path for part in resumed.parts for each in part.reads}
    return any(file.path in read for file in checkpoints(stopped))


def length_of_epoch(run: Run) -> int:
    """Count the batches of a whole epoch; 0 if nobody knows."""
    return max((each.length for each in run.ranks[0].trained_passes), default=0)


def most_batches_per_step(run: Run) -> int:
    return max((each.batches_per_step for each in run.ranks[0].trained_passes), default=1) or 1


def newest_checkpoint(run: Run) -> str:
    """Name the last checkpoint of a run: a file, or a folder of torch.distributed.checkpoint."""
    files = checkpoints(run)
    if not files:
        return ""
    path = files[-1].path
    name = os.path.basename(path)
    return os.path.dirname(path) if name.startswith(".") or name.endswith(".distcp") else path
