"""Reported mistakes: the page is what was counted, and prove still says it of three of them."""

import difflib
import json
import shutil

import pytest

from common.chapters import load_program
from prove_runs import run

count_seen = load_program("packages", "prove/evidence/reported/count_seen")
PAIRS = count_seen.pairs()
REPRESENTATIVES = ("loss_times_ranks", "unwrapped_to_call", "stream_of_lines")


def changed_lines(pair) -> int:
    right, fault = (pair.source(name).splitlines() for name in ("right.py", "train.py"))
    return sum(line[0] in "+-" for line in list(difflib.unified_diff(right, fault, n=0))[2:])


def test_the_page_is_what_the_results_say(tmp_path, monkeypatch):
    assert count_seen.PAGE.read_text() == count_seen.page()
    shutil.copytree(count_seen.RESULTS, tmp_path / "results")
    before = tmp_path / "results" / "before.json"
    before.write_text(before.read_text().replace('"WRONG"', '"warning"', 1))
    monkeypatch.setattr(count_seen, "RESULTS", tmp_path / "results")
    assert count_seen.PAGE.read_text() != count_seen.page()


def test_each_pair_was_counted():
    """First in one of the first counts."""
    names = sorted(pair.name for pair in PAIRS)
    assert names == sorted(path.name for path in (count_seen.HERE / "pairs").iterdir())
    assert names == sorted(count_seen.load("now")["pairs"])
    first_counts = [count_seen.load(results)["pairs"] for results in count_seen.FIRST_COUNTS]
    assert names == sorted(name for counted in first_counts for name in counted)
    assert set(count_seen.load("torch_debug")["pairs"]) == set(first_counts[0])


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_pair_has_a_public_report_and_differs_by_few_lines(pair):
    assert pair.report.startswith("https://github.com/")
    assert pair.report.rsplit("/", 2)[1] in ("issues", "pull")
    assert pair.fault.endswith(".")
    assert 0 < changed_lines(pair) <= 12


def test_a_cure_is_put_in_at_one_place_only():
    diff = "--- a\n+++ b\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
    assert count_seen.apply_diff("zero\none\ntwo\n", diff) == "zero\none\nthree\n"
    for source in ("one\n", "one\ntwo\none\ntwo\n"):
        with pytest.raises(ValueError, match="expected once"):
            count_seen.apply_diff(source, diff)


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_prove_repeats_the_verdicts_that_were_counted(name, tmp_path):
    (pair,) = count_seen.pairs([name])
    counted = count_seen.load("now")["pairs"][name]
    for file, kind in (("train.py", "fault"), ("right.py", "cure")):
        command = count_seen.command_of(pair.write_to(file, tmp_path))
        run(tmp_path, "--json=table.json", *command)
        rows = json.loads((tmp_path / "table.json").read_text())["rows"]
        wrong = {row["check"] for row in rows if row["verdict"] == "WRONG"}
        assert wrong == set(counted[kind]["rows"].get("WRONG", []))
        assert bool(wrong) is (kind == "fault")
