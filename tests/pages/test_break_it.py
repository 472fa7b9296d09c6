"""Each "break it" of a page: leave the line out, or make the change, and the named test fails.

Where a page tells the number that the test then prints, it prints that number.
"""

import re
from importlib import import_module

import pytest

from break_it import file_of, rows_of
from helpers.outputs import differences
from local_ranks.ranks import RankError
from local_ranks.scripts import run_script
from local_ranks.stage_files import LESSON_FOLDERS, changed_source
from markers import fences

ROWS = [row for key in LESSON_FOLDERS for row in rows_of(key)]
NUMBERED = {"01": 0, "03": 0, "04": 0, "05": 1}  # which row: the first lesson of 05 has no number
# What a row of the README finds, which the page tells: "0.77 apart where 1e-10 was allowed".
NUMBER = re.compile(r"(\d\.\d+)\b[^.\n]*? where (\S+) was allowed")
NUMBERS = {key: NUMBER.search((LESSON_FOLDERS[key] / "README.md").read_text()) for key in NUMBERED}
SHARE = 0.02  # another CPU's number may differ so much from the page's


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.key} {row.change[1].strip()[:40]}")
def test_with_the_change_the_test_fails(row, monkeypatch):
    assert row.test.startswith(f"test_{row.key}_"), "a test of another stage"
    file, tests = row.change[0], file_of(row.test)
    monkeypatch.syspath_prepend(tests.parent)
    module = import_module(tests.stem)
    # Here, not only in the claim: there, a missing line would look like a failing test.
    compile(changed_source(LESSON_FOLDERS[row.key] / file, [row.change]), file, "exec")
    with pytest.raises((AssertionError, RankError, TimeoutError)) as caught:
        getattr(module, row.test)(changes=(row.change,))
    # It fails by what it says, not because the change is no working program.
    slips = ("NameError", "ImportError", "AttributeError", "UnboundLocalError")
    assert not any(slip in str(caught.value) for slip in slips), caught.value
    if (number := NUMBERS.get(row.key)) and row == rows_of(row.key)[NUMBERED[row.key]]:
        printed = str(caught.value).splitlines()[0]
        assert differences(f"assert {number[1]} < {number[2]}", printed, SHARE) == []


def test_every_stage_has_a_row_and_one_prints_by_hand_what_its_page_shows():
    changed_by_tests = {"local_sgd", "forecast"}
    assert {row.key for row in ROWS} == {*LESSON_FOLDERS} - changed_by_tests
    assert all(NUMBERS.values()), "the page no longer tells the number"
    [shown] = [f for f in fences("text", [LESSON_FOLDERS["03"] / "README.md"]) if "E   " in f.text]
    [(status, output)] = run_script("tests/pages/break_it.py", "03", "1")
    assert (status, differences(shown.text, output, SHARE)) == (0, [])
    assert rows_of("03")[0].change[1] in (LESSON_FOLDERS["03"] / "train.py").read_text()
