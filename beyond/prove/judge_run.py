"""What the records say about the run: hangs, collectives, files, printed lines."""

import os
import re

from prove.launch import ENDED_WELL, Outcome
from prove.table import FILES, HANG, PRINTS, WARNING, WRONG, Row, count, right, warning, wrong

NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?")
LOST = re.compile(
    "closed by peer|reset by peer|Broken pipe|Read error|ncclRemoteError|ncclSystemError"
)
MOST_ROWS = 3  # about files


def run_rows(outcome: Outcome) -> list[Row]:
    if len(outcome.ranks) < 2 and not outcome.hang:
        return []
    return collectives(outcome) + files(outcome.ranks) + prints(outcome.ranks)


def collectives(outcome: Outcome) -> list[Row]:
    ranks, difference = outcome.ranks, first_difference(outcome.ranks)
    cure = "every rank must reach each collective the same number of times, in the same order"
    some_left = any(rank["ended"] in ENDED_WELL for rank in ranks)
    lost = any(rank["error"] and LOST.search(rank["error"][1]) for rank in ranks)
    if outcome.hang or (some_left and lost):
        text = "; ".join(map(state_of, ranks))
        text += f". The first difference: {difference}" if difference else ""
        return [wrong("hang", text, cure, HANG)]
    if difference:
        return [wrong("collectives", difference, cure, HANG)]
    calls = len(ranks[0]["collectives"])
    return [right("collectives", f"{count(calls, 'call')}, the same on all ranks")]


def first_difference(ranks: list[dict]) -> str:
    """The first collective that is not the same on all ranks."""
    calls = [rank["collectives"] for rank in ranks]
    for parts in zip(*calls, strict=False):
        if len({name for name, _ in parts}) > 1:
            return "; ".join(f"rank {r} calls {name} at {at}" for r, (name, at) in enumerate(parts))
    fewest, most = min(calls, key=len), max(calls, key=len)
    all_stand_still = all(r["ended"] in ENDED_WELL or r["waiting"] for r in ranks)
    if len(fewest) == len(most) or not all_stand_still:
        return ""
    name, at = most[len(fewest)]
    others = ", ".join(str(rank) for rank, own in enumerate(calls) if len(own) == len(fewest))
    return f"rank {calls.index(most)} calls {name} at {at}, which rank {others} does not reach"


def state_of(rank: dict) -> str:
    if rank["error"]:
        return f"rank {rank['rank']} loses its connection at {rank['error'][2]}"
    if rank["ended"] != "killed":
        return f"rank {rank['rank']} has ended after {rank['steps']} steps"
    place = rank["waiting"] or ("backward" if rank["in_backward"] else "") or "its own code"
    at = "" if rank["waiting"] else f" at {rank['line']}"
    return f"rank {rank['rank']} waits in {place}{at}"


def files(ranks: list[dict]) -> list[Row]:
    writers: dict[str, dict[int, tuple[str, str, int]]] = {}  # path -> rank -> how
    for rank in ranks:
        for path, mode, at, steps in rank["files"]:
            writers.setdefault(path, {})[rank["rank"]] = (mode, at, steps)
    rows = []
    for path, by_rank in writers.items():
        mode, at, _ = next(iter(by_rank.values()))
        if len(by_rank) < 2 or mode == "os.open":  # opened without truncation: a lock, perhaps
            continue
        truncates = all("w" in mode for mode, *_ in by_rank.values())
        trained = all(steps for *_, steps in by_rank.values())
        cure = "if dist.get_rank() == 0, and a barrier before another rank reads it"
        if not truncates:
            cure += "; meant so only if lines of all ranks may mix"
        elif not trained:
            cure += "; harmless if all ranks write the same, and none reads it meanwhile"
        text = f"{os.path.relpath(path)} is opened for writing by ranks {sorted(by_rank)} ({at})"
        verdict = WRONG if truncates and trained else WARNING
        rows.append(Row(verdict, "files", text, cure, FILES))
    if writers and not rows:
        return [right("files", f"{len(writers)} written, each by one rank")]
    return rows[:MOST_ROWS]


def prints(ranks: list[dict]) -> list[Row]:
    """Lines that all ranks print while they train, alike but for the numbers in them."""

    def shapes(rank: dict) -> set[tuple[str, str]]:
        lines = [(text, at) for text, at, steps, _ in rank["prints"] if steps and text.strip()]
        return {(NUMBER.sub("#", text), at) for text, at in lines}

    common = set.intersection(*map(shapes, ranks))
    if not common:
        return []
    shape, at = min(common)
    cure = "if dist.get_rank() == 0; meant so only if each rank reports on itself"
    return [warning("printing", f'all ranks print "{shape[:50]}" ({at})', cure, PRINTS)]


def error_of(outcome: Outcome) -> str:
    """The script's own error, for a run that was not judged."""
    for rank in outcome.ranks:
        if rank["error"]:
            kind, message, at = rank["error"]
            return f"{kind} at {at}: {message}"
    lines = [line.strip() for line in outcome.log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|error:", line)]
    return (errors or lines or ["it printed nothing"])[-1][:300]
