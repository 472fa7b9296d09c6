"""What runs in the user's ranks and what judges them share the records, and nothing else.

A check watches and judges, so it is on both sides; of watch/, only observe.py knows the checks.
"""

import re
from pathlib import Path

import prove

PACKAGE = Path(prove.__file__).parent
SIDES = {"watch": "judge|checks|prover|runs|controls", "judge": "watch|checks|processes"}


def crossings(side: str, source: str) -> list[str]:
    """List the lines by which a module of this side imports from the other one."""
    return re.findall(rf"^ *(?:from|import) prove\.(?:{SIDES[side]})\b.*", source, re.M)


def test_what_watches_a_script_and_what_judges_it_share_the_records_alone():
    for side in SIDES:
        modules = [file for file in (PACKAGE / side).glob("*.py") if file.stem != "observe"]
        assert modules
        for file in modules:
            assert crossings(side, file.read_text()) == [], file
    observe = (PACKAGE / "watch" / "observe.py").read_text()
    assert crossings("watch", observe) == ["from prove.checks import CHECKS"], "the control"
