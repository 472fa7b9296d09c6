"""What is judged: scripts with a mistake and without one, each with what prove must say of it."""

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from generate import generate
from planted_mistakes import HARMLESS, MISTAKES
from prove.checks import CHECKS
from prove.checks.mistake import Mistake

HERE = Path(__file__).resolve().parent
RIGHT, WRONG, WARNING, NOT_SEEN = "right", "WRONG", "warning", "not seen"
PROOF = "one rank"  # the row that says whether the training as a whole is right
MISTAKES_OF_OTHERS = HERE / "mistakes"
SEEDS = 300
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2")


@dataclass(frozen=True)
class Case:
    """A script called train.py, how a user starts it, and what prove must say of it."""

    name: str
    script: str
    verdict: str = RIGHT  # what the row `check` says; with RIGHT, no row may be WRONG either
    check: str = ""  # "": any row
    command: tuple[str, ...] = (*TORCHRUN, "train.py")
    options: tuple[str, ...] = ()  # options of prove
    cure: str = ""  # the script without its mistake, if prove is to judge that too
    files: dict[str, str] = field(default_factory=dict)  # files that lie beside the script
    hashes_differ: bool = False  # between the ranks, as with a real torchrun: it takes seconds


def replace_once(text: str, *changes: tuple[str, str]) -> str:
    """The text with each old piece replaced by its new one. Raises ValueError: it is not there, or
    not once."""
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{text.count(old)} times in the script, expected once: {old}")
        text = text.replace(old, new)
    return text


def apply_diff(text: str, diff: str) -> str:
    """What `patch` would make of it. Raises ValueError: a part is not, once, in the text."""
    for part in re.split(r"^@@ .*@@.*\n", diff, flags=re.M)[1:]:
        lines = part.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in kind) for kind in (" -", " +"))
        text = replace_once(text, (old, new))
    return text


# Mistakes that others reported: one folder each, with train.py, cure.diff and about.json


@dataclass(frozen=True)
class Story:
    """A mistake that somebody reported, as a small script that makes it, and once more cured."""

    name: str
    set: str
    kind: str
    report: str  # address of the report
    mistake: str
    puzzle: dict = field(default_factory=dict)  # what a reader who searches for it is told

    @property
    def script(self) -> str:
        return (MISTAKES_OF_OTHERS / self.name / "train.py").read_text()

    @property
    def diff(self) -> str:
        return (MISTAKES_OF_OTHERS / self.name / "cure.diff").read_text()

    @property
    def cure(self) -> str:
        return apply_diff(self.script, self.diff)


def story(name: str) -> Story:
    about = json.loads((MISTAKES_OF_OTHERS / name / "about.json").read_text())
    return Story(name, **about)


def stories(*sets: str) -> list[Story]:
    """List the stories of these sets: reported-50, reported-20, puzzles."""
    names = sorted(folder.name for folder in MISTAKES_OF_OTHERS.iterdir())
    return [each for each in map(story, names) if each.set in sets]


def story_case(story: Story) -> Case:
    """Make a case of a script as a user calls it; one that spawns ranks is told how many."""
    script = story.script
    command = (*TORCHRUN, "train.py")
    if "mp.spawn(" in script:
        command = ("python", "train.py", "--world-size", "2")
    return Case(story.name, script, command=command, cure=story.cure, hashes_differ=True)


# Scripts that are generated from a seed, and right


def generated_case(seed: int, verdict: str = RIGHT, **changes: Any) -> Case:
    """changes: what is generated in place of the right script."""
    script = generate(seed, **changes)
    options = ["--timeout=60"]
    if script.alone:
        options.append(f"--alone={script.alone.replace('python', sys.executable)}")
    command = tuple(script.command)
    return Case(str(seed), script.text, verdict, command=command, options=tuple(options))


# Mistakes that are planted in five scripts that are right


RANKS = (1, 2, 3)  # these five are judged on so many, as they are


def right_script(name: str) -> str:
    """Read one of the scripts that mistakes are planted into."""
    return (HERE / "planted" / f"{name}.py").read_text()


def planted_mistakes() -> list[Mistake]:
    """List all planted mistakes, and what looks like a mistake and is none."""
    return [*MISTAKES, *(each for check in CHECKS for each in check.planted), *HARMLESS]


def planted_cases() -> dict[str, Case]:
    """Make a case of each mistake in its script, and of each script alone."""
    patience = "--timeout=20"
    cases = []
    for mistake in planted_mistakes():
        script = right_script(mistake.script)
        options, files = [patience], {}
        if mistake.original:
            options.append("--original=torchrun --nproc-per-node=1 single.py")
            files["single.py"] = replace_once(script, *mistake.original)
        changed = replace_once(script, *mistake.changes)
        says = mistake.verdict, mistake.check
        cases.append(Case(mistake.name, changed, *says, options=tuple(options), files=files))
    for file in sorted((HERE / "planted").glob("*.py")):
        for ranks in RANKS:
            command = (*TORCHRUN[:-1], f"--nproc-per-node={ranks}", "train.py")
            name = f"clean {file.stem}, {ranks} ranks"
            cases.append(Case(name, file.read_text(), command=command, options=(patience,)))
    return {case.name: case for case in cases}
