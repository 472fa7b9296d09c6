"""Reported mistakes: the page shows the counts, and prove still judges two cases the same."""

import difflib
import json
import shutil

import pytest

from evidence import reported_page
from evidence.changes import apply_diff
from evidence.reported import Story, stories, story
from prove_runs import run

SETS = {"reported-50": "reported_before", "reported-20": "reported_before_second"}
STORIES = stories(*SETS)
REPRESENTATIVES = ("loss_times_ranks", "unwrapped_to_call")


def changed_lines(story: Story) -> int:
    right, mistaken = story.cure.splitlines(), story.script.splitlines()
    return sum(line[0] in "+-" for line in list(difflib.unified_diff(right, mistaken, n=0))[2:])


def test_the_page_is_what_the_results_say(tmp_path, monkeypatch):
    assert reported_page.PAGE.read_text() == reported_page.page()
    shutil.copytree(reported_page.RESULTS, tmp_path / "results")
    before = tmp_path / "results" / "reported_before.json"
    before.write_text(before.read_text().replace('"WRONG"', '"warning"', 1))
    monkeypatch.setattr(reported_page, "RESULTS", tmp_path / "results")
    assert reported_page.PAGE.read_text() != reported_page.page()


def test_each_pair_was_counted():
    """Each story is in the present count, and in the first count of its set."""
    assert {story.name for story in STORIES} == {*reported_page.load("reported")["cases"]}
    for name, results in SETS.items():
        assert len(stories(name)) == int(name.removeprefix("reported-"))
        counted = {*reported_page.load(results)["cases"]}
        assert {story.name for story in stories(name)} == counted


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_pair_has_a_public_report_and_differs_by_few_lines(story):
    assert story.report.startswith("https://github.com/")
    assert story.report.rsplit("/", 2)[1] in ("issues", "pull")
    assert story.mistake.endswith(".")
    assert 0 < changed_lines(story) <= 12


def test_a_cure_is_put_in_at_one_place_only():
    diff = "--- a\n+++ b\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
    assert apply_diff("zero\none\ntwo\n", diff) == "zero\none\nthree\n"
    for source in ("one\n", "one\ntwo\none\ntwo\n"):
        with pytest.raises(ValueError, match="expected once"):
            apply_diff(source, diff)


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_prove_repeats_the_verdicts_that_were_counted(name, tmp_path):
    case, counted = story(name).case, reported_page.load("reported")["cases"][name]
    for kind, script in (("script", case.script), ("cure", case.cure)):
        (tmp_path / "train.py").write_text(script)
        run(tmp_path, "--json=table.json", *case.command)
        rows = json.loads((tmp_path / "table.json").read_text())["rows"]
        wrong = {row["check"] for row in rows if row["verdict"] == "WRONG"}
        assert wrong == set(counted[kind]["rows"].get("WRONG", []))
        assert bool(wrong) is (kind == "script")
