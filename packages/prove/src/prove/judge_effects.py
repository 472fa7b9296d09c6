"""Do the ranks run together? Hangs, collectives, files, printed lines."""

import os
import re

from prove.launch import RunOutcome
from prove.record import Ended, OpenedFile, RankRecord
from prove.table import WARNING, WRONG, ReportRow, See, count, listed, right, warning, wrong

NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?")
LOST = re.compile(
    "closed by peer|reset by peer|Broken pipe|Read error|ncclRemoteError|ncclSystemError"
)
MOST_ROWS = 3  # about files


def effect_rows(outcome: RunOutcome) -> list[ReportRow]:
    if len(outcome.records) < 2 and not outcome.hang:
        return []
    return collective_rows(outcome) + file_rows(outcome.records) + print_rows(outcome.records)


def collective_rows(outcome: RunOutcome) -> list[ReportRow]:
    records, difference = outcome.records, first_difference(outcome.records)
    cure = "every rank must reach each collective the same number of times, in the same order"
    some_left = any(rank.ended in Ended.WELL for rank in records)
    lost = any(rank.error and LOST.search(rank.error.message) for rank in records)
    if outcome.hang or (some_left and lost):
        text = "; ".join(map(state_of, records))
        text += f". The first difference: {difference}" if difference else ""
        return [wrong("hang", text, cure, See.HANG)]
    if difference:
        return [wrong("collectives", difference, cure, See.HANG)]
    calls = len(records[0].collectives)
    return [right("collectives", f"{count(calls, 'call')}, the same on all ranks")]


def first_difference(records: list[RankRecord]) -> str:
    """The first collective that is not the same on all ranks."""
    calls = [rank.collectives for rank in records]
    for parts in zip(*calls, strict=False):
        if len({name for name, _ in parts}) > 1:
            return "; ".join(
                f"rank {rank} calls {name} at {at}" for rank, (name, at) in enumerate(parts)
            )
    fewest, most = min(calls, key=len), max(calls, key=len)
    all_stand_still = all(rank.ended in Ended.WELL or rank.progress.collective for rank in records)
    if len(fewest) == len(most) or not all_stand_still:
        return ""
    name, at = most[len(fewest)]
    others = ", ".join(
        str(rank) for rank, of_rank in enumerate(calls) if len(of_rank) == len(fewest)
    )
    return f"rank {calls.index(most)} calls {name} at {at}, which rank {others} does not reach"


def state_of(rank: RankRecord) -> str:
    if rank.error:
        return f"rank {rank.rank} loses its connection at {rank.error.at}"
    if rank.ended != Ended.NOT_YET:
        return f"rank {rank.rank} has ended after {rank.steps} steps"
    if rank.progress.collective:
        name, at = rank.progress.collective
        return f"rank {rank.rank} waits in {name} at {at}"
    place = "backward" if rank.progress.in_backward else "its own code"
    return f"rank {rank.rank} waits in {place} at {rank.progress.at}"


def file_rows(records: list[RankRecord]) -> list[ReportRow]:
    """Files that several ranks open for writing."""
    writers: dict[str, dict[int, OpenedFile]] = {}  # the last opening by each rank
    for rank in records:
        for opened in rank.opened_files:
            writers.setdefault(opened.path, {})[rank.rank] = opened
    rows = []
    for path, by_rank in writers.items():
        openings = list(by_rank.values())
        if len(by_rank) < 2 or openings[0].mode == "os.open":  # not truncated: a lock, perhaps
            continue
        truncates = all("w" in opened.mode for opened in openings)
        trained = all(opened.steps_before for opened in openings)
        cure = "if dist.get_rank() == 0, and a barrier before another rank reads it"
        if not truncates:
            cure += "; meant so only if lines of all ranks may mix"
        elif not trained:
            cure += "; harmless if all ranks write the same, and none reads it meanwhile"
        text = f"{os.path.relpath(path)} is opened for writing by ranks {sorted(by_rank)}"
        verdict = WRONG if truncates and trained else WARNING
        rows.append(ReportRow(verdict, "files", f"{text} ({openings[0].at})", cure, See.FILES))
    if writers and not rows:
        return [right("files", f"{len(writers)} written, each by one rank")]
    return rows[:MOST_ROWS]


def print_rows(records: list[RankRecord]) -> list[ReportRow]:
    """Lines that all ranks print while they train, alike but for the numbers in them."""

    def without_numbers(rank: RankRecord) -> list[tuple[str, str]]:
        lines = [line for line in rank.printed if line.steps_before and line.text.strip()]
        return [(line.at, NUMBER.sub("#", line.text)) for line in lines]

    common = set.intersection(*(set(without_numbers(rank)) for rank in records))
    if not common:
        return []
    places = dict(line for line in reversed(without_numbers(records[0])) if line in common)
    shown = listed([f'"{text[:50]}" ({at})' for at, text in sorted(places.items())])
    cure = "if dist.get_rank() == 0; meant so only if each rank reports on itself"
    return [warning("printing", f"all ranks print {shown}", cure, See.PRINTS)]


def error_of(outcome: RunOutcome) -> str:
    """The script's own error, for a run that was not judged."""
    for rank in outcome.records:
        if rank.error:
            return f"{rank.error.kind} at {rank.error.at}: {rank.error.message}"
    lines = [line.strip() for line in outcome.log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|error:", line)]
    return (errors or lines or ["it printed nothing"])[-1][:300]
