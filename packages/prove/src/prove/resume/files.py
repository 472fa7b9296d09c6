"""Which checkpoint is read, how was it written, and are the lines of logs all there?"""

import os
import re
from collections import Counter
from typing import Any

from prove.errors import NotJudgedError
from prove.judge.rank_exits import error_of, what_ranks_do
from prove.judge.reasons import Reason
from prove.judge.table import RIGHT, ReportRow, not_seen, right, warning, wrong
from prove.judge.wording import NUMBER
from prove.resume import state
from prove.resume.pairs import TIME, Pairs, newest_of
from prove.resume.runs import ResumeRuns, Run, checkpoints, ends_of_epochs

STATUS_OF_USAGE = 2  # of argparse, and of Python if there is no such file
CHECKPOINT, FILES, LOGS = "resume: checkpoint", "resume: files", "resume: logs"
NO_NUMBER = re.compile(r"\b(nan|inf)\b", re.I)
ATOMIC = 'torch.save(state, "last.pt.tmp"), then os.replace("last.pt.tmp", "last.pt")'


class Sentence(Reason):
    NOTHING_IS_SAVED = (
        "the script saves nothing in {steps:n step} of a run whose epochs are cut to {batches} "
        "batches",
        "let it save more often, each epoch or every two steps, by a flag of its own; or more "
        "--batches. A file at the very end is none that a killed job leaves behind",
    )
    NOTHING_FOLLOWS = (
        "the script ends after {steps:n step} of one epoch, and has saved nothing before",
        "a command with three epochs or more, or one that saves inside an epoch",
    )
    NOTHING_STAYS = (
        "what the script saves is removed again before it is read ({saved_at})",
        "begin in an empty folder: a script that keeps only its newest files may count older runs",
    )
    NOTHING_IS_WRITTEN = (
        "the run that was stopped after {steps:n step} has left no checkpoint behind",
        "--stop-after STEPS stops it where it has saved; or let it save more often",
    )
    NOT_READ = (
        "the resumed run reads no file that the stopped run has written (the last is {newest}, at "
        "{saved_at})",
        "name the file in the command: {{checkpoint}} stands for the last one, {{folder}} for its "
        "folder",
    )
    CANNOT_RESUME = (
        "the run that reads the checkpoint ends with {message}",
        "save and load the same names, and the weights of ddp.module",
    )
    CANNOT_READ = (
        "the run that reads the checkpoint ends with {message}",
        "save tensors, numbers, texts, lists and dicts only, which torch.load trusts",
    )
    RESUMED_HANGS = (
        "the resumed run hangs: {doing}",
        "all ranks must load, or rank 0 loads and sends to all; no collective inside if rank == 0",
    )
    READS_UNSEEN = (
        "prove sees no file that is read, but the run goes on with the weights after step {step}"
    )
    READS_LAST = "reads {name} ({read_at}), which was written after step {step} ({saved_at}){when}"
    READS_BEST = (
        "reads {name} ({read_at}), and not {other}, which was written as late: they are the same "
        "only until an epoch is not the best one",
        "resume from the last checkpoint; meant so only to evaluate or to begin anew",
    )
    READS_OLD = (
        "reads {name} of step {step} ({read_at}), and {other} is of step {newer}",
        "sort the checkpoints by their step as a number, not as text, and take the last",
    )
    WRITTEN_IN_PLACE = (
        "{name} is written over at each save ({saved_at}): a job that is killed meanwhile leaves "
        "half a file, and no other",
        f"write beside it and rename, which is atomic: {ATOMIC}",
    )
    WRITTEN_BY_SEVERAL = (
        "ranks {ranks!s} write {name} ({saved_at})",
        "if dist.get_rank() == 0, and a barrier before another rank reads it; or a name with the "
        "rank in it",
    )
    WRITTEN_WELL = "{name}, by rank {rank}: {how}"
    LINES_LOST = (
        "{name} has {lines:n line} in the end, and {more} without a stop: {lost!r} is missing",
        'open a log with mode "a" when the run resumes, not "w"; and save what it is made from',
    )
    LINES_TWICE = (
        "{name} has {lines:n line} in the end, and {fewer} without a stop: {twice!r} is there "
        "{times} times",
        "write the line before the checkpoint that counts it, or drop the lines of later steps "
        "when the run resumes; harmless if each start has a line of its own",
    )
    LINES_KEPT = "{lines:n line} in {files:n file}, as without a stop"


def rows_without_resume(runs: ResumeRuns) -> list[ReportRow]:
    """Say why nothing can be compared, if there is no checkpoint or the command fails."""
    straight, stopped, resumed = runs.straight, runs.stopped, runs.resumed
    if stopped is straight:
        if not straight.goes_on and len(ends_of_epochs(straight)) < 2:
            return [not_seen(CHECKPOINT, Sentence.NOTHING_FOLLOWS, steps=straight.steps)]
        facts = {"steps": straight.steps, "batches": runs.args.batches}
        return [not_seen(CHECKPOINT, Sentence.NOTHING_IS_SAVED, **facts)]
    if not checkpoints(stopped) and stopped.saves:
        at = stopped.saves[0].source_line
        return [not_seen(CHECKPOINT, Sentence.NOTHING_STAYS, saved_at=at)]
    if not checkpoints(stopped):
        return [not_seen(CHECKPOINT, Sentence.NOTHING_IS_WRITTEN, steps=stopped.steps)]
    if resumed.outcome.hang:
        return [wrong(CHECKPOINT, Sentence.RESUMED_HANGS, doing=what_ranks_do(resumed.outcome))]
    if resumed.outcome.status == STATUS_OF_USAGE and not resumed.ranks:
        raise NotJudgedError(
            f"the command that resumes does not start: {error_of(resumed.outcome)}"
        )
    if name := missing_file(runs):
        raise NotJudgedError(
            f"--resume names {name}, which is not there: {{checkpoint}} is the file"
        )
    if not resumed.ended_well:
        message = error_of(resumed.outcome)
        reason = Sentence.CANNOT_RESUME
        if message.startswith("UnpicklingError"):
            reason = Sentence.CANNOT_READ
        return [wrong(CHECKPOINT, reason, message=message)]
    return []


def missing_file(runs: ResumeRuns) -> str:
    """Name a word of the command that the resumed run could not find as a file, or none."""
    errors = [record.error for record in runs.resumed.ranks if record.error]
    missing = [error.message for error in errors if error.class_name == "FileNotFoundError"]
    words = [word.split("=")[-1] for word in runs.both_commands()[1]]
    return next((word for word in words for text in missing if f"'{word}'" in text), "")


def begins_with_saved(pairs: Pairs) -> bool:
    """Does the resumed run begin with trained weights, so that it must have read some file?"""
    rows = state.weight_rows(pairs) if any(pairs.first_steps(0)) else []
    return any(row.verdict == RIGHT for row in rows)


def read_at(run: Run, path: str) -> str:
    reads = [each for part in run.parts for each in part.reads if each.path == path]
    known = [each.source_line for each in reads if each.source_line != "?"]
    return (known or ["?"])[-1]


def checkpoint_rows(pairs: Pairs) -> list[ReportRow]:
    files = checkpoints(pairs.stopped)
    if not pairs.used and begins_with_saved(pairs):
        return [right(CHECKPOINT, Sentence.READS_UNSEEN, step=pairs.k)]
    if not pairs.used:
        name, saved_at = os.path.relpath(files[-1].path), files[-1].source_line
        return [not_seen(CHECKPOINT, Sentence.NOT_READ, newest=name, saved_at=saved_at)]
    used = newest_of(pairs.used)
    facts: dict[str, Any] = {
        "name": os.path.relpath(used.path), "step": used.steps_before,
        "read_at": read_at(pairs.resumed, used.path), "saved_at": used.source_line,
    }  # fmt: skip
    kind = os.path.splitext(used.path)[1]
    others = [
        other for other in files
        if other not in pairs.used and os.path.splitext(other.path)[1] == kind
    ]  # fmt: skip
    newer = [other for other in others if other.steps_before > used.steps_before]
    as_late = [other for other in others if other.steps_before == used.steps_before]
    if newer:
        last = newest_of(newer)
        facts |= {"other": os.path.relpath(last.path), "newer": last.steps_before}
        return [wrong(CHECKPOINT, Sentence.READS_OLD, **facts)]
    if used.is_best and as_late:
        name = os.path.relpath(as_late[-1].path)
        return [warning(CHECKPOINT, Sentence.READS_BEST, other=name, **facts)]
    when = "" if pairs.is_inside_epoch else ", at the end of an epoch"
    return [right(CHECKPOINT, Sentence.READS_LAST, when=when, **facts)]


def file_rows(pairs: Pairs) -> list[ReportRow]:
    """How was the file written that is read: by one rank, and under another name first?"""
    if not pairs.used:
        return []
    for read in pairs.used:
        facts: dict[str, Any] = {"name": os.path.relpath(read.path), "saved_at": read.source_line}
        if len(read.ranks) > 1:
            return [wrong(FILES, Sentence.WRITTEN_BY_SEVERAL, ranks=read.ranks, **facts)]
        if not read.is_renamed and pairs.straight.written_over(read.path):
            return [warning(FILES, Sentence.WRITTEN_IN_PLACE, **facts)]
    last = newest_of(pairs.used)
    how = "renamed when it is complete" if last.is_renamed else "under a new name at each save"
    name, rank = os.path.relpath(last.path), last.ranks[0]
    return [right(FILES, Sentence.WRITTEN_WELL, name=name, rank=rank, how=how)]


def shape_of(line: str) -> str:
    """Return a line with its numbers taken out, for they may be times."""
    return NUMBER.sub("#", NO_NUMBER.sub("#", TIME.sub("#", line))).strip()


def log_rows(pairs: Pairs) -> list[ReportRow]:
    """Compare the lines of each log, as far as two straight runs write the same."""
    logs = pairs.straight.texts.keys() & pairs.control.texts.keys() & pairs.stopped.texts.keys()
    lines, files = 0, 0
    for path in sorted(logs):
        texts = [run.texts[path].splitlines() for run in (pairs.straight, pairs.control)]
        resumed = (pairs.resumed.texts.get(path) or pairs.stopped.texts[path]).splitlines()
        one, again, other = (Counter(map(shape_of, text)) for text in (*texts, resumed))
        if one != again or not pairs.has_as_many_steps:
            continue
        facts: dict[str, Any] = {"name": os.path.relpath(path), "lines": len(resumed)}
        if lost := next((shape for shape in one if other[shape] < one[shape]), None):
            line = last_like(texts[0], lost)
            return [warning(LOGS, Sentence.LINES_LOST, more=len(texts[0]), lost=line, **facts)]
        if twice := next((shape for shape in one if other[shape] > one[shape]), None):
            facts |= {"fewer": len(texts[0]), "twice": last_like(resumed, twice)}
            return [warning(LOGS, Sentence.LINES_TWICE, times=other[twice], **facts)]
        lines, files = lines + len(resumed), files + 1
    return [right(LOGS, Sentence.LINES_KEPT, lines=lines, files=files)] if files else []


def last_like(lines: list[str], shape: str) -> str:
    return next(line for line in reversed(lines) if shape_of(line) == shape)[:60]
