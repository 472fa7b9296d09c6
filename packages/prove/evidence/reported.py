"""Mistakes that others reported: mistakes/NAME has train.py, cure.diff, and about.json.

A puzzle of the course may be such a folder elsewhere, without a report.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from evidence.case import Case
from evidence.changes import apply_diff
from evidence.resumed import Resumed
from evidence.run_prove import TORCHRUN

MISTAKES = Path(__file__).parent / "mistakes"


@dataclass(frozen=True)
class Story:
    """A reported mistake: a small script that makes it, and the same script cured."""

    name: str
    set: str
    kind: str
    report: str  # address of the report
    mistake: str
    puzzle: dict = field(default_factory=dict)  # texts for readers who search for the mistake
    resume: str = ""  # in the set "resume": arguments of the run that goes on
    changes: str = "weights"  # there: what differs after a stop
    options: list[str] = field(default_factory=list)  # of prove
    home: Path = MISTAKES

    @property
    def script(self) -> str:
        return (self.home / self.name / "train.py").read_text()

    @property
    def diff(self) -> str:
        return (self.home / self.name / "cure.diff").read_text()

    @property
    def cure(self) -> str:
        return apply_diff(self.script, self.diff)

    @property
    def case(self) -> Case:
        """Return the script and its cure, with the command that starts them."""
        if self.set == "resume":
            return replace(self.resumed().case, cure=self.cure)
        command = (*TORCHRUN, "train.py")
        if "mp.spawn(" in self.script:
            command = ("python", "train.py", "--world-size", "2")
        return Case(self.name, self.script, command=command, cure=self.cure, hashes_differ=True)

    def resumed(self, is_cured: bool = False) -> Resumed:
        """Return the script, or its cure, with the command that resumes it."""
        script = self.cure if is_cured else self.script
        changes = "nothing" if is_cured else self.changes
        options = tuple(self.options)
        return Resumed(self.name, script, self.resume, options, changes=changes)


def story(name: str, home: Path = MISTAKES) -> Story:
    about = json.loads((home / name / "about.json").read_text())
    return Story(name, **about, home=home)


def stories(*sets: str, home: Path = MISTAKES) -> list[Story]:
    """List the stories of these sets, in MISTAKES: reported-50, reported-20, resume, puzzles."""
    names = sorted(folder.name for folder in home.iterdir())
    return [each for each in (story(name, home) for name in names) if each.set in sets]
