"""What is judged: scripts with a mistake and without one, each with what prove must say of it."""

from dataclasses import dataclass, field
from pathlib import Path

from planted.mistakes import HARMLESS, MISTAKES, Mistake

HERE = Path(__file__).resolve().parent
RIGHT, WRONG, WARNING, NOT_SEEN = "right", "WRONG", "warning", "not seen"
PROOF = "one rank"  # the row that says whether the training as a whole is right
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2")


@dataclass(frozen=True)
class Case:
    """A script called train.py, how a user starts it, and what prove must say of it."""

    name: str
    script: str
    verdict: str = RIGHT  # of the row `check`; with RIGHT, no row may be WRONG either
    check: str = ""  # "": any row
    command: tuple[str, ...] = (*TORCHRUN, "train.py")
    options: tuple[str, ...] = ()  # of prove
    cure: str = ""  # the script without its mistake, if prove is to judge that too
    files: dict[str, str] = field(default_factory=dict)  # that lie beside it
    hashes_differ: bool = False  # between the ranks, as with a real torchrun: it takes seconds


def replace_once(text: str, *changes: tuple[str, str]) -> str:
    """The text with each old piece replaced by its new one. Raises ValueError: it is not there, or
    not once."""
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{text.count(old)} times in the script, expected once: {old}")
        text = text.replace(old, new)
    return text


# Mistakes that are planted in five scripts that are right


RANKS = (1, 2, 3)  # on which these five are judged as they are


def right_script(name: str) -> str:
    """One of those that mistakes are planted into."""
    return (HERE / "planted" / f"{name}.py").read_text()


def planted_mistakes() -> list[Mistake]:
    """All of them, and what looks like a mistake and is none."""
    return [*MISTAKES, *HARMLESS]


def planted() -> list[Case]:
    """Each mistake in its script, and the scripts alone."""
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
        if file.stem == "mistakes":
            continue
        for ranks in RANKS:
            command = (*TORCHRUN[:-1], f"--nproc-per-node={ranks}", "train.py")
            name = f"clean {file.stem}, {ranks} ranks"
            cases.append(Case(name, file.read_text(), command=command, options=(patience,)))
    return cases
