"""Every picture of a README is what its results look like today."""

import json
import re
import sys

import pytest
from PIL import Image
from readmes import READMES
from support import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from pictures import DRAWN_BY, draw_of

import timing

RESULTS = ROOT / "results"


@pytest.mark.parametrize("name", DRAWN_BY)
def test_a_picture_is_not_older_than_its_results(name):
    with Image.open(RESULTS / f"{name}.png") as picture:
        assert picture.text["made of"] == timing.made_of(name, draw_of(name)), "run: make readme"


def test_a_picture_is_stale_when_its_results_or_its_program_have_changed(tmp_path, monkeypatch):
    """The control, with a picture of its own."""
    monkeypatch.setattr(timing, "RESULTS", tmp_path)

    def draw(results, path):
        Image.new("RGB", (results["width"], 1)).save(path)

    def draw_otherwise(results, path):
        Image.new("RGB", (1, results["width"])).save(path)

    timing.save(tmp_path / "one.json", {"width": 2})
    timing.draw_picture("one", draw)
    with Image.open(tmp_path / "one.png") as picture:
        assert picture.size == (2, 1)
        kept = picture.text["made of"]
    assert kept == timing.made_of("one", draw)
    assert kept != timing.made_of("one", draw_otherwise)
    timing.save(tmp_path / "one.json", {"width": 3})
    assert kept != timing.made_of("one", draw)


def test_every_picture_is_shown_and_can_be_drawn_again():
    shown = {
        name for path in READMES for name in re.findall(r"results/(\w+)\.png", path.read_text())
    }
    assert shown == set(DRAWN_BY) == {path.stem for path in RESULTS.glob("*.png")}


def test_every_result_tells_where_it_comes_from():
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        about = (
            found["provenance"]
            if path.stem != "tour"
            else found | next(iter(found["rows"].values()))
        )
        assert {"hardware", "torch", "python", "commit", "date"} <= about.keys(), path.name
