"""What the records say about the run: hangs, collectives, files, printed lines."""

import os
import re

from prove.launch import Outcome
from prove.table import RIGHT, WARNING, WRONG, Row

HANG = "it-hangs"
FILES = "filenotfounderror-while-saving-now-and-then-or-a-file-of-two-halves"
PRINTS = "every-line-is-printed-n-times"
NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?")


def state_of(rank: dict) -> str:
    if rank["error"]:
        return f"rank {rank['rank']} loses its connection at {rank['error'][2]}"
    if rank["ended"] != "killed":
        return f"rank {rank['rank']} has ended after {rank['steps']} steps"
    place = rank["waiting"] or ("backward" if rank["in_backward"] else "") or "its own code"
    at = "" if rank["waiting"] else f" at {rank['line']}"
    return f"rank {rank['rank']} waits in {place}{at}"


def first_difference(ranks: list[dict]) -> str:
    """The first collective that is not the same on all ranks."""
    calls = [rank["collectives"] for rank in ranks]
    for parts in zip(*calls, strict=False):
        if len({name for name, _ in parts}) > 1:
            return "; ".join(f"rank {r} calls {name} at {at}" for r, (name, at) in enumerate(parts))
    shortest = min(map(len, calls))
    for rank, own in enumerate(calls):
        finished = all(r["ended"] in ("script", "epochs") or r["waiting"] for r in ranks)
        if len(own) > shortest and finished:
            name, at = own[shortest]
            others = [str(r) for r, c in enumerate(calls) if len(c) == shortest]
            return (
                f"rank {rank} calls {name} at {at}, which rank {', '.join(others)} does not reach"
            )
    return ""


def is_connection_error(rank: dict) -> bool:
    """Another rank has gone away meanwhile."""
    words = "closed by peer|reset by peer|Broken pipe|Read error|ncclRemoteError|ncclSystemError"
    return bool(rank["error"] and re.search(words, rank["error"][1]))


def run_rows(outcome: Outcome) -> list[Row]:
    return collectives(outcome) + files(outcome.ranks) + prints(outcome.ranks)


def collectives(outcome: Outcome) -> list[Row]:
    check, ranks = "collectives", outcome.ranks
    cure = "every rank must reach each collective the same number of times, in the same order"
    difference = first_difference(ranks) if len(ranks) > 1 else ""
    left = [r for r in ranks if r["ended"] in ("script", "epochs")]
    if outcome.hang or (left and any(is_connection_error(r) for r in ranks)):
        text = "; ".join(map(state_of, ranks))
        if difference:
            text += f". The first difference: {difference}"
        return [Row(WRONG, "hang", text, cure, HANG)]
    if difference:
        return [Row(WRONG, check, difference, cure, HANG)]
    if len(ranks) < 2:
        return []
    return [Row(RIGHT, check, f"{len(ranks[0]['collectives'])} calls, the same on all ranks")]


def files(ranks: list[dict]) -> list[Row]:
    check, rows = "files", []
    writers: dict[str, dict[int, tuple[str, str, int]]] = {}
    for rank in ranks:
        for path, mode, at, steps in rank["files"]:
            writers.setdefault(path, {})[rank["rank"]] = (mode, at, steps)
    for path, by in writers.items():
        mode, at, _ = next(iter(by.values()))
        if len(by) < 2 or mode == "os.open":  # opened without truncation: a lock, perhaps
            continue
        text = f"{os.path.relpath(path)} is opened for writing by ranks {sorted(by)} ({at})"
        truncates = all("w" in mode for mode, *_ in by.values())
        trained = all(steps for *_, steps in by.values())
        cure = "if dist.get_rank() == 0, and a barrier before another rank reads it"
        if not truncates:
            cure += "; meant so only if lines of all ranks may mix"
        elif not trained:
            cure += "; harmless if all ranks write the same, and none reads it meanwhile"
        rows.append(Row(WRONG if truncates and trained else WARNING, check, text, cure, FILES))
    if not rows and len(ranks) > 1 and writers:
        rows = [Row(RIGHT, check, f"{len(writers)} written, each by one rank")]
    return rows[:3]


def prints(ranks: list[dict]) -> list[Row]:
    """Lines that all ranks print while they train, alike but for the numbers in them."""
    if len(ranks) < 2:
        return []
    shapes = [
        {
            (NUMBER.sub("#", text), at)
            for text, at, steps, _ in rank["prints"]
            if steps and text.strip()
        }
        for rank in ranks
    ]
    common = set.intersection(*shapes)
    if not common:
        return []
    shape, at = sorted(common)[0]
    text = f'all ranks print "{shape[:50]}" ({at})'
    cure = "if dist.get_rank() == 0; meant so only if each rank reports on itself"
    return [Row(WARNING, "printing", text, cure, PRINTS)]


def error_of(outcome: Outcome) -> str:
    """The script's own error, for a run that was not judged."""
    for rank in outcome.ranks:
        if rank["error"]:
            kind, message, at = rank["error"]
            return f"{kind} at {at}: {message}"
    lines = [line.strip() for line in outcome.log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|error:", line)]
    return (errors or lines or ["it printed nothing"])[-1][:300]
