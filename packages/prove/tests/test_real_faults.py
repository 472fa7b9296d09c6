"""Reported mistakes: the page is what was counted, and prove still says it of three of them."""

import difflib
import json
import shutil

import pytest

from common.chapters import load_chapter
from helpers.prove_runs import run

run_faults = load_chapter("packages", "prove/faults/run_faults")
PAIRS = run_faults.pairs()
REPRESENTATIVES = ("loss_times_ranks", "unwrapped_to_call", "stream_of_lines")


def changed_lines(pair) -> int:
    right, fault = (pair.source(name).splitlines() for name in ("right.py", "train.py"))
    return sum(line[0] in "+-" for line in list(difflib.unified_diff(right, fault, n=0))[2:])


def test_the_page_is_what_the_results_say(tmp_path, monkeypatch):
    assert run_faults.PAGE.read_text() == run_faults.page()
    shutil.copytree(run_faults.RESULTS, tmp_path / "results")
    first = tmp_path / "results" / "first.json"
    first.write_text(first.read_text().replace('"WRONG"', '"warning"', 1))
    monkeypatch.setattr(run_faults, "RESULTS", tmp_path / "results")
    assert run_faults.PAGE.read_text() != run_faults.page()


def test_each_pair_was_counted():
    names = {pair.name for pair in PAIRS}
    assert names == {path.name for path in (run_faults.HERE / "pairs").iterdir()}
    for which in ("first", "detail"):
        assert names == set(run_faults.load(which)["pairs"])


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_pair_has_a_public_report_and_differs_by_few_lines(pair):
    assert pair.report.startswith("https://github.com/")
    assert pair.report.rsplit("/", 2)[1] in ("issues", "pull")
    assert pair.fault.endswith(".")
    assert 0 < changed_lines(pair) <= 12


def test_a_cure_is_put_in_at_one_place_only():
    diff = "--- a\n+++ b\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
    assert run_faults.cured("zero\none\ntwo\n", diff) == "zero\none\nthree\n"
    for source in ("one\n", "one\ntwo\none\ntwo\n"):
        with pytest.raises(ValueError, match="expected once"):
            run_faults.cured(source, diff)


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_prove_says_it_again(name, tmp_path):
    (pair,) = run_faults.pairs([name])
    counted = (run_faults.load("last") or run_faults.load("first"))["pairs"][name]
    for file, kind in (("train.py", "fault"), ("right.py", "cure")):
        command = run_faults.command_of(pair.put(file, tmp_path))
        run(tmp_path, "--json=table.json", *command)
        rows = json.loads((tmp_path / "table.json").read_text())["rows"]
        wrong = {row["check"] for row in rows if row["verdict"] == "WRONG"}
        assert wrong == set(counted[kind]["rows"].get("WRONG", []))
        assert bool(wrong) is (kind == "fault")
