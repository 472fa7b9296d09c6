"""How did the ranks end: with which error, or waiting for each other at which line?"""

import os
import re
import textwrap
from dataclasses import replace
from typing import Any

from prove.judge.wording import in_words, phrase
from prove.rank_record import Collective, Ended, Flag, RankRecord, RunOutcome

LOST_CONNECTION = re.compile(  # errors that say: the other rank is gone
    "closed by peer|reset by peer|Broken pipe|Read error|ncclRemoteError|ncclSystemError"
)
OTHER_MESSAGE = re.compile(  # errors that say: the other rank is in another collective
    r"preamble\.length|[Ee]nforce ?(fail|NotMet)|ncclInvalidUsage|Detected mismatch between coll"
)
LAUNCHER = "torch.distributed.elastic"  # the launcher's own error says only that a rank failed
INSTALLED = re.compile("-packages/|/lib/python|/prove/src/prove/")  # not of the script
NO_CALL = Collective("no collective", "any place")
ERROR_LINE = r"[\w.]*(Error|Exception)\b|error:|Fatal Python error"
MAX_CHARACTERS = 240  # longest error text in a row


def error_is(rank: RankRecord, kind: re.Pattern) -> bool:
    return rank.error is not None and bool(kind.search(rank.error.message))


def ends_with_others(rank: RankRecord) -> bool:
    return Flag.ENDS_WITH_OTHERS in rank.flags


def excuse_connections_we_closed(outcome: RunOutcome) -> RunOutcome:
    """Excuse ranks that lost their connection because prove had ended another rank.

    prove ends a rank that has seen enough. Ranks that take other batches may still wait for it.
    """
    if not any(rank.ended == Ended.WHEN_SEEN for rank in outcome.records):
        return outcome
    if not all(rank.error is None or error_is(rank, LOST_CONNECTION) for rank in outcome.records):
        return outcome
    records = [
        replace(
            rank, ended=Ended.WHEN_SEEN, error=None, flags=rank.flags | {Flag.ENDS_WITH_OTHERS: ""}
        )
        if rank.error
        else rank
        for rank in outcome.records
    ]
    return replace(outcome, status=0, records=records)


def wait_for_ever(outcome: RunOutcome) -> bool:
    return outcome.hang or have_parted(outcome)


def have_parted(outcome: RunOutcome) -> bool:
    """Did the ranks lose each other, though none has an error of its own?

    One rank ended or called another collective, so the others lost their connection. gloo may end
    the process of a rank without a Python error, so the log is searched as well.
    """
    records = outcome.records
    misfit = bool(OTHER_MESSAGE.search(outcome.log))
    lost = any(error_is(rank, LOST_CONNECTION) for rank in records)
    some_left = any(rank.ended.is_well for rank in records)
    own = [rank for rank in records if rank.error and not is_of_the_connection(rank)]
    return not own and (misfit or (lost and some_left))


def is_of_the_connection(rank: RankRecord) -> bool:
    return error_is(rank, LOST_CONNECTION) or error_is(rank, OTHER_MESSAGE)


def state_of(rank: RankRecord, hang: bool) -> dict[str, Any]:
    """Say in a phrase where this rank waits, or how it has ended."""
    number = rank.rank
    if rank.error:
        words = "rank {rank} loses its connection at {at}"
        if error_is(rank, OTHER_MESSAGE):
            words = "rank {rank} gets the message of another collective at {at}"
        return phrase(words, rank=number, at=rank.error.source_line)
    if rank.ended != Ended.NOT_YET:
        return phrase(
            "rank {rank} has ended after {steps} steps", rank=number, steps=rank.step_count
        )
    if not hang:  # the process was killed, so only its last call is known
        last = rank.collectives[-1] if rank.collectives else NO_CALL
        words = "the process of rank {rank} ended in {name} at {at}"
        return phrase(words, rank=number, name=last.name, at=last.source_line)
    if call := rank.progress.collective or rank.progress.waits_in:
        words = "rank {rank} waits in {name} at {at}"
        return phrase(words, rank=number, name=call.name, at=call.source_line)
    words = "rank {rank} waits in its own code at {at}"
    if rank.progress.in_backward:
        words = "rank {rank} waits in backward at {at}"
    elif rank.progress.is_loading:
        words = "rank {rank} waits for data, or for an import, at {at}"
    elif rank.progress.in_ddp:
        words = "rank {rank} waits in DDP's forward at {at}"
    return phrase(words, rank=number, at=rank.progress.source_line)


def what_ranks_do(outcome: RunOutcome) -> str:
    """Describe what each rank was doing when progress stopped and no hang could be proven."""
    states = [state_of(rank, hang=True) for rank in outcome.records]
    return in_words("{ranks:; }", {"ranks": states}) if states else "no rank has joined a group"


def without_colors(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def error_of(outcome: RunOutcome) -> str:
    """Return the error of the rank that failed first, not of one that then lost its connection."""
    failed = [rank for rank in outcome.records if rank.error]
    failed.sort(
        key=lambda rank: (error_is(rank, LOST_CONNECTION), rank.error and rank.error.seconds)
    )
    if failed and (error := failed[0].error):
        message = without_colors(" ".join(error.message.split()))
        message = textwrap.shorten(message, MAX_CHARACTERS, placeholder=" ...")
        return f"{error.class_name} at {error.source_line}: {message}"
    lines = [line.strip() for line in outcome.log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(ERROR_LINE, line)]
    ranks_errors = [line for line in errors if not line.startswith(LAUNCHER)]
    last = (ranks_errors or errors or lines or ["it printed nothing"])[-1][:300]
    places = re.findall(r'^  File "([^"<]+)", line (\d+)', outcome.log, re.M)
    own = [f"{os.path.relpath(file)}:{line}" for file, line in places if not INSTALLED.search(file)]
    return f"{last} (at {own[-1]})" if own else last
