"""What a reader has done: a copy of each puzzle, and a log of when it was handed out and judged."""

import ast
import json
import os
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from common.options import UsageError


class Event(NamedTuple):
    puzzle: str
    event: str  # "handed out", "not yet" or "right"
    time: datetime


class Progress:
    """The log of a folder of copies: a line of JSON for each time that a puzzle was typed."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "progress.jsonl"

    def note(self, puzzle: str, event: str) -> None:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        with self.file.open("a") as log:
            log.write(json.dumps({"puzzle": puzzle, "event": event, "time": now}) + "\n")

    def events(self) -> list[Event]:
        """Raises UsageError, one line, if this is no such log."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        found = []
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
                time = datetime.fromisoformat(event["time"])
                found.append(Event(event["puzzle"], event["event"], time))
            except (ValueError, KeyError, TypeError):
                name = os.path.relpath(self.file)
                raise UsageError(f"{name}, line {number}: damaged; delete the line") from None
        return found

    def solved(self) -> set[str]:
        return {event.puzzle for event in self.events() if event.event == "right"}

    def minutes(self, puzzle: str) -> float | None:
        """From when it was handed out to the first right answer; None if either is unknown."""
        times: dict[str, datetime] = {}
        for event in self.events():
            if event.puzzle == puzzle:
                times.setdefault(event.event, event.time)
        if not {"handed out", "right"} <= {*times}:
            return None
        return (times["right"] - times["handed out"]).total_seconds() / 60


def read(script: Path) -> str:
    """Read a reader's copy. Raises UsageError, one line, if this is no Python."""
    name = os.path.relpath(script)
    if not script.is_file():
        again = f"delete the folder {os.path.relpath(script.parent)} to begin again"
        raise UsageError(f"{name} is gone, expected your copy of the puzzle: {again}")
    try:
        source = script.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        ast.parse(source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise UsageError(f"{name}, line {line}: {getattr(error, 'msg', error)}") from None
    return source
