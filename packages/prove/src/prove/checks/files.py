"""Do several ranks open the same file for writing?"""

import filecmp
import io
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from prove.checks.base import Check, CheckContext, Phase
from prove.checks.mistake import amp, plain
from prove.judge.reasons import Heading, Reason
from prove.judge.table import WARNING, WRONG, ReportRow, right, warning, wrong
from prove.rank_record import Mode
from prove.watch.process_io import copy_of
from prove.watch.rank_run import RankRun, source_line

NAME = "files"
MAX_OPENED = 1000  # further files are not recorded
MAX_ROWS = 3
OPENED = "{path} is opened for writing by ranks {ranks!s} ({at})"
WRITE_ONCE = "if dist.get_rank() == 0, and a barrier before another rank reads it"
WRITE_OWN = "a name with the rank in it, if each rank keeps something of its own (the state of its "
WRITE_OWN += "sampler or generator, its metrics)"


class Sentence(Reason):
    FILE_OF_SEVERAL_RANKS = (OPENED, f"{WRITE_ONCE}; or {WRITE_OWN}", Heading.FILES)
    FILE_OF_DIFFERENT_CONTENTS = (
        f"{OPENED}, and they do not write the same",
        f"{WRITE_OWN}; else {WRITE_ONCE}",
        Heading.FILES,
    )
    FILE_THAT_GROWS = (
        OPENED,
        f"{WRITE_ONCE}; meant so only if lines of all ranks may mix",
        Heading.FILES,
    )
    FILE_BEFORE_TRAINING = (
        OPENED,
        f"{WRITE_ONCE}; harmless if all ranks write the same, and none reads it meanwhile",
        Heading.FILES,
    )
    FILES_OF_ONE_RANK = "{files} written, each by one rank"


class OpenedFile(NamedTuple):
    path: str
    mode: str  # mode of open(), or "os.open"
    source_line: str
    steps_before: int


@dataclass
class WrittenFiles:
    """The files that one rank opens for writing, with checksums of the written bytes."""

    opened: list[OpenedFile] = field(default_factory=list)
    checksums: dict[str, int] = field(default_factory=dict)  # checksums of bytes, by path


class Checksum(io.RawIOBase):
    """A file that keeps nothing but the checksum of its bytes."""

    number = 0

    def write(self, part: Any) -> int:
        self.number = zlib.crc32(part, self.number)
        return len(part)


def watch(run: RankRun) -> None:
    files = run.record.part(WrittenFiles)
    checksums = files.checksums
    texts: set[str] = set()  # paths of files whose every write is watched

    def note_change(path: str, mode: str | None) -> None:
        is_lock = path.endswith(".lock")  # lock files, which all ranks may open
        if mode is not None and not is_lock and len(files.opened) < MAX_OPENED:
            files.opened.append(OpenedFile(path, mode, source_line(), run.record.step_count))

    def note_text(path: str, text: str) -> None:
        texts.add(path)
        if text and not run.written:
            checksums[path] = zlib.crc32(text.encode(errors="replace"), checksums.get(path, 0))

    def note_save(path: str, write_to: Callable[[Any], None]) -> None:
        if path not in checksums and run.settings.mode == Mode.OBSERVE:
            checksum = Checksum()
            write_to(checksum)
            checksums[path] = checksum.number

    def is_changed(opened: OpenedFile) -> bool:
        """Was the file written? np.memmap opens with r+ to read, and a logger may never write."""
        path = opened.path
        if "w" in opened.mode or "x" in opened.mode or path in checksums:
            return True
        copy = copy_of(path, Path(run.settings.folder))
        both = copy.exists() and os.path.isfile(path)
        return path not in texts and not (both and filecmp.cmp(path, copy, shallow=False))

    def keep_changed_files() -> None:
        files.opened = [opened for opened in files.opened if is_changed(opened)]

    run.events.file_changes.append(note_change)
    run.events.texts.append(note_text)
    run.events.saves.append(note_save)
    run.at_end.append(keep_changed_files)


def judge(context: CheckContext) -> list[ReportRow]:
    if context.is_alone:
        return []
    files = {rank.rank: rank.part(WrittenFiles) for rank in context.records}
    writers: dict[str, dict[int, list[OpenedFile]]] = {}
    for rank, own in files.items():
        for opened in own.opened:
            writers.setdefault(opened.path, {}).setdefault(rank, []).append(opened)
    rows = []
    for path, by_rank in writers.items():
        openings = last_openings_alike([*by_rank.values()])
        if len(by_rank) < 2 or openings[0].mode == "os.open":  # os.open may be a lock
            continue
        truncates = all("w" in opened.mode for opened in openings)
        trained = all(opened.steps_before for opened in openings)
        facts = {
            "path": os.path.relpath(path),
            "ranks": sorted(by_rank),
            "at": openings[0].source_line,
        }
        if not truncates:
            rows.append(warning(NAME, Sentence.FILE_THAT_GROWS, **facts))
        elif not trained:
            rows.append(warning(NAME, Sentence.FILE_BEFORE_TRAINING, **facts))
        elif len({files[rank].checksums.get(path) for rank in by_rank}) > 1:
            rows.append(wrong(NAME, Sentence.FILE_OF_DIFFERENT_CONTENTS, **facts))
        else:
            rows.append(wrong(NAME, Sentence.FILE_OF_SEVERAL_RANKS, **facts))
    if writers and not rows:
        return [right(NAME, Sentence.FILES_OF_ONE_RANK, files=len(writers))]
    return rows[:MAX_ROWS]


def last_openings_alike(by_rank: list[list[OpenedFile]]) -> list[OpenedFile]:
    """Return the last opening of each rank, all of one kind (truncating or not) if possible."""
    kinds = set.intersection(*({"w" in each.mode for each in openings} for openings in by_rank))
    last = [openings[-1] for openings in by_rank]
    if not kinds or all(("w" in each.mode) in kinds for each in last):
        return last
    kind = kinds.pop()
    return [[each for each in openings if ("w" in each.mode) == kind][-1] for openings in by_rank]


PLANTED = (
    plain(
        "all ranks save one file", WRONG, NAME,
        ("            torch.save(ddp", "        torch.save(ddp"),
    ),
    amp(
        "each rank writes the log anew", WRONG, NAME,
        ("        dist.barrier()\n", '        open("log.txt", "w").write(f"epoch {epoch}")\n'),
    ),
    plain(
        "all ranks open one log anew before they train", WARNING, NAME,
        (
            "    torch.manual_seed(0)\n",
            '    torch.manual_seed(0)\n    log = open("log.txt", "w")\n',
        ),
    ),
    plain(
        "all ranks append to one log", WARNING, NAME,
        (
            "        scheduler.step()\n",
            '        scheduler.step()\n        open("log.txt", "a").write(".")\n',
        ),
    ),
)  # fmt: skip
CHECK = Check(NAME, judge, Phase.ANY_RUN, watch, planted=PLANTED)
