"""Scripts that stop and go on: resume/NAME has a right one, and its changes.

NAME/about.json says how train.py is resumed, and has an entry for each NAME/*.diff: under `faults`,
what is not as without a stop, with the row of `prove --resume` that must say so; under `right`,
what looks suspicious and is right. `changes` is what the oracle must find. Where a stop changes the
weights, prove must say WRONG; where it changes other files or nothing, a warning is enough.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from evidence.case import Case, Counted, judge, run_case
from evidence.changes import apply_diff
from evidence.run_prove import RIGHT, TORCHRUN, WARNING, WRONG

SCRIPTS = Path(__file__).parent / "resume"
PROOF = "resume: weights"  # the row without which nothing is proven
LAUNCHER = shlex.join((*TORCHRUN, "train.py"))


@dataclass(frozen=True)
class Resumed:
    """A script that is resumed, right or with a fault; its name is that of its folder and diff."""

    name: str
    script: str
    resume: str  # arguments of the resumed run; {checkpoint} and {folder} are filled in
    options: tuple[str, ...] = ()  # of prove
    verdict: str = RIGHT  # the least that must be said in the row
    row: str = ""
    changes: str = "nothing"  # by a stop: weights, files, printed, failure, by chance
    launcher: str = LAUNCHER
    resumed_by: str = LAUNCHER  # what starts the run that goes on
    has_oracle: bool = True  # False: the oracle cannot start it, or what nobody seeds differs

    @property
    def case(self) -> Case:
        resumed = self.resume
        if resumed != "auto":
            resumed = f"{self.resumed_by} {self.resume}".rstrip()
        return Case(
            self.name,
            self.script,
            self.verdict,
            self.row,
            command=tuple(shlex.split(self.launcher)),
            options=(f"--resume={resumed}", *self.options),
            proof=PROOF,
        )


def resumed_scripts() -> dict[str, Resumed]:
    """All scripts by name: plain_dict is right, and plain_dict/epoch_repeated is not."""
    scripts = [each for folder in sorted(SCRIPTS.iterdir()) for each in scripts_of(folder)]
    return {script.name: script for script in scripts}


def scripts_of(folder: Path) -> list[Resumed]:
    """The script as it is, and then each of its changes."""
    about = json.loads((folder / "about.json").read_text())
    right = (folder / "train.py").read_text()
    found = [Resumed(folder.name, right, about["resume"], tuple(about.get("options", ())))]
    for name, change in {**about["faults"], **about["right"]}.items():
        diff, settings = folder / f"{name}.diff", {**about, **change}
        script = Resumed(
            f"{folder.name}/{name}",
            apply_diff(right, diff.read_text()) if diff.exists() else right,
            settings["resume"],
            tuple(settings.get("options", ())),
            change.get("verdict", RIGHT),
            change.get("row", ""),
            change["changes"],
            settings.get("launcher", LAUNCHER),
            settings.get("resumed_by", settings.get("launcher", LAUNCHER)),
            has_oracle=settings.get("oracle", True) and settings["resume"] != "auto",
        )
        found.append(script)
    return found


def judge_resumed(name: str) -> Counted:
    """Let prove judge a script. A fault must be found in its row, because others follow from it."""
    script = resumed_scripts()[name]
    if script.verdict == RIGHT:
        return judge(script.case)
    answer = run_case(script.case, script.script)
    said = next((each for each in (WRONG, WARNING) if script.row in answer.checks(each)), "")
    outcome = f"found as {said}" if said else "missed"
    if not said and answer.is_wrong:
        outcome = "WRONG in another row"
    elif said == WARNING and script.verdict == WRONG:
        outcome = "only a warning"
    is_found = outcome.startswith("found")
    return Counted(outcome, is_found, {"script": answer})
