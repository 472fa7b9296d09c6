"""Scripts that stop and go on: each was counted, and prove still judges three of them the same."""

import json

import pytest

from evidence.reported_page import load
from evidence.resume_oracle import known_scripts
from evidence.resumed import SCRIPTS, judge_resumed, resumed_scripts
from evidence.run_prove import RIGHT

SELECTED = ("trainer_snapshot", "mid_epoch/skipped_in_the_loop", "dcp")
FAULTS = ("trainer_snapshot/momentum_not_saved", "mid_epoch/position_lost", "dcp/weights_alone")


@pytest.mark.parametrize("folder", sorted(SCRIPTS.iterdir()), ids=lambda folder: folder.name)
def test_each_diff_has_an_entry_that_says_what_it_is(folder):
    about = json.loads((folder / "about.json").read_text())
    entries = {**about["faults"], **about["right"]}
    assert len(entries) == len(about["faults"]) + len(about["right"])
    assert {file.stem for file in folder.glob("*.diff")} <= {*entries}
    without_diff = {*entries} - {file.stem for file in folder.glob("*.diff")}
    assert all({"resume", "options", "resumed_by"} & {*entries[name]} for name in without_diff)
    assert len(about["faults"]) >= 2
    for sentence in [
        about["shows"],
        *(fault["mistake"] for fault in about["faults"].values()),
        *(right["why"] for right in about["right"].values()),
    ]:
        assert sentence.endswith(".")


def test_each_script_was_counted():
    assert {*resumed_scripts()} == {*load("resume")["cases"]}
    assert {*known_scripts()} == {*load("resume_oracle")["cases"]}


def test_without_prove_each_script_was_as_its_entry_says():
    """No right script changes by a stop, and no outcome differs from what was expected."""
    counted = load("resume_oracle")["cases"]
    assert not [name for name, case in counted.items() if "expected" in case["outcome"]]
    rights = [name for name, each in known_scripts().items() if each.changes == "nothing"]
    assert {counted[name]["outcome"] for name in rights} == {"a stop changes nothing"}


@pytest.mark.parametrize("name", [*SELECTED, *FAULTS])
def test_prove_repeats_the_verdicts_that_were_counted(name):
    judged, counted = judge_resumed(name), load("resume")["cases"][name]
    assert judged.outcome == counted["outcome"]
    expected = "proven" if resumed_scripts()[name].verdict == RIGHT else "found as WRONG"
    assert judged.outcome == expected
