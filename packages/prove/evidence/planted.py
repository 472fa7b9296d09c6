"""Mistakes, and what looks like a mistake and is none: each is planted alone in a right script.

planted/NAME.diff holds changes of right_scripts/NAME. A blank line is between two of them, and each
begins with what prove must say of it and what it is called:

    WRONG, one rank: a sum as the loss

In a second line, `original: NAME` is the script for one GPU with which prove compares it. A mistake
of which one check speaks stands with this check, as PLANTED.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from evidence.case import Case
from evidence.changes import apply_diff, replace_once
from evidence.run_prove import TORCHRUN
from prove.checks import CHECKS

PLANTED = Path(__file__).parent / "planted"
SCRIPTS = Path(__file__).parent / "right_scripts"
RANKS = (1, 2, 3)  # numbers of ranks on which the five right scripts are judged
PATIENCE = "--timeout=20"
CHANGE = re.compile(
    r"(?P<verdict>right|WRONG|warning)(, (?P<check>.+?))?: (?P<name>.+)\n"
    r"(original: (?P<original>.+)\n)?"
    r"(?P<diff>(?:[@ +-].*\n)*)"
)


def right_script(name: str) -> str:
    """Read a right script. A variant such as own_step.masters is a diff of what the dot follows."""
    base, _, _ = name.rpartition(".")
    if not base:
        return (SCRIPTS / f"{name}.py").read_text()
    return apply_diff(right_script(base), (SCRIPTS / f"{name}.diff").read_text())


def changed_scripts() -> Iterator[Case]:
    """Make a case of each change in the folder planted."""
    for file in sorted(PLANTED.glob("*.diff")):
        script = right_script(file.stem)
        for text in re.split(r"(?<=\n)\n", file.read_text()):
            change = CHANGE.fullmatch(text)
            if not change:
                raise ValueError(f"{file.name}: expected a verdict, a name and a diff, got {text}")
            options, files = [PATIENCE], {}
            if change["original"]:
                options.append("--original=torchrun --nproc-per-node=1 single.py")
                files["single.py"] = right_script(change["original"])
            changed = apply_diff(script, change["diff"])
            says = change["verdict"], change["check"] or ""
            yield Case(change["name"], changed, *says, options=tuple(options), files=files)


def planted_cases() -> dict[str, Case]:
    """Make a case of each mistake in its script, and of each script alone."""
    cases = [*changed_scripts()]
    for mistake in (each for check in CHECKS for each in check.planted):
        changed = replace_once(right_script(mistake.script), *mistake.changes)
        cases.append(
            Case(mistake.name, changed, mistake.verdict, mistake.check, options=(PATIENCE,))
        )
    for file in sorted(SCRIPTS.glob("*.py")):
        for ranks in RANKS:
            command = (*TORCHRUN[:-1], f"--nproc-per-node={ranks}", "train.py")
            name = f"clean {file.stem}, {ranks} ranks"
            cases.append(Case(name, file.read_text(), command=command, options=(PATIENCE,)))
    return {case.name: case for case in cases}
