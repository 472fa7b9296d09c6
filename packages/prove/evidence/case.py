"""A script with the verdict that prove must give, and the judgment of prove's answer."""

from dataclasses import dataclass, field

from evidence.run_prove import PROOF, RIGHT, TORCHRUN, WRONG, Answer, run_prove


@dataclass(frozen=True)
class Case:
    """A script called train.py, the command that starts it, and the expected verdict."""

    name: str
    script: str
    verdict: str = RIGHT  # verdict of the row `check`; with RIGHT, no row may be WRONG
    check: str = ""  # "" stands for any row
    command: tuple[str, ...] = (*TORCHRUN, "train.py")
    options: tuple[str, ...] = ()  # options of prove
    cure: str = ""  # the script without its mistake, if prove judges it, too
    files: dict[str, str] = field(default_factory=dict)  # files that lie beside the script
    hashes_differ: bool = False  # by rank, as with a real torchrun, which takes seconds
    proof: str = PROOF  # the row that must be right in a right script


@dataclass
class Counted:
    """The outcome of a case in a few words, with the answers that led to it."""

    outcome: str
    is_as_expected: bool
    answers: dict[str, Answer] = field(default_factory=dict)  # "script", and "cure" if judged
    facts: dict = field(default_factory=dict)


def run_case(case: Case, script: str) -> Answer:
    return run_prove(script, case.command, case.options, case.files, case.hashes_differ)


def judge(case: Case) -> Counted:
    answer = run_case(case, case.script)
    if case.cure:
        cured = run_case(case, case.cure)
        outcome = f"{said_of_mistake(answer, cured)}; {said_of_cure(cured, case.proof)}"
        return Counted(outcome, not cured.is_wrong, {"script": answer, "cure": cured})
    is_said = is_as_expected(case, answer)
    if case.verdict != RIGHT:
        outcome = f"found as {case.verdict}" if is_said else "missed"
    elif answer.is_wrong:
        outcome = "called WRONG"
    else:
        is_proven = answer.status == 0 and answer.proves(case.proof)
        outcome = "proven" if is_proven else "not proven"
    return Counted(outcome, is_said, {"script": answer})


def is_as_expected(case: Case, answer: Answer) -> bool:
    """Does the named row have this verdict, and is nothing WRONG in a right script?"""
    if case.verdict == RIGHT and (answer.error or answer.is_wrong):
        return False
    said = answer.checks(case.verdict)
    if case.check:
        return case.check in said
    return case.verdict == RIGHT or bool(said)  # a run of one rank may have no right row


def said_of_mistake(script: Answer, cured: Answer) -> str:
    """Is the mistake seen: is a row WRONG, or a warning that the cured script lacks?"""
    if not script.rows:
        return "no table"
    if script.is_wrong:
        return f"**WRONG** {', '.join(script.checks(WRONG))}"
    return ", ".join(f"warning {check}" for check in script.new_warnings(cured)) or "missed"


def said_of_cure(cured: Answer, proof: str = PROOF) -> str:
    if not cured.rows:
        return "no table"
    if cured.is_wrong:
        return f"**false** {', '.join(cured.checks(WRONG))}"
    return "proven" if proof in cured.checks(RIGHT) else "not proven"
