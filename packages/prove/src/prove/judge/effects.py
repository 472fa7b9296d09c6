"""Do the ranks run together? Hangs, collectives, printed lines."""

import os
import re
from dataclasses import replace
from typing import Any

from prove.judge.reasons import Phrase
from prove.judge.run_reasons import RunReason
from prove.judge.table import Check, ReportRow, right, warning, wrong
from prove.judge.wording import in_words, phrase
from prove.rank_record import Collective, Ended, Note, RankRecord, RunOutcome

NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?")
LOST_CONNECTION = re.compile(  # the other rank is gone
    "closed by peer|reset by peer|Broken pipe|Read error|ncclRemoteError|ncclSystemError"
)
OTHER_MESSAGE = re.compile(  # the other rank sent something else: it is in another collective
    r"preamble\.length|[Ee]nforce ?(fail|NotMet)|ncclInvalidUsage|Detected mismatch between coll"
)
REDUCTION_STOPPED = re.compile("Expected to have finished reduction in the prior iteration")
LAUNCHER = "torch.distributed.elastic"  # its own error says only that a rank has failed
INSTALLED = re.compile("-packages/|/lib/python|/prove/src/prove/")  # no line of the script
NO_CALL = Collective("no collective", "any place")
MOST_CHARACTERS = 240  # of an error


def unfinished_rows(records: list[RankRecord]) -> list[ReportRow]:
    """DDP itself has stopped a rank."""
    stopped = [rank for rank in records if error_is(rank, REDUCTION_STOPPED)]
    if not stopped or (error := stopped[0].error) is None:
        return []
    unused = [name for ddp in stopped[0].ddps for name in ddp.not_in_last_step]
    facts = {
        "ranks": [rank.rank for rank in stopped], "steps": stopped[0].steps, "at": error.at,
        "names": phrase(Phrase.NAMES, names=unused) if unused else phrase(Phrase.NOTHING),
    }  # fmt: skip
    return [wrong(Check.UNUSED_PARAMETERS, RunReason.REDUCTION_UNFINISHED, **facts)]


def collective_rows(outcome: RunOutcome) -> list[ReportRow]:
    records = outcome.records
    wait_for_ever = outcome.hang or have_parted(outcome)
    have_ended = all(rank.ended.is_well for rank in records)
    # Where a run ends well, a rank that called a DDP model once more did no harm.
    calls = [
        [call for call in rank.collectives if wait_for_ever or not call.is_of_ddp]
        for rank in records
    ]
    is_whole = wait_for_ever or (have_ended and not any(map(ends_with_others, records)))
    difference = first_difference(calls) or (missed_call(records, calls) if is_whole else None)
    if wait_for_ever:
        ranks = [state_of(rank, outcome.hang) for rank in records]
        if difference:
            reason = RunReason.HANG_BY_DIFFERENCE
            return [wrong(Check.HANG, reason, ranks=ranks, difference=difference)]
        return [wrong(Check.HANG, RunReason.HANG, ranks=ranks)]
    if difference:
        return [wrong(Check.COLLECTIVES, RunReason.COLLECTIVES_DIFFER, difference=difference)]
    return [right(Check.COLLECTIVES, RunReason.COLLECTIVES_ALIKE, calls=len(calls[0]))]


def error_is(rank: RankRecord, kind: re.Pattern) -> bool:
    return rank.error is not None and bool(kind.search(rank.error.message))


def ends_with_others(rank: RankRecord) -> bool:
    return Note.ENDS_WITH_OTHERS in rank.notes


def without_our_ends(outcome: RunOutcome) -> RunOutcome:
    """We end a rank that has seen enough. Ranks that take other batches may still wait for it, and
    lose their connection: that is no error of theirs."""
    if not any(rank.ended == Ended.WHEN_SEEN for rank in outcome.records):
        return outcome
    if not all(rank.error is None or error_is(rank, LOST_CONNECTION) for rank in outcome.records):
        return outcome
    records = [
        replace(
            rank, ended=Ended.WHEN_SEEN, error=None, notes=rank.notes | {Note.ENDS_WITH_OTHERS: ""}
        )
        if rank.error
        else rank
        for rank in outcome.records
    ]
    return replace(outcome, status=0, records=records)


def have_parted(outcome: RunOutcome) -> bool:
    """One rank ends, or is in another collective, and the others lose their connection: no rank has
    an error of its own. gloo may end the process of a rank without an error of Python."""
    records = outcome.records
    misfit = bool(OTHER_MESSAGE.search(outcome.log))
    lost = any(error_is(rank, LOST_CONNECTION) for rank in records)
    some_left = any(rank.ended.is_well for rank in records)
    own = [rank for rank in records if rank.error and not is_of_the_connection(rank)]
    return not own and (misfit or (lost and some_left))


def is_of_the_connection(rank: RankRecord) -> bool:
    return error_is(rank, LOST_CONNECTION) or error_is(rank, OTHER_MESSAGE)


def first_difference(calls: list[list[Collective]]) -> dict[str, Any] | None:
    """The first collective that is another one on some ranks."""
    for parts in zip(*calls, strict=False):
        if len({call.name for call in parts}) > 1:
            different = [
                phrase(Phrase.CALLS, rank=rank, name=call.name, at=call.at)
                for rank, call in enumerate(parts)
            ]
            return phrase(Phrase.DIFFERENT_CALLS, calls=different)
    return None


def missed_call(records: list[RankRecord], calls: list[list[Collective]]) -> dict[str, Any] | None:
    """What some ranks call and others do not, if all have ended or wait for ever."""
    fewest, most = min(calls, key=len), max(calls, key=len)
    if len(fewest) == len(most):
        steps = [rank.steps for rank in records]
        all_known = all(rank.ended != Ended.NOT_YET for rank in records)
        joins = Note.JOINS in records[0].notes
        is_unequal = all_known and len({*steps}) > 1 and not joins
        return phrase(Phrase.UNEQUAL_STEPS, steps=steps) if is_unequal else None
    call = most[len(fewest)]
    others = [rank for rank, of_rank in enumerate(calls) if len(of_rank) == len(fewest)]
    rank = calls.index(most)
    return phrase(Phrase.NOT_REACHED, rank=rank, name=call.name, at=call.at, others=others)


def state_of(rank: RankRecord, hang: bool) -> dict[str, Any]:
    number = rank.rank
    if rank.error:
        is_other = error_is(rank, OTHER_MESSAGE)
        what = Phrase.GETS_ANOTHER_MESSAGE if is_other else Phrase.LOST_CONNECTION
        return phrase(what, rank=number, at=rank.error.at)
    if rank.ended != Ended.NOT_YET:
        return phrase(Phrase.HAS_ENDED, rank=number, steps=rank.steps)
    if not hang:  # its process was killed; where it was in its last call is all that is known
        last = rank.collectives[-1] if rank.collectives else NO_CALL
        return phrase(Phrase.ENDED_IN_CALL, rank=number, name=last.name, at=last.at)
    if call := rank.progress.collective or rank.progress.waits_in:
        return phrase(Phrase.WAITS_IN_CALL, rank=number, name=call.name, at=call.at)
    waits = Phrase.WAITS_IN_FORWARD if rank.progress.in_ddp else Phrase.WAITS_IN_ITS_CODE
    if rank.progress.in_backward:
        waits = Phrase.WAITS_IN_BACKWARD
    elif rank.progress.is_loading:
        waits = Phrase.WAITS_FOR_DATA
    return phrase(waits, rank=number, at=rank.progress.at)


def what_ranks_do(outcome: RunOutcome) -> str:
    """Where nobody can say whether they wait for each other."""
    states = [state_of(rank, hang=True) for rank in outcome.records]
    return in_words("{ranks:; }", {"ranks": states}) if states else "no rank has joined a group"


def print_rows(records: list[RankRecord]) -> list[ReportRow]:
    """Lines that all ranks print while they train, alike but for the numbers in them."""

    def without_numbers(rank: RankRecord) -> list[tuple[str, str]]:
        lines = [line for line in rank.printed if line.steps_before and line.on_terminal]
        return [(line.at, NUMBER.sub("#", line.text)) for line in lines]

    common = set.intersection(*(set(without_numbers(rank)) for rank in records))
    if not common:
        return []
    places = dict(line for line in reversed(without_numbers(records[0])) if line in common)
    lines = [phrase(Phrase.LINE, text=text[:50], at=at) for at, text in sorted(places.items())]
    return [warning(Check.PRINTING, RunReason.PRINTED_BY_ALL, lines=lines)]


def error_of(outcome: RunOutcome) -> str:
    """The script's own error: of the rank that failed first, and not of one that then lost it."""
    failed = [rank for rank in outcome.records if rank.error]
    failed.sort(
        key=lambda rank: (error_is(rank, LOST_CONNECTION), rank.error and rank.error.seconds)
    )
    if failed and (error := failed[0].error):
        return f"{error.kind} at {error.at}: {' '.join(error.message.split())[:MOST_CHARACTERS]}"
    lines = [line.strip() for line in outcome.log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|error:", line)]
    of_ranks = [line for line in errors if not line.startswith(LAUNCHER)]
    last = (of_ranks or errors or lines or ["it printed nothing"])[-1][:300]
    places = re.findall(r'^  File "([^"<]+)", line (\d+)', outcome.log, re.M)
    own = [f"{os.path.relpath(file)}:{line}" for file, line in places if not INSTALLED.search(file)]
    return f"{last} (at {own[-1]})" if own else last
