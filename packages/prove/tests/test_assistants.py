"""The page on assistants, and prove's own, say what the results say."""

import json
import re
from statistics import median

import pytest

from prove_cases import PACKAGE

PAGE = (PACKAGE / "evidence/assistants.md").read_text()
ROWS = json.loads((PACKAGE / "evidence/results/assistants.json").read_text())["rows"]


def rows_of(guided: bool) -> list[dict]:
    return [row for row in ROWS if (row["guide"] != "none") == guided]


@pytest.mark.parametrize(("guided", "column"), [(True, 2), (False, 3)])
def test_the_page_shows_every_script_with_minutes_and_status(guided, column):
    rows = rows_of(guided)
    cells = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| [")]
    assert len(rows) == len(cells) == 8
    for row, line in zip(rows, cells, strict=True):
        assert row["repository"] in line[0]
        assert line[column - 1].startswith("right") == (row["silent_mistakes"] == 0)
        [minutes] = re.findall(r"(\d+) minutes", line[column - 1])
        assert abs(int(minutes) - row["minutes"]) <= 0.5
        statuses = re.findall(r"status (\d)", line[column - 1])
        assert statuses == [str(row["prove_status"])] * guided


def test_both_pages_have_the_totals_of_the_results():
    counts = []
    for guided in (True, False):
        rows = rows_of(guided)
        counts.append((sum(row["silent_mistakes"] > 0 for row in rows), len(rows)))
        counts.append(round(median(row["minutes"] for row in rows)))
    (wrong, of), minutes, (wrong_without, of_without), minutes_without = counts
    totals = f"{wrong} of {of} with SKILL.md, {wrong_without} of {of_without} without"
    assert f"{totals}. Minutes (median): {minutes} with, {minutes_without} without" in PAGE
    assert (
        f"in {minutes} and {minutes_without} minutes (median)"
        in (PACKAGE / "README.md").read_text()
    )
