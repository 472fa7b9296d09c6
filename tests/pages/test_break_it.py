"""Each "break it" of a page: leave the line out, or make the change, and the named test fails."""

import pytest

from break_it import file_of, rows_of
from common.chapters import ROOT, load_program
from common.ranks import RankError
from helpers.local_ranks import run_script
from helpers.stage_files import LESSON_FOLDERS, changed_source

ROWS = [row for key in LESSON_FOLDERS for row in rows_of(key)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.key} {row.change[1].strip()[:40]}")
def test_with_the_change_the_test_fails(row):
    assert row.test.startswith(f"test_{row.key}_"), "a test of another stage"
    file, tests = row.change[0], file_of(row.test)
    module = load_program(str(tests.parent.relative_to(ROOT)), tests.stem)
    # Here, not only in the claim: there, a missing line would look like a failing test.
    compile(changed_source(LESSON_FOLDERS[row.key] / file, [row.change]), file, "exec")
    with pytest.raises((AssertionError, RankError, TimeoutError)) as caught:
        getattr(module, row.test)(without=(row.change,))
    # It fails by what it says, not because the change is no working program.
    slips = ("NameError", "ImportError", "AttributeError", "UnboundLocalError")
    assert not any(slip in str(caught.value) for slip in slips), caught.value


def test_every_stage_has_a_row_and_one_can_be_tried_by_hand():
    assert {row.key for row in ROWS} == set(LESSON_FOLDERS) - {
        "local_sgd",
        "forecast",
    }  # tests change lines
    line, claim = "raise errors[min(errors)]", "test_02_an_error_in_a_replica_reaches_the_caller"
    number = 1 + [row.test for row in rows_of("02")].index(claim)
    [(status, output)] = run_script("tests/pages/break_it.py", "02", str(number))
    where, test, error, verdict = output.splitlines()
    assert where == f"02_data_parallel/from_scratch.py without `{line}`"
    assert test.endswith(f"::{claim}")
    assert error.startswith("E   AssertionError: assert 'shapes cannot be multiplied' in ")
    assert (status, verdict) == (0, "It fails.")
    assert line in (LESSON_FOLDERS["02"] / "from_scratch.py").read_text()
